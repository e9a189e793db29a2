"""AD-DROP's probe and masks: what falls back, what is counted, what is drawn, and in which precision."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attn_reg_plugin import ADDrop
from attn_reg_plugin.attention.attribution import map_gradient, output_gradients
from attn_reg_plugin.attention.calls import without_gradients
from tests.attention.tiny_model import PAD, attentions, drawn, loss_of, tokens

EVERY = ["encoder.self[0]", "encoder.self[1]", *(f"decoder.{k}[{i}]" for i in range(2) for k in ("self", "cross"))]
ATTRIBUTIONS = ["gradient", "integrated", "attention", "random"]


def masks_of(model, batch, seed=1, **options):
    """The keep masks of one training forward, by site."""
    options = {"p": 0.5, "q": 0.5, "sites": "*", "cross_tuning": "off", "integrated_steps": 2} | options
    regularizer = ADDrop(**options)
    with regularizer.attach(model):
        regularizer.supply(token_mask=batch[1].ne(PAD))
        torch.manual_seed(seed)
        model(*batch)
        return {site.name: site.keep for site in regularizer.attached_sites}


def valid_of(batch):
    """The valid mask of every site of the translator."""
    source, target = (ids.ne(PAD)[:, None, None, :] for ids in batch)
    causal = torch.ones(target.size(-1), target.size(-1)).tril().bool()
    kinds = {"encoder.self": source, "decoder.self": target & causal, "decoder.cross": source}
    return {name: kinds[name.split("[")[0]] for name in EVERY}


@pytest.mark.parametrize("attribution", ["gradient", "integrated"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_probe_falls_back_to_a_plain_update(translator, batch, attribution, poison):
    plain = loss_of(translator(*batch), batch[1])
    plain.backward()
    expected = [p.grad.clone() for p in translator.parameters()]
    translator.zero_grad()
    options = {"attribution": attribution, "integrated_steps": 2}
    regularizer = ADDrop(
        p=1.0, q=1.0, sites="*", cross_tuning="off", objective=lambda o, i: o.sum() * poison, **options
    )
    with regularizer.attach(translator):
        loss = loss_of(translator(*batch), batch[1])
        loss.backward()
        for site in regularizer.attached_sites:
            assert (site.keep | ~valid_of(batch)[site.name]).all(), "nothing is dropped"
        taken = regularizer.statistics.take()
        assert (taken["fallbacks"], taken["regularized"]) == (1, 1), "an update is counted once"
        assert all(taken[f"dropped/{name}"] == 0 for name in EVERY)
        regularizer.objective = lambda o, i: o.square().sum()
        assert not loss_of(translator(*batch), batch[1]).allclose(plain), "the next update is regularized again"
        assert regularizer.statistics.take()["fallbacks"] == 0
    torch.testing.assert_close(loss, plain)
    for parameter, gradient in zip(translator.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("attribution", ["gradient", "integrated", "attention"])
def test_one_site_that_is_not_finite_makes_the_whole_update_plain(translator, batch, attribution):
    """Upper sites are finite in the probe of a model whose lowest attention overflows only in its gradient."""
    regularizer = ADDrop(p=1.0, q=1.0, sites="*", cross_tuning="off", attribution=attribution, integrated_steps=1)

    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(context, states):
            return states.view_as(states)

        @staticmethod
        def backward(context, gradient):
            return gradient * float("inf")

    first = translator.encoder.layers[0]
    if attribution == "attention":
        first.attentions[0].projections[0].weight.data.fill_(float("nan"))
    else:
        first.norms[0].register_forward_hook(lambda module, args, output: Overflow.apply(output))
    with regularizer.attach(translator):
        translator(*batch)
        for site in regularizer.attached_sites:
            assert (site.keep | ~valid_of(batch)[site.name]).all(), site.name
        assert regularizer.statistics.take()["fallbacks"] == 1


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
@pytest.mark.parametrize("p, q", [(0.5, 0.5), (0.3, 1.0), (1.0, 0.2)])
def test_drop_rates_are_counted_exactly_and_come_out_at_p_times_q(translator, attribution, p, q):
    batch = tokens([10] * 16, 10, seed=3), tokens([10] * 16, 10, seed=4)
    regularizer = ADDrop(
        p=p, q=q, sites="encoder.self decoder.cross", cross_tuning="off", attribution=attribution, integrated_steps=1
    )
    torch.manual_seed(5)
    with regularizer.attach(translator):
        translator(*batch)
        taken = regularizer.statistics.take()
        for site in regularizer.attached_sites:
            total = 16 * 2 * 10 * 10
            assert taken[f"valid/{site.name}"] == total
            rate = float(taken[f"dropped/{site.name}"]) / total
            assert abs(rate - p * q) < 5 * (p * q * (1 - q) / total) ** 0.5 + 1e-6
            if site.keep is not None:
                assert int(taken[f"dropped/{site.name}"]) == int((~site.keep).sum())
    assert taken["forwards"] == taken["regularized"] == 1
    assert ("probe_seconds" in taken) == (attribution != "random")
    assert regularizer.statistics.take() == {}


@pytest.mark.parametrize("path", ["site", "joint"])
def test_every_pass_of_integrated_gradients_repeats_the_dropout(dropping_translator, batch, path):
    """And what models draw by Python's and numpy's random numbers, as those of speech draw spans."""
    outputs = []
    regularizer = ADDrop(
        sites="*",
        cross_tuning="off",
        attribution="integrated",
        integrated_steps=1,  # the whole map: each pass is the first one again
        integrated_path=path,
        objective=lambda o, i: outputs.append(o.detach() + random.random() + np.random.rand()) or o.sum(),
    )
    with regularizer.attach(dropping_translator):
        dropping_translator(*batch)
        dropping_translator(*batch)
    passes = 1 + (6 if path == "site" else 1)
    assert len(outputs) == 2 * passes
    for again in outputs[1:passes]:
        torch.testing.assert_close(again, outputs[0])
    assert not outputs[passes].allclose(outputs[0]), "the next forward draws anew"


def test_random_attribution_draws_a_region_of_the_right_size(translator, batch):
    regularizer = ADDrop(p=0.4, q=1.0, sites="*", cross_tuning="off", attribution="random")
    with regularizer.attach(translator):
        translator(*batch)
        for site in regularizer.attached_sites:
            valid = valid_of(batch)[site.name]
            shape = (3, 2, 6 if site.stack == "encoder" else 5, valid.size(-1))
            draws = [drawn(site.request.sampler, shape, valid) for _ in range(2)]
            assert draws[0].equal(draws[1]), "recomputation must see the same mask"
            valid = valid.expand(shape)
            for exists, kept in zip(valid.sum(-1).flatten().tolist(), draws[0].sum(-1).flatten().tolist(), strict=True):
                assert kept == int(exists * 0.6 + 1e-9)


def test_probe_dropout(dropping_translator, batch):
    modes = []

    def objective(outputs, inputs):
        modes.append({(m.training, m.p) for m in dropping_translator.modules() if isinstance(m, torch.nn.Dropout)})
        return outputs.log_softmax(-1).amax(-1).sum()

    for probe_dropout, expected in ((True, {(True, 0.2)}), (False, {(False, 0.0)})):
        seeds = [
            masks_of(dropping_translator, batch, seed, q=1.0, probe_dropout=probe_dropout, objective=objective)
            for seed in (1, 2)
        ]
        assert modes == [expected] * 2
        same = all(seeds[0][name].equal(seeds[1][name]) for name in EVERY)
        assert same == (not probe_dropout)
        modes.clear()
        assert {(m.training, m.p) for m in dropping_translator.modules() if isinstance(m, torch.nn.Dropout)} == {
            (True, 0.2)
        }


def test_a_bfloat16_probe_is_bfloat16_and_the_training_is_not(translator, batch):
    seen = []
    regularizer = ADDrop(
        cross_tuning="off", probe_dtype="bfloat16", objective=lambda o, i: seen.append(o.dtype) or o.float().sum()
    )
    with regularizer.attach(translator):
        assert translator(*batch).dtype == torch.float32
    assert seen == [torch.bfloat16]


def test_an_attention_that_runs_without_gradients_has_no_attribution():
    """A frozen part of the model, as a teacher beside a student."""
    student = torch.randn(1, 1, 2, 3, requires_grad=True)
    taught, frozen = (SimpleNamespace(output=output) for output in (student, torch.randn(1, 1, 4, 3)))
    found = output_gradients(student.square().sum(), [frozen, taught])
    assert found[0] is None and found[1].equal(2 * student)
    with pytest.raises(ValueError, match="ran without gradients: if it is frozen, choose other sites; if activation "):
        output_gradients(student.square().sum(), [frozen])


class Towers(nn.Module):
    """A teacher that runs without gradients, a student, and one whose output is never used."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) for _ in range(3))

    def forward(self, states):
        with torch.no_grad():
            taught = self.parts[0](states)
        self.parts[2](states)
        return self.parts[1](states + taught).mean(1)


@pytest.mark.parametrize(
    "options", [{}, {"attribution": "integrated"}, {"attribution": "integrated", "integrated_path": "joint"}]
)
def test_nothing_is_dropped_where_there_is_no_gradient(options):
    """Ties would else always lose the same positions."""
    options = {"p": 0.3, "q": 1.0, "sites": "*", "cross_tuning": "off", "integrated_steps": 2} | options
    torch.manual_seed(1)
    model, states = Towers().train(), torch.randn(2, 6, 8)
    with ADDrop(**options, objective=lambda outputs, inputs: outputs.square().sum()).attach(model) as regularizer:
        model(states)
        teacher, student, unused = (site.keep for site in regularizer.attached_sites)
        counted = regularizer.statistics.take()
    assert teacher.all() and unused.all() and not student.all()
    assert [name for name in counted if name.startswith("dropped/")] == ["dropped/encoder.self[1]"]
    refused = pytest.raises(
        ValueError, match="ran without gradients: if it is frozen, choose other sites; if activation "
    )
    with ADDrop(**options | {"sites": "encoder.self[0]"}).attach(model), refused:
        model(states)


def test_tiny_gradients_survive_in_fp16(classifier):
    classifier.half()
    classifier.output.weight.data.mul_(1e-4)
    ids = tokens([6, 5], 6)
    with ADDrop(p=0.4, q=1.0, cross_tuning="off").attach(classifier) as regularizer:
        classifier(ids)
        half = [site.keep for site in regularizer.attached_sites]
    classifier.float()
    with ADDrop(p=0.4, q=1.0, cross_tuning="off").attach(classifier) as regularizer:
        classifier(ids)
        real = ids.ne(PAD)
        for site, keep in zip(regularizer.attached_sites, half, strict=True):
            rows = slice(None) if site.layer == 0 else slice(0, 1)  # only the first state is classified
            agree = (site.keep == keep).transpose(1, 2)[:, rows][real[:, rows]]
            assert agree.float().mean() > 0.85


def test_skipped_layers(translator, batch):
    for attribution in ATTRIBUTIONS:
        for path in ("site", "joint"):
            for sites in ("encoder.self[0]", "*"):
                regularizer = ADDrop(
                    p=0.5,
                    q=1.0,
                    sites=sites,
                    cross_tuning="off",
                    attribution=attribution,
                    integrated_path=path,
                    integrated_steps=1,
                )
                with regularizer.attach(translator):
                    translator.encoder.skip = {0}
                    translator(*batch).sum().backward()
                    assert regularizer.attached_sites[0].keep is None
                    translator.encoder.skip = set()
                    translator(*batch).sum().backward()
                    assert attribution == "random" or regularizer.attached_sites[0].keep is not None


def test_custom_objectives_see_outputs_and_inputs(classifier):
    ids, gold = tokens([5, 3], 5), torch.tensor([0, 1])
    seen = []

    def objective(outputs, inputs):
        seen.append(inputs)
        return -F.cross_entropy(outputs, inputs["labels"])

    with ADDrop(cross_tuning="off", objective=objective).attach(classifier) as regularizer:
        regularizer.supply(batch=1, targets=None)
        classifier(ids, labels=gold)
    assert seen[0].keys() == {"tokens", "labels", "batch"}
    assert seen[0]["tokens"] is ids
    for wrong, message in (
        (lambda o, i: o.sum(-1), r"the objective must be a scalar, but has the shape \(2,\)"),
        (lambda o, i: torch.zeros(()), "the objective depends on no selected attention site"),
    ):
        with ADDrop(cross_tuning="off", objective=wrong).attach(classifier), pytest.raises(ValueError, match=message):
            classifier(ids)


def test_batch_of_one_and_a_single_token(classifier):
    for lengths, size in (([1], 1), ([1], 4), ([4], 4)):
        with ADDrop(p=1.0, q=1.0, cross_tuning="off").attach(classifier):
            output = classifier(tokens(lengths, size))
            output.sum().backward()
            assert output.isfinite().all()
    assert all(module.site.keep is None for module in attentions(classifier).values())


def test_a_bfloat16_probe_within_fp16_autocast_leaves_no_casts(classifier):
    """What either casts of the weights is of no use to the other."""
    seen = []
    regularizer = ADDrop(
        cross_tuning="off", probe_dtype="bfloat16", objective=lambda o, i: seen.append(o.dtype) or o.float().sum()
    )
    with regularizer.attach(classifier), torch.autocast("cpu", torch.float16):
        for _ in range(2):
            seen.append(classifier(tokens([5, 3, 2], 5)).dtype)
    assert seen == [torch.bfloat16, torch.float16] * 2


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
def test_under_autocast_every_parameter_has_its_gradient(classifier, attribution, monkeypatch):
    """A pass without gradients leaves no casts without a graph to the training's own forward: earlier versions of torch
    would take them."""
    cleared, clear = [], torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (cleared.append(torch.is_grad_enabled()), clear()))
    with ADDrop(cross_tuning="off", attribution=attribution).attach(classifier), torch.autocast("cpu", torch.bfloat16):
        loss = classifier(tokens([5, 3, 2], 5)).float().square().sum()
        # autocast itself clears it once, at its end
        assert cleared == ([True] if attribution in ("integrated", "attention") else [])
    loss.backward()
    assert all(parameter.grad is not None for parameter in classifier.parameters())
    with pytest.raises(KeyError), without_gradients():
        raise KeyError
    assert cleared[-1]


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_attributions_are_fp32_under_autocast(grad):
    """The probe's hook runs where the caller's autocast is on."""
    torch.manual_seed(0)
    gradient, value = torch.randn(2, 3, 5, 4).to(grad), torch.randn(2, 3, 6, 4).to(grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attribution = map_gradient(gradient, value)
    assert attribution.dtype == torch.float32
    assert attribution.equal(gradient.float() @ value.float().transpose(-1, -2))


def test_the_fresh_probe_under_autocast_ranks_fp32_attributions(classifier, monkeypatch):
    from attn_reg_plugin.regularizers.ad_drop import ad_drop

    seen, draw = [], ad_drop.sample_keep
    monkeypatch.setattr(ad_drop, "sample_keep", lambda a, *rest, **more: (seen.append(a), draw(a, *rest, **more))[1])
    with ADDrop(sites="*", cross_tuning="off").attach(classifier), torch.autocast("cpu", dtype=torch.bfloat16):
        classifier(tokens([5, 3, 2], 5))
    assert len(seen) == 2
    for attribution in seen:
        assert attribution.dtype == torch.float32 and not attribution.equal(attribution.bfloat16().float())


transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_candidates_of_both_probes_agree_on_97_percent(one_thread: None) -> None:
    """A BERT of the base shape, 12 layers 768 wide, and sentences of 32 to 64 tokens."""
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config).train()
    tokens = torch.randint(5, 1000, (4, 64))
    there = torch.arange(64) < torch.tensor([64, 56, 40, 32]).unsqueeze(1)
    kept = {}
    for dtype in ("same", "bfloat16"):
        regularizer = ADDrop(p=0.3, q=1.0, cross_tuning="off", probe_dtype=dtype)  # what is not kept is a candidate
        with regularizer.attach(model):
            model(input_ids=tokens.masked_fill(~there, 0), attention_mask=there.long())
            kept[dtype] = [site.keep & there[:, None, None] for site in regularizer.attached_sites]
    agree, total = 0, 0
    for layer, (ours, theirs) in enumerate(zip(kept["same"], kept["bfloat16"], strict=True)):
        counts = there[:, None, :, None] & there[:, None, None, :]
        if layer == config.num_hidden_layers - 1:
            counts = counts & (torch.arange(64) == 0)[:, None]  # the head reads the first row alone
        counts = counts.expand_as(ours)
        assert (counts & ~ours).any()
        agree += int((ours == theirs)[counts].sum())
        total += int(counts.sum())
    print(f"{agree / total:.4f} of {total} positions")
    assert agree >= 0.97 * total
