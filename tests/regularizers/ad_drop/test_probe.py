"""AD-DROP's probe and masks: what falls back, what is counted, what is drawn, and in which precision."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attn_reg_plugin import ADDrop
from tests.attention.tiny_model import EVERY, PAD, attentions, drawn, tokens, valid_of
from tests.regularizers.trainings import step

ATTRIBUTIONS = ["gradient", "integrated", "attention", "random"]
WITH_GRADIENTS = pytest.mark.parametrize("attribution", ["gradient", "integrated"])


def everywhere(**options):
    """AD-DROP of every site and update."""
    return ADDrop(**{"sites": "*", "cross_tuning": "off", "integrated_steps": 1, **options})


@WITH_GRADIENTS
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_probe_falls_back_to_a_plain_update(translator, batch, attribution, poison):
    plain = step(translator, batch=batch)
    regularizer = everywhere(p=1.0, q=1.0, attribution=attribution, objective=lambda o, i: o.sum() * poison)
    with regularizer.attach(translator):
        torch.testing.assert_close(step(translator, regularizer, batch=batch), plain)
        for site in regularizer.attached_sites:
            assert (site.keep | ~valid_of(batch)[site.name]).all(), "nothing is dropped"
        taken = regularizer.statistics.take()
        assert (taken["fallbacks"], taken["regularized"]) == (1, 1), "an update is counted once"
        assert all(taken[f"dropped/{name}"] == 0 for name in EVERY)
        regularizer.objective = lambda o, i: o.square().sum()
        assert not step(translator, regularizer, batch=batch)[0].allclose(plain[0]), "the next one is regularized again"
        assert regularizer.statistics.take()["fallbacks"] == 0


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(context, states):
        return states.view_as(states)

    @staticmethod
    def backward(context, gradient):
        return gradient * float("inf")


@pytest.mark.parametrize("attribution", ["gradient", "integrated", "attention"])
def test_one_site_that_is_not_finite_makes_the_whole_update_plain(translator, batch, attribution):
    """Upper sites are finite in the probe of a model whose lowest attention overflows only in its gradient."""
    first = translator.encoder.layers[0]
    if attribution == "attention":
        first.attentions[0].projections[0].weight.data.fill_(float("nan"))
    else:
        first.norms[0].register_forward_hook(lambda module, args, output: Overflow.apply(output))
    with everywhere(p=1.0, q=1.0, attribution=attribution).attach(translator) as regularizer:
        translator(*batch)
        for site in regularizer.attached_sites:
            assert (site.keep | ~valid_of(batch)[site.name]).all(), site.name
        assert regularizer.statistics.take()["fallbacks"] == 1


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
@pytest.mark.parametrize("p, q", [(0.5, 0.5), (0.3, 1.0), (1.0, 0.2)])
def test_drop_rates_are_counted_exactly_and_come_out_at_p_times_q(translator, attribution, p, q):
    batch, total = (tokens([10] * 16, 10, seed=3), tokens([10] * 16, 10, seed=4)), 16 * 2 * 10 * 10
    torch.manual_seed(5)
    with everywhere(p=p, q=q, attribution=attribution, sites="encoder.self decoder.cross").attach(translator) as ours:
        translator(*batch)
        taken = ours.statistics.take()
        for site in ours.attached_sites:
            dropped = float(taken[f"dropped/{site.name}"])
            assert taken[f"valid/{site.name}"] == total
            assert abs(dropped / total - p * q) < 5 * (p * q * (1 - q) / total) ** 0.5 + 1e-6
            assert attribution == "random" or dropped == int((~site.keep).sum())
    assert taken["forwards"] == taken["regularized"] == 1
    assert ("probe_seconds" in taken) == (attribution != "random")


@pytest.mark.parametrize("path", ["site", "joint"])
def test_every_pass_of_integrated_gradients_repeats_the_dropout(dropping_translator, batch, path):
    """And what models draw by Python's and numpy's random numbers, as those of speech draw spans."""
    outputs = []

    def objective(output, inputs):
        outputs.append(output.detach() + random.random() + np.random.rand())
        return output.sum()

    # of one step, each pass is over the whole map, as the first one is
    with everywhere(attribution="integrated", integrated_path=path, objective=objective).attach(dropping_translator):
        dropping_translator(*batch)
        dropping_translator(*batch)
    passes = 1 + (6 if path == "site" else 1)
    assert len(outputs) == 2 * passes
    for again in outputs[1:passes]:
        torch.testing.assert_close(again, outputs[0])
    assert not outputs[passes].allclose(outputs[0]), "the next forward draws anew"


def test_random_attribution_draws_a_region_of_the_right_size(translator, batch):
    with everywhere(p=0.4, q=1.0, attribution="random").attach(translator) as regularizer:
        translator(*batch)
        for site in regularizer.attached_sites:
            valid = valid_of(batch)[site.name]
            shape = (3, 2, 6 if site.stack == "encoder" else 5, valid.size(-1))
            draws = [drawn(site.request.sampler, site.calls.made[0], shape, valid) for _ in range(2)]
            assert draws[0].equal(draws[1]), "recomputation must see the same mask"
            assert draws[0].sum(-1).equal((valid.expand(shape).sum(-1) * 0.6 + 1e-9).long())


def test_probe_dropout(dropping_translator, batch):
    def modes():
        return {(m.training, m.p) for m in dropping_translator.modules() if isinstance(m, nn.Dropout)}

    for probe_dropout, expected in ((True, {(True, 0.2)}), (False, {(False, 0.0)})):
        seen, masks = [], []
        objective = lambda o, i, seen=seen: seen.append(modes()) or o.log_softmax(-1).amax(-1).sum()  # noqa: E731
        with everywhere(q=1.0, probe_dropout=probe_dropout, objective=objective).attach(dropping_translator) as ours:
            for seed in (1, 2):
                torch.manual_seed(seed)
                dropping_translator(*batch)
                masks.append([site.keep for site in ours.attached_sites])
        assert seen == [expected] * 2 and modes() == {(True, 0.2)}
        assert all(one.equal(other) for one, other in zip(*masks, strict=True)) == (not probe_dropout)


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


@WITH_GRADIENTS
@pytest.mark.parametrize("path", ["site", "joint"])
def test_nothing_is_dropped_where_there_is_no_gradient(attribution, path):
    """Ties would else always lose the same positions."""
    options = {"p": 0.3, "q": 1.0, "attribution": attribution, "integrated_path": path}
    torch.manual_seed(1)
    model, states = Towers().train(), torch.randn(2, 6, 8)
    with everywhere(**options, objective=lambda outputs, inputs: outputs.square().sum()).attach(model) as regularizer:
        model(states)
        teacher, student, unused = (site.keep for site in regularizer.attached_sites)
        counted = regularizer.statistics.take()
    assert teacher.all() and unused.all() and not student.all()
    assert [name for name in counted if name.startswith("dropped/")] == ["dropped/encoder.self[1]"]
    said = "ran without gradients: if it is frozen, choose other sites; if activation "
    with everywhere(**options, sites="encoder.self[0]").attach(model), pytest.raises(ValueError, match=said):
        model(states)


def test_custom_objectives_see_outputs_and_inputs(classifier):
    ids, gold, seen = tokens([5, 3], 5), torch.tensor([0, 1]), []

    def objective(outputs, inputs):
        seen.append(inputs)
        return -F.cross_entropy(outputs, inputs["labels"])

    with everywhere(objective=objective).attach(classifier) as regularizer:
        regularizer.supply(batch=1, targets=None)
        classifier(ids, labels=gold)
        regularizer.attribution = "integrated"
        classifier(ids, labels=gold)
    assert seen[0].keys() == {"tokens", "labels", "batch"} and seen[0]["tokens"] is ids
    assert len(seen) == 1 + 1 + 2, "one, and the unscaled pass and one of each site"


def test_batch_of_one_and_a_single_token(classifier):
    for lengths, size in (([1], 1), ([1], 4), ([4], 4)):
        with everywhere(p=1.0, q=1.0).attach(classifier):
            output = classifier(tokens(lengths, size))
            output.sum().backward()
            assert output.isfinite().all()
    assert all(module.site.keep is None for module in attentions(classifier).values())


def test_tiny_gradients_survive_in_fp16(classifier):
    classifier.half().output.weight.data.mul_(1e-4)
    ids, kept = tokens([6, 5], 6), []
    for dtype in (torch.float16, torch.float32):
        with everywhere(p=0.4, q=1.0).attach(classifier.to(dtype)) as regularizer:
            classifier(ids)
            kept.append([site.keep for site in regularizer.attached_sites])
    for layer, (half, single) in enumerate(zip(*kept, strict=True)):
        rows = slice(None) if layer == 0 else slice(0, 1)  # only the first state is classified
        agree = (single == half).transpose(1, 2)[:, rows][ids.ne(PAD)[:, rows]]
        assert agree.float().mean() > 0.85


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bfloat16_probe_is_bfloat16_and_the_training_is_not(classifier, autocast):
    """Nor within autocast to fp16, where what either casts of the weights is of no use to the other."""
    seen = []
    objective = lambda o, i: seen.append(o.dtype) or o.float().sum()  # noqa: E731
    method, outside = everywhere(probe_dtype="bfloat16", objective=objective), torch.autocast("cpu", torch.float16)
    with method.attach(classifier), outside if autocast else nullcontext():
        for _ in range(2):
            seen.append(classifier(tokens([5, 3, 2], 5)).dtype)
    assert seen == [torch.bfloat16, torch.float16 if autocast else torch.float32] * 2


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
def test_under_autocast_every_parameter_has_its_gradient_and_attributions_are_fp32(
    classifier, attribution, monkeypatch
):
    """A pass without gradients leaves no casts without a graph to the training's own forward: earlier versions of torch
    would take them."""
    from attn_reg_plugin.regularizers.ad_drop import ad_drop

    cleared, seen, clear, draw = [], [], torch.clear_autocast_cache, ad_drop.sample_keep
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (cleared.append(torch.is_grad_enabled()), clear()))
    monkeypatch.setattr(ad_drop, "sample_keep", lambda a, *rest, **more: (seen.append(a), draw(a, *rest, **more))[1])
    with everywhere(attribution=attribution).attach(classifier), torch.autocast("cpu", torch.bfloat16):
        loss = classifier(tokens([5, 3, 2], 5)).float().square().sum()
        # autocast itself clears it once, at its end
        assert cleared == ([True] if attribution in ("integrated", "attention") else [])
    loss.backward()
    assert all(parameter.grad is not None for parameter in classifier.parameters())
    assert sum(len(one) for one in seen) == 2 * 3, "of two sites, for three examples"
    if attribution == "gradient":
        assert all(one.dtype == torch.float32 and not one.equal(one.bfloat16().float()) for one in seen)


@pytest.mark.slow
def test_candidates_of_both_probes_agree_on_97_percent() -> None:
    """A BERT of the base shape, 12 layers 768 wide, and sentences of 32 to 64 tokens."""
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config).train()
    ids = torch.randint(5, 1000, (4, 64))
    there = torch.arange(64) < torch.tensor([64, 56, 40, 32]).unsqueeze(1)
    kept = []
    for dtype in ("same", "bfloat16"):
        with everywhere(q=1.0, probe_dtype=dtype).attach(model) as regularizer:  # what is not kept is a candidate
            model(input_ids=ids.masked_fill(~there, 0), attention_mask=there.long())
            kept.append([site.keep & there[:, None, None] for site in regularizer.attached_sites])
    agree, total = 0, 0
    for layer, (ours, theirs) in enumerate(zip(*kept, strict=True)):
        counts = (there[:, None, :, None] & there[:, None, None, :]).expand_as(ours)
        if layer == config.num_hidden_layers - 1:
            counts = counts & (torch.arange(64) == 0)[:, None]  # the head reads the first row alone
        assert (counts & ~ours).any()
        agree, total = agree + int((ours == theirs)[counts].sum()), total + int(counts.sum())
    print(f"{agree / total:.4f} of {total} positions")
    assert agree >= 0.97 * total
