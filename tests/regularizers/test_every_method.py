"""What holds for every registered method: with nothing to do it is plain training, evaluation is untouched, and a
training goes on exactly from a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin.regularizers import build
from tests.attention.tiny_model import TinyClassifier, sharpened, tokens
from tests.regularizers.registered import besides
from tests.regularizers.test_attend_out import Classification

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH = tokens([6, 3, 5], 6, seed=4), torch.tensor([2, 0, 1])
ALWAYS = {"cross_tuning": "off", "p": 0.5, "q": 0.9}
#: of methods, options that leave it nothing to do, and others; AttendOut has no option that leaves it nothing. A method
#: that is not here has its first preset's options, and its limits in a test of its own
METHODS: dict[str, list[tuple[dict[str, Any] | None, dict[str, Any]]]] = {
    "ad_drop": [
        ({**ALWAYS, "p": 0.0}, {**ALWAYS, "cross_tuning": "update:2"}),
        ({**ALWAYS, "q": 0.0}, {**ALWAYS, "attribution": "integrated", "integrated_steps": 2}),
    ],
    "attend_out": [(None, {"steps": 2})],
    "attention_dropout": [({"p": 0.0, "where": where}, {"p": 0.5, "where": where}) for where in ("weights", "scores")],
    "attention_layer_drop": [({"p": 0.0}, {"p": 1.0})],
    "head_drop": [({"p": 0.0}, {"p": 0.7, "turn": 2, "end": 6})],
    "hidden_cut": [({"cut": 0.0}, {"cut": 0.5})],
    "layer_drop": [({"p": 0.0}, {"p": 0.9})],
    "r_drop": [({"weight": 0.0}, {"weight": 1.0})],
    "scheduled_dropout": [({"schedule": "drop *: 0:0"}, {"schedule": "drop *: 0:0.5 4:0.1"})],
}
CASES = [(name, *options) for name, cases in METHODS.items() for options in cases]
EVERY = [*CASES, *((name, None, options) for name, options in besides(METHODS).items())]


def attached(name, model, **options):
    """With what it needs to know of a training of `model`."""
    regularizer = build(name, **options)
    if name == "attend_out":
        regularizer.problem, regularizer.optimizer = Classification(), torch.optim.SGD(model.parameters(), 0.1)
    regularizer.begin_epoch(1)
    regularizer.attach(model)
    regularizer.supply(targets=BATCH[1])
    return regularizer


def loss_of(model, batch):
    return F.cross_entropy(model(*batch), batch[1])


def trained(model, regularizer=None, updates=range(3)):
    """Losses and weights of some updates, and the random state."""
    optimizer, losses = getattr(regularizer, "optimizer", None) or torch.optim.SGD(model.parameters(), 0.1), []
    for update in updates:
        torch.manual_seed(7 + update)
        loss = loss_of(model, BATCH) if regularizer is None else regularizer.loss(partial(loss_of, model), BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if regularizer is not None:
            regularizer.end_update()
    return [*losses, *(weight.detach().clone() for weight in model.parameters()), torch.get_rng_state()]


def classifier():
    torch.manual_seed(5)
    return sharpened(TinyClassifier(0.2)).train()


@pytest.mark.parametrize(("name", "off", "on"), CASES)
def test_with_nothing_to_do_it_is_plain_training_bit_for_bit(name, off, on):
    plain = trained(classifier())
    for options, same in ((off, True), (on, False)):
        if options is None:
            continue
        model = classifier()
        regularizer = attached(name, model, **options)
        ours = trained(model, regularizer)
        regularizer.detach()
        equal = [a.equal(b) for a, b in zip(ours, plain, strict=True)]
        assert all(equal) if same else not all(equal)


@pytest.mark.parametrize(("name", "off", "on"), EVERY)
def test_evaluation_is_untouched_between_updates(name, off, on):
    """With and without gradients; and these gradients are the model's."""
    model = classifier()
    regularizer = attached(name, model, **on)
    trained(model, regularizer)
    found = []
    for _ in range(2):
        model.eval()
        outputs = model(*BATCH)
        with torch.no_grad():
            assert model(*BATCH).equal(outputs)
        gradients = torch.autograd.grad(loss_of(model, BATCH), list(model.parameters()), allow_unused=True)
        found.append([outputs, *(gradient for gradient in gradients if gradient is not None)])
        regularizer.detach()
    assert all(ours.equal(plain) for ours, plain in zip(*found, strict=True))


@pytest.mark.parametrize(("name", "off", "on"), EVERY)
def test_it_goes_on_exactly_from_a_checkpoint(name, off, on, tmp_path):
    """Another process's model and method, after three updates of five; AttendOut is within a round."""
    whole = classifier()
    expected = trained(whole, attached(name, whole, **on), range(5))
    first = classifier()
    regularizer = attached(name, first, **on)
    begun = trained(first, regularizer)
    torch.save((first.state_dict(), regularizer.state_dict()), tmp_path / "checkpoint.pt")
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second = classifier()
    second.load_state_dict(weights)
    torch.manual_seed(99)
    regularizer = attached(name, second, **on)
    regularizer.resume(state)
    ours = [*begun[:3], *trained(second, regularizer, range(3, 5))]
    assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))
