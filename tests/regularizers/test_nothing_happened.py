"""A regularizer that never acts says so once; so does whoever compiles an attached model."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import Combination, build
from tests.attention.tiny_model import TinyClassifier, tokens
from tests.regularizers.test_attend_out import begin, update

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = tokens([5, 3], 5)


@pytest.fixture(autouse=True)
def warnings_only(caplog):
    """What is logged beside warnings depends on who set the level."""
    caplog.set_level(logging.WARNING)


class Wrapper(nn.Module):
    """A training module around a model, as Lightning has them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)


@pytest.mark.parametrize(
    "attached, called, reason",
    [
        (lambda m: m.model.eval(), lambda m: m.model, "TinyClassifier is in evaluation mode: call its train() "),
        (lambda m: m, lambda m: m.model, "the forward of Wrapper was never called with gradients: attach to the "),
        (
            lambda m: m.model.eval() and m,
            lambda m: m,
            "the attention of Wrapper is in evaluation mode: call train() on",
        ),
    ],
    ids=["left in evaluation mode", "a wrapper that is never called", "the part with attention in evaluation mode"],
)
@pytest.mark.parametrize("announced", [True, False])
def test_nothing_was_regularized_is_said_once(caplog, attached, called, reason, announced):
    model = Wrapper(TinyClassifier()).train()
    regularizer = ADDrop(cross_tuning="off")
    with regularizer.attach(attached(model)):
        for _ in range(2):
            called(model)(IDS).sum().backward()
            if announced:
                regularizer.end_update()
        assert len(caplog.messages) == announced
    (message,) = caplog.messages
    event = "an update was made" if announced else "its attention ran with gradients"
    assert message.startswith(f"ad_drop: {event}, but nothing was regularized; {reason}")
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_model_left_in_evaluation_mode_after_a_validation_is_said_once(caplog, forgotten):
    model = TinyClassifier().train()
    regularizer = ADDrop(cross_tuning="off")
    with regularizer.attach(model):
        for _ in range(3):
            model(IDS).sum().backward()
            regularizer.end_update()
            model.eval()(IDS)  # a validation, with gradients
            model.train(not forgotten)
        assert len(caplog.messages) == forgotten
    assert all("TinyClassifier is in evaluation mode: call its train()" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("accumulated", "announced", "said"),
    [(1, None, True), (1, 1, False), (1, 20, False), (1, 21, True), (20, None, False), (3, None, True)],
    ids=["never", "each", "once, in time", "too late", "one long update", "accumulated"],
)
def test_updates_that_are_not_announced_are_said_once(caplog, accumulated, announced, said):
    model = TinyClassifier().train()
    regularizer = ADDrop(cross_tuning="off")
    optimizer = torch.optim.Adam(model.parameters())
    with regularizer.attach(model):
        for batch in range(1, 21 * (accumulated if said else 1) + 1):
            model(IDS).sum().backward()
            if batch % accumulated == 0:
                optimizer.step()
            if announced and batch % announced == 0:
                regularizer.end_update()
    assert len(caplog.messages) == said
    assert all("ad_drop: 20 updates were made, and none was announced" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("options", "epochs", "said"),
    [({}, 1, True), ({}, 2, False), ({}, None, False), ({"cross_tuning": "off"}, 1, False)],
)
@pytest.mark.parametrize("together", [False, True])
def test_a_training_of_one_epoch_is_plain_with_cross_tuning(caplog, options, epochs, said, together):
    regularizer = ADDrop(**options)
    (Combination([regularizer, build("r_drop")]) if together else regularizer).begin_training(7, epochs)
    assert len(caplog.messages) == said
    assert all("this training has one epoch: nothing is regularized" in message for message in caplog.messages)


@pytest.mark.parametrize("epoch", [1, 2])
def test_nothing_is_said_where_forwards_are_seen(caplog, epoch):
    """A plain epoch is nothing to warn about, nor is evaluation."""
    model = TinyClassifier().train()
    regularizer = ADDrop()
    for _ in range(2):
        with regularizer.attach(model):
            regularizer.begin_epoch(epoch)
            model(IDS).sum().backward()
            regularizer.end_update()
            with torch.no_grad():
                model.eval()(IDS)
            model.train()
    with regularizer.attach(model), torch.no_grad():
        model.eval()(IDS)
    assert not caplog.messages


def test_an_attached_model_is_not_scripted():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.attention(states, states, states)[0]

    model, states = Plain().train(), torch.randn(2, 3, 4)
    before = set(vars(model))
    sentence = r"^torch.jit.script cannot compile a model while a regularizer is attached to it; detach\(\) "
    with ADDrop(cross_tuning="off", sites="*").attach(model):
        for part in (model, nn.Sequential(model)):
            with pytest.raises(RuntimeError, match=sentence):
                torch.jit.script(part)
    assert set(vars(model)) == before
    torch.testing.assert_close(torch.jit.script(model)(states), model(states))


# -- memory over many updates -----------------------------------------------------------------------------------------


def tensors_alive():
    """How many tensors there are, and how many numbers they hold."""
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return len(alive), sum(tensor.numel() for tensor in alive)


def grown(update_once, updates):
    """Whether there is more after `updates` than after the first two."""
    for _ in range(2):
        update_once()
    begun = tensors_alive()
    for _ in range(updates - 2):
        update_once()
    return tensors_alive() != begun


@pytest.mark.parametrize("path", ["site", "joint"])
def test_integrated_gradients_keep_no_memory(path):
    model = TinyClassifier().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = {"attribution": "integrated", "integrated_steps": 1, "integrated_path": path}
    regularizer = ADDrop(cross_tuning="off", **options)

    def update_once():
        model(IDS).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        regularizer.end_update()

    with regularizer.attach(model):
        assert not grown(update_once, 30)


def test_attend_out_keeps_no_memory():
    """Measured at the ends of rounds, when the cache is empty; a round is three updates."""
    model, optimizer, regularizer = begin()

    def play_a_round():
        for number in range(3):
            update(model, optimizer, regularizer, number)

    with regularizer.attach(model):
        assert not grown(play_a_round, 10)
    assert regularizer.state_dict()["rounds"] == 10


def test_replicas_in_threads_are_refused_in_training():
    """`nn.DataParallel` over several devices: around the model when it attaches, or later; one device is as none."""
    model, regularizer = TinyClassifier().train(), ADDrop(cross_tuning="off")
    parallel = nn.DataParallel(model)
    with regularizer.attach(parallel):
        pass
    parallel.device_ids = [0, 1]
    named = r"ad_drop cannot act in the replicas of nn\.DataParallel.*DistributedDataParallel with a process for each"
    for whole in (parallel, Wrapper(parallel)):
        with pytest.raises(ValueError, match=named):
            regularizer.attach(whole)
    with regularizer.attach(model):
        replica = model._replicate_for_data_parallel()  # without parameters, which come as attributes
        with pytest.raises(RuntimeError, match=named):
            replica(IDS)
        with torch.no_grad():
            model.eval()
            twin = model._replicate_for_data_parallel()
            twin.forward = lambda ids: ids
            assert twin(IDS) is IDS
