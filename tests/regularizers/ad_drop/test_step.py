"""AD-DROP's step against the paper's two passes over materialized attention maps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attn_reg_plugin import ADDrop, recording
from attn_reg_plugin.attention.selection import find_sites
from attn_reg_plugin.regularizers.ad_drop.ad_drop import AGAINST_UNDERFLOW
from attn_reg_plugin.regularizers.base.hooks.forward import Forward
from tests.attention.literal import check_region, loop_candidates
from tests.attention.tiny_model import PAD, Materialized, attentions, loss_of, tokens


def attributed_maps(model, arguments, mask):
    """The first pass: the pseudo labels and B = ∂F/∂A, by autograd."""
    with Materialized(model) as first:
        logits = model(*arguments)
    best = logits.log_softmax(-1).amax(-1) if logits.dim() == 3 else logits.amax(-1)
    gradients = torch.autograd.grad(best[mask].sum(), list(first.maps.values()))
    return dict(zip(first.maps, gradients, strict=True)), first.valid


def literal_step(model, arguments, mask, p, sites, loss):
    """Compute both passes with q = 1: probe, attribute, drop every candidate, train."""
    attributions, valid = attributed_maps(model, arguments, mask)
    keep = {name: ~loop_candidates(attributions[name], valid[name], p) for name in sites}
    with Materialized(model, keep):
        value = loss(model(*arguments))
    return value, torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)


def assert_same_step(ours, ours_gradients, expected, expected_gradients):
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    for actual, literal in zip(ours_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, literal, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("p", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(
    "build, sites",
    [
        *(
            (build, sites)
            for build in ("translator", "dropping_translator")
            for sites in ("*", "encoder.self", "decoder.cross[1] encoder.self[0]")
        ),
        ("classifier", "encoder.self"),
    ],
)
def test_one_step_is_the_literal_one(build, p, sites, batch, request):
    model, gold = request.getfixturevalue(build), torch.tensor([0, 2, 1, 0])
    names, mask = [site.name for site in find_sites(model, sites)], batch[1].ne(PAD)
    inputs, loss_of_outputs = batch, lambda outputs: loss_of(outputs, batch[1])
    if build == "classifier":
        inputs, mask = (tokens([6, 4, 1, 3], 6),), torch.ones(4, dtype=torch.bool)
        loss_of_outputs = lambda outputs: F.cross_entropy(outputs, gold)  # noqa: E731
    torch.manual_seed(1)
    expected, gradients = literal_step(model, inputs, mask, p, names, loss_of_outputs)
    plain = loss_of_outputs(model(*inputs))
    with ADDrop(p=p, q=1.0, sites=sites, cross_tuning="off").attach(model) as regularizer:
        regularizer.supply(**({} if build == "classifier" else {"token_mask": mask}))
        torch.manual_seed(1)
        loss = loss_of_outputs(model(*inputs))
        loss.backward()
    assert_same_step(loss, [parameter.grad for parameter in model.parameters()], expected, gradients)
    assert not loss.allclose(plain)


def test_a_site_that_f_does_not_read_keeps_all_on_its_own_device():
    """Wherever tensors are made for which no device is named."""
    layers = [nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) for _ in range(2)]
    model, inputs = nn.ModuleDict({"unread": layers[0], "read": layers[1]}), torch.randn(2, 5, 8)
    model.forward = lambda given: (model["unread"](given), model["read"](given).mean(1))[1]
    with ADDrop(sites="*@unread", cross_tuning="off").attach(model):
        expected = model(inputs)
        with torch.device("meta"):
            assert torch.equal(model(inputs), expected)


def test_gold_labels_are_attributed(translator, batch):
    masks = []
    for objective in (None, lambda o, i: -loss_of(o, batch[1]) * batch[1].ne(PAD).sum()):
        options = {"labels": "gold"} if objective is None else {"objective": objective}
        regularizer = ADDrop(p=0.5, q=1.0, sites="encoder.self", cross_tuning="off", **options)
        with regularizer.attach(translator):
            regularizer.supply(targets=batch[1], token_mask=batch[1].ne(PAD))
            translator(*batch)
            assert all(parameter.grad is None and parameter.requires_grad for parameter in translator.parameters())
            masks.append([site.keep for site in regularizer.attached_sites])
    real = batch[0].ne(PAD)
    for first, second in zip(*masks, strict=True):
        assert first.transpose(1, 2)[real].equal(second.transpose(1, 2)[real])


@pytest.mark.parametrize("attribution", ["attention", "one uniform step"])
def test_the_map_or_its_product_with_the_gradient_is_attributed(attribution, translator, batch):
    """Integrated gradients of one uniform step are the gradient times the map."""
    mask = batch[1].ne(PAD)
    attributions, valid = attributed_maps(translator, batch, mask)
    with Materialized(translator) as plain, torch.no_grad():
        translator(*batch)
    options = {"attribution": "integrated", "integrated_steps": 1} if attribution != "attention" else {}
    options = {"attribution": "attention", **options, "p": 0.4, "q": 1.0, "sites": "*", "cross_tuning": "off"}
    with ADDrop(**options).attach(translator) as regularizer:
        regularizer.supply(token_mask=mask)
        translator(*batch)
        for site in regularizer.attached_sites:
            there, keep, weights = valid[site.name].expand(site.keep.shape), site.keep, plain.maps[site.name]
            if attribution == "attention":
                check_region(there & ~keep, weights, there, 0.4)
            else:
                expected = ~loop_candidates(weights * attributions[site.name], there, 0.4) & there
                matters = attributions[site.name].ne(0).any(-1)  # other rows are all ties
                assert keep[matters].equal(expected[matters])


@pytest.mark.parametrize("kind", ["classes", "tokens"])
def test_the_path_follows_the_first_passs_labels(kind, classifier, translator, batch):
    """Completeness with pseudo labels, Σ B = F(A) - F(0), on models whose argmax is another one along the path."""
    model = classifier if kind == "classes" else translator
    inputs = batch if kind == "tokens" else (tokens([6, 4, 5, 3, 6, 2], 6),)
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
    labels = first.argmax(-1, keepdim=True)
    assert (last.argmax(-1, keepdim=True) != labels).any()

    def value(outputs):
        chances = outputs.log_softmax(-1) if kind == "tokens" else outputs
        return AGAINST_UNDERFLOW * float(chances.gather(-1, labels).sum())

    sums = {}
    for mode, steps in (("frozen", 24), ("frozen", 48), ("renewed", 48)):
        options = {"attribution": "integrated", "integrated_path": "joint", "integrated_steps": steps, "sites": "*"}
        regularizer = ADDrop(cross_tuning="off", integrated_labels=mode, **options)
        with regularizer.attach(model):
            sites = regularizer.attached_sites
            forward = Forward(model, inputs, {})
            with recording(sites, needs_weights=True):
                attributed = {site.name: given for site, _, given in regularizer.attributions(forward)[0]}
        assert there.maps.keys() == attributed.keys()
        sums[mode, steps] = float(sum(attribution.sum() for attribution in attributed.values()))
    coarse, fine, renewed = sums.values()
    assert 2 * fine - coarse == pytest.approx(value(first) - value(last), rel=1e-2), "without the error of first order"
    assert abs(renewed - fine) > 0.01 * abs(fine)
