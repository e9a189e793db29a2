"""AD-DROP's step against the paper's two passes over materialized attention maps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin import ADDrop, recording
from attn_reg_plugin.attention.selection import find_sites
from attn_reg_plugin.regularizers.base.forward import Forward
from tests.attention.literal import check_region, loop_candidates
from tests.attention.materialized import Materialized
from tests.attention.tiny_model import PAD, SIZE, attentions, loss_of, tokens

EVERY = ["encoder.self[0]", "encoder.self[1]", *(f"decoder.{k}[{i}]" for i in range(2) for k in ("self", "cross"))]


def attributed_maps(model, arguments, mask):
    """The first pass: the pseudo labels and B = ∂F/∂A, by autograd."""
    with Materialized(model) as first:
        logits = model(*arguments)
    best = logits.log_softmax(-1).amax(-1) if logits.dim() == 3 else logits.amax(-1)
    gradients = torch.autograd.grad(best[mask].sum(), list(first.maps.values()))
    return dict(zip(first.maps, gradients, strict=True)), first.valid


def literal_step(model, arguments, mask, p, sites, loss):
    """Both passes with q = 1: probe, attribute, drop every candidate, train."""
    attributions, valid = attributed_maps(model, arguments, mask)
    keep = {name: ~loop_candidates(attributions[name], valid[name], p) for name in sites}
    with Materialized(model, keep):
        value = loss(model(*arguments))
    return value, torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True), keep


def assert_same_step(ours, ours_gradients, expected, expected_gradients):
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    for actual, literal in zip(ours_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, literal, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", ["translator", "dropping_translator"])
@pytest.mark.parametrize("p", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("sites", ["*", "encoder.self", "decoder.cross[1] encoder.self[0]"])
def test_one_step_of_translation(build, p, sites, batch, request):
    model = request.getfixturevalue(build)
    names = [site.name for site in find_sites(model, sites)]
    mask = batch[1].ne(PAD)
    torch.manual_seed(1)
    expected, gradients, _ = literal_step(model, batch, mask, p, names, lambda o: loss_of(o, batch[1]))
    plain = loss_of(model(*batch), batch[1])
    regularizer = ADDrop(p=p, q=1.0, sites=sites, cross_tuning="off")
    with regularizer.attach(model):
        regularizer.supply(token_mask=mask)
        torch.manual_seed(1)
        loss = loss_of(model(*batch), batch[1])
        loss.backward()
    assert_same_step(loss, [parameter.grad for parameter in model.parameters()], expected, gradients)
    assert not loss.allclose(plain)


def test_one_step_of_classification(classifier):
    ids, gold = tokens([6, 4, 1, 3], 6), torch.tensor([0, 2, 1, 0])
    everyone = torch.ones(4, dtype=torch.bool)
    expected, gradients, keep = literal_step(
        classifier, (ids,), everyone, 0.4, EVERY[:2], lambda o: F.cross_entropy(o, gold)
    )
    with ADDrop(p=0.4, q=1.0, cross_tuning="off").attach(classifier) as regularizer:
        loss = F.cross_entropy(classifier(ids), gold)
        loss.backward()
        real = ids.ne(PAD)
        expected_keep = keep["encoder.self[0]"] & real[:, None, None, :]
        ours = regularizer.attached_sites[0].keep
        assert ours.transpose(1, 2)[real].equal(expected_keep.transpose(1, 2)[real])
    assert_same_step(loss, [parameter.grad for parameter in classifier.parameters()], expected, gradients)


def test_random_drops_are_candidates_and_the_loss_is_that_of_the_mask(translator, batch):
    mask = batch[1].ne(PAD)
    attributions, valid = attributed_maps(translator, batch, mask)
    regularizer = ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off")
    torch.manual_seed(4)
    with regularizer.attach(translator):
        regularizer.supply(token_mask=mask)
        loss = loss_of(translator(*batch), batch[1])
        loss.backward()
        keep = {site.name: site.keep.clone() for site in regularizer.attached_sites}
        taken = regularizer.statistics.take()
    with Materialized(translator, keep):
        expected = loss_of(translator(*batch), batch[1])
        gradients = torch.autograd.grad(expected, list(translator.parameters()))
    assert_same_step(loss, [parameter.grad for parameter in translator.parameters()], expected, gradients)
    for name in EVERY:
        exists = valid[name].expand(keep[name].shape)
        dropped = exists & ~keep[name]
        region = loop_candidates(attributions[name], valid[name], 0.5)
        matters = attributions[name].ne(0).any(-1, keepdim=True)  # other rows are all ties
        assert not (keep[name] & ~exists).any()
        assert not (dropped & ~region & matters).any()
        assert (taken[f"dropped/{name}"], taken[f"valid/{name}"]) == (int(dropped.sum()), int(exists.sum()))


@pytest.mark.parametrize("sites", ["*", "encoder.self[1]", "decoder.cross[1]"])
def test_the_probe_touches_no_parameter(translator, batch, sites):
    with ADDrop(sites=sites, cross_tuning="off").attach(translator):
        translator(*batch)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in translator.parameters())


def test_gold_labels_are_attributed(translator, batch):
    masks = []
    for objective in (None, lambda o, i: -loss_of(o, batch[1]) * batch[1].ne(PAD).sum()):
        options = {"labels": "gold"} if objective is None else {"objective": objective}
        regularizer = ADDrop(p=0.5, q=1.0, sites="encoder.self", cross_tuning="off", **options)
        with regularizer.attach(translator):
            regularizer.supply(targets=batch[1], token_mask=batch[1].ne(PAD))
            translator(*batch)
            masks.append([site.keep for site in regularizer.attached_sites])
    real = batch[0].ne(PAD)
    for first, second in zip(*masks, strict=True):
        assert first.transpose(1, 2)[real].equal(second.transpose(1, 2)[real])


def test_labels_of_the_forward_are_found_and_missing_ones_refused(classifier):
    ids = tokens([5, 3], 5)
    with ADDrop(labels="gold", cross_tuning="off").attach(classifier) as regularizer:
        classifier(ids, torch.tensor([0, 1]))
        classifier(ids, labels=torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="the objective needs gold labels"):
            classifier(ids)
        regularizer.supply(targets=torch.tensor([0, 1]))
        classifier(ids)
        regularizer.supply()
        with pytest.raises(ValueError, match="the objective needs gold labels"):
            classifier(ids)


def test_attention_weights_are_attributed(translator, batch):
    sites = find_sites(translator, "*")
    with torch.no_grad(), recording(sites, needs_weights=True):
        translator(*batch)
        weights = {site.name: (site.tapes[0].weights, site.tapes[0].valid) for site in sites}
    with ADDrop(p=0.4, q=1.0, sites="*", cross_tuning="off", attribution="attention").attach(translator) as regularizer:
        translator(*batch)
        for site in regularizer.attached_sites:
            attribution, valid = weights[site.name]
            check_region(valid.expand(site.keep.shape) & ~site.keep, attribution, valid, 0.4)


@pytest.mark.parametrize("path", ["site", "joint"])
def test_integrated_gradients_are_attributed(dropping_translator, batch, path):
    mask = batch[1].ne(PAD)
    options = {"attribution": "integrated", "integrated_steps": 3, "integrated_path": path}
    masks = []
    for _ in range(2):
        with ADDrop(p=0.4, q=1.0, sites="*", cross_tuning="off", **options).attach(dropping_translator) as regularizer:
            regularizer.supply(token_mask=mask)
            torch.manual_seed(6)
            loss_of(dropping_translator(*batch), batch[1]).backward()
            masks.append([site.keep for site in regularizer.attached_sites])
            assert regularizer.statistics.take()["fallbacks"] == 0
    for site, first, second in zip(EVERY, *masks, strict=True):
        assert first.equal(second)
        keys, queries = (6, 6) if "encoder" in site else (6 if "cross" in site else 5, 5)
        assert first.shape == (3, 2, queries, keys)


def test_integrated_attribution_of_one_uniform_step_is_the_gradient_times_the_map(translator, batch):
    mask = batch[1].ne(PAD)
    attributions, valid = attributed_maps(translator, batch, mask)
    with Materialized(translator) as plain, torch.no_grad():
        translator(*batch)
    options = {"attribution": "integrated", "integrated_steps": 1}
    with ADDrop(p=0.4, q=1.0, sites="*", cross_tuning="off", **options).attach(translator) as regularizer:
        regularizer.supply(token_mask=mask)
        translator(*batch)
        for site in regularizer.attached_sites:
            product = plain.maps[site.name] * attributions[site.name]
            expected = ~loop_candidates(product, valid[site.name], 0.4) & valid[site.name]
            matters = attributions[site.name].ne(0).any(-1)
            assert site.keep[matters].equal(expected[matters])


class Spans(torch.nn.Module):
    """The classifier's encoder with a first and a last token to find."""

    def __init__(self, classifier):
        super().__init__()
        self.encoder, self.output = classifier.encoder, torch.nn.Linear(SIZE, 2)

    def forward(self, ids):
        start, end = self.output(self.encoder(ids, ids.ne(PAD)[:, None, None, :])).unbind(-1)
        return {"start_logits": start, "end_logits": end}


def logits_in(outputs):
    """The tensors whose argmax is taken."""
    return list(outputs.values()) if isinstance(outputs, dict) else [outputs]


@pytest.mark.parametrize("kind", ["classes", "tokens", "spans"])
def test_the_path_follows_the_first_passs_labels(kind, classifier, translator, batch):
    """Completeness with pseudo labels, Σ B = F(A) - F(0), on models whose argmax is another one along the path."""
    model = {"classes": classifier, "tokens": translator, "spans": Spans(classifier).train()}[kind]
    inputs = batch if kind == "tokens" else (tokens([6, 4, 5, 3, 6, 2], 6),)
    names = [site.name for site in find_sites(model, "*")]
    with torch.no_grad():
        for module in attentions(model).values():
            module.projections[2].weight.mul_(4.0)  # so that what attention reads decides
        with Materialized(model) as there:
            first = model(*inputs)
        for module in attentions(model).values():
            module.attend = lambda name, q, k, v, valid, p: torch.zeros_like(q)
        last = model(*inputs)
        for module in attentions(model).values():
            module.attend = None
    labels = [one.argmax(-1) for one in logits_in(first)]
    changed = [(one.argmax(-1) != label).sum() for one, label in zip(logits_in(last), labels, strict=True)]
    assert all(changed), changed

    def value(outputs):
        total = 0.0
        for one, label in zip(logits_in(outputs), labels, strict=True):
            one = one.log_softmax(-1) if kind == "tokens" else one
            total += float(one.gather(-1, label.unsqueeze(-1)).sum())
        return total

    sums = {}
    for mode in ("frozen", "renewed"):
        options = {"attribution": "integrated", "integrated_path": "joint", "integrated_steps": 24, "sites": "*"}
        regularizer = ADDrop(cross_tuning="off", integrated_nodes="gauss-legendre", integrated_labels=mode, **options)
        with regularizer.attach(model):
            sites = regularizer.attached_sites
            forward = Forward(model, inputs, {})
            with recording(sites, needs_weights=True):
                attributed = {s.name: b for s, _, b, _ in regularizer._integrated_attributions(forward)}
        assert list(attributed) == names and there.maps.keys() == attributed.keys()
        sums[mode] = float(sum(attribution.sum() for attribution in attributed.values()))
    assert sums["frozen"] == pytest.approx(value(first) - value(last), rel=1e-3)
    assert abs(sums["renewed"] - sums["frozen"]) > 0.01 * abs(sums["frozen"])


def test_a_users_own_objective_is_left_alone(classifier):
    """It may renew its labels, and sees what the model was called with."""
    seen = []

    def objective(outputs, inputs):
        seen.append(set(inputs) - {"pseudo_labels"})
        return outputs.amax(-1).sum()

    options = {"attribution": "integrated", "integrated_steps": 2, "objective": objective}
    with ADDrop(cross_tuning="off", **options).attach(classifier):
        classifier(tokens([4, 2], 4))
    assert len(seen) == 5 and all(names == {"tokens"} for names in seen)
