"""The contract of every registered method, alone and together, in a training of an encoder-decoder."""

import copy
import pickle
from typing import Any

import pytest
import torch

from attn_reg_plugin.regularizers.base.statistics import summary
from tests.attention.tiny_model import attentions
from tests.comparing import differing
from tests.regularizers.trainings import (
    BATCH,
    CASES,
    OTHER,
    Case,
    attached,
    backward,
    equal,
    footprint,
    on_all_sites,
    others,
    step,
    train,
    translator,
)

EVERY = {**CASES, **others()}
EACH = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.idle is not None])
def test_with_nothing_to_do_it_is_plain_training_bit_for_bit(name: str, checkpointed: bool) -> None:
    case, results = CASES[name], []
    for options in (None, case.idle, case.options):
        model = translator()
        model.encoder.checkpointed = checkpointed
        regularizer = None
        if options is not None:
            regularizer = attached(case.method, model, on_all_sites(case.method, options))
        results.append(train(model, regularizer))
        if options is case.idle:
            counted = regularizer.statistics.take()
            assert counted.pop("forwards") >= 3 and not any(counted.values()), counted
    plain, idle, busy = results
    assert equal(idle, plain) and not equal(busy, plain)


@EACH
def test_evaluation_and_forwards_without_gradients_are_plain_between_updates(case: Case) -> None:
    """With gradients, too; and these gradients are the model's."""
    model, found = translator(), []
    names, expected = list(model.state_dict()), model.eval()(*BATCH)
    regularizer = attached(case.method, model.train(), case.all_options)
    assert model.eval()(*BATCH).equal(expected) and list(model.state_dict()) == names
    train(model.train(), regularizer)
    for _ in range(2):
        with torch.no_grad():
            torch.manual_seed(4)
            training = model.train()(*BATCH)
            outputs = model.eval()(*BATCH)
        with torch.inference_mode():
            assert model(*BATCH).equal(outputs)
        found.append([training, outputs, *step(model)])
        regularizer.detach()
    assert equal(*found)


@EACH
def test_detaching_leaves_the_model_as_it_was(case: Case) -> None:
    model = translator()
    before = footprint(model)
    regularizer = attached(case.method, model, case.all_options)
    assert footprint(model) != before, "the comparison sees hooks"
    step(model, regularizer)
    with pytest.raises(ZeroDivisionError):
        try:
            regularizer.loss(lambda batch: model(*batch).sum() / (1 // 0), BATCH)
        finally:
            regularizer.detach()
    regularizer.detach()  # nothing is attached: nothing happens
    model.zero_grad()
    assert footprint(model) == before and not regularizer.attached_sites
    assert not any(module.site.active or module.site.attached for module in attentions(model).values())
    assert equal(step(model), step(translator()))


@EACH
@pytest.mark.parametrize("stop", [2, 3])
def test_it_goes_on_exactly_from_a_checkpoint(case: Case, stop: int, tmp_path) -> None:
    """Another process's model and method, after some updates of five; AttendOut at the end of a round or within it."""
    whole, first, second = translator(), translator(), translator()
    undisturbed = attached(case.method, whole, case.all_options)
    expected = train(whole, undisturbed, range(5))
    regularizer = attached(case.method, first, case.all_options)
    begun = train(first, regularizer, range(stop))
    optimizer = regularizer.optimizer.state_dict() if case.method == "attend_out" else {}
    torch.save((first.state_dict(), optimizer, regularizer.state_dict()), tmp_path / "checkpoint.pt")
    weights, optimizer, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second.load_state_dict(weights)
    torch.manual_seed(99)
    regularizer = attached(case.method, second, case.all_options)
    if optimizer:
        regularizer.optimizer.load_state_dict(optimizer)
    regularizer.resume(state)
    assert equal([*begun[:stop], *train(second, regularizer, range(stop, 5))], expected)
    assert differing(undisturbed.state_dict(), regularizer.state_dict()) == []


@EACH
def test_activation_checkpointing_repeats_what_was_drawn(case: Case) -> None:
    results = []
    for checkpointed in (False, True):
        model = translator()
        model.encoder.checkpointed = model.decoder.checkpointed = checkpointed
        regularizer = attached(case.method, model, case.all_options)
        regularizer.begin_update(2)
        results.append([step(model, regularizer, seed) for seed in (0, 1)])
        counted = regularizer.statistics.take()
        results[-1].append([counted[name] for name in sorted(counted) if "/" in name])
    torch.testing.assert_close(*results)


@EACH
def test_accumulated_gradients_are_the_sum_of_those_of_each_batch(case: Case) -> None:
    """Each with the masks of its own forward."""
    found = {}
    for parts in ([[BATCH], [OTHER]], [[BATCH, OTHER]]):
        model, found[len(parts)] = translator(dropout=0.0), []
        regularizer = attached(case.method, model, case.all_options)
        regularizer.begin_update(2)
        torch.manual_seed(3)
        for part in parts:
            model.zero_grad()
            for batch in part:
                backward(model, regularizer, batch)
            found[len(parts)].append([0.0 if p.grad is None else p.grad.clone() for p in model.parameters()])
    (total,), (first, second) = found[1], found[2]
    for accumulated, one, other in zip(total, first, second, strict=True):
        torch.testing.assert_close(accumulated, one + other)


@EACH
@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_regularized_for_itself(case: Case, twin_of: Any) -> None:
    """A copy made while attached has a method of its own, others are plain; AttendOut's copy would need a training."""
    model = translator()
    before, plain = twin_of(model), step(translator())
    regularizer = attached(case.method, model, case.all_options)
    regularizer.begin_update(2)
    if case.method != "attend_out" and regularizer.passes == 1:
        twin, (other, its) = twin_of(model), copy.deepcopy((model, regularizer))
        assert not equal(step(other, its), plain), "what was copied with its method"
        assert its.summary()["regularized"] == 1
        expected = step(model, regularizer)
        regularizer.statistics.take()
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        assert equal(step(twin), expected) and not equal(expected, plain)
        assert regularizer.statistics.take() == {}
    regularizer.detach()
    assert equal(step(before), plain)
    model.load_state_dict(before.state_dict())
    assert equal(step(twin_of(model)), plain)


@EACH
def test_frozen_parameters_stay_frozen_and_others_are_trained(case: Case) -> None:
    model = translator(dropout=0.0)
    model.encoder.requires_grad_(False)
    flags = [weight.requires_grad for weight in model.parameters()]
    regularizer = attached(case.method, model, case.all_options)
    regularizer.begin_update(2)
    loss, *gradients, _ = step(model, regularizer)
    assert loss.isfinite() and [weight.requires_grad for weight in model.parameters()] == flags
    assert not any(gradient is not None for gradient, flag in zip(gradients, flags, strict=True) if not flag)
    assert any(gradient is not None for gradient in gradients)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models_stay_finite(case: Case, dtype: torch.dtype) -> None:
    model = translator().to(dtype)
    regularizer = attached(case.method, model, case.all_options)
    regularizer.begin_update(2)
    loss, *gradients, _ = step(model, regularizer)
    assert all(gradient.isfinite().all() for gradient in (loss, *gradients) if gradient is not None)
    assert float(regularizer.statistics.take().get("fallbacks", 0.0)) == 0


@EACH
def test_draws_come_from_the_global_generator(case: Case) -> None:
    """Resuming needs no state of its own; every forward draws anew."""
    model = translator(dropout=0.0)
    regularizer = attached(case.method, model, case.all_options)
    regularizer.begin_update(2)
    backward(model, regularizer)  # what is made at the beginning is drawn, too
    outputs = []
    for seed in (1, 1, 2, 3, 4):
        torch.manual_seed(seed)
        outputs.append(backward(model, regularizer))
    assert outputs[0].equal(outputs[1]), case.method
    assert case.method == "r_drop" or any(not output.equal(outputs[0]) for output in outputs[2:])


@pytest.mark.parametrize("name", ["weights", "scores", "head_drop", "layer_drop", "attention_layer_drop"])
def test_the_rate_is_logged(name: str) -> None:
    model, case = translator(dropout=0.0), CASES[name]
    options = {key: value for key, value in case.all_options.items() if key in ("where", "sites")}
    regularizer = attached(case.method, model, {**options, "p": 0.3})
    torch.manual_seed(0)
    for _ in range(40):
        model(*BATCH)
    counted = regularizer.statistics.take()
    shown = summary(regularizer.quantities, counted)
    rates = [value for title, (value, _) in shown.items() if title.startswith("drop_") and title != "drop_rate"]
    assert len(rates) == 6 and shown["drop_rate"].value == pytest.approx(sum(rates) / 6)
    assert summary(regularizer.quantities, counted, by_site=False).keys() == {"regularized", "drop_rate"}
    assert all(0.1 < rate < 0.5 for rate in rates)
    # of two heads, both are dropped in 9 % of the draws, and then one of them stays
    assert sum(rates) / 6 == pytest.approx(0.3 - (0.045 if name == "head_drop" else 0), abs=0.06)
