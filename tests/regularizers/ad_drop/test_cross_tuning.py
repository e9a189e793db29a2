"""Cross-tuning: which epochs and updates are regularized."""

import logging
import sys

import pytest
import torch

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers.ad_drop.cross_tuning import CrossTuning


def test_which_epochs_and_updates_are_regularized():
    assert [CrossTuning().regularized(epoch, epoch * 7) for epoch in range(1, 7)] == [False, True] * 3
    assert all(CrossTuning("off").regularized(epoch, updates) for epoch in (None, 1, 2) for updates in range(5))
    for length in (1, 2, 5):
        turns = [CrossTuning(f"update:{length}").regularized(None, updates) for updates in range(4 * length)]
        assert turns == ([False] * length + [True] * length) * 2


@pytest.mark.parametrize("schedule", ["", "on", "epochs", "update", "update:", "update:0", "update:-1", "update:1.5"])
def test_other_schedules_are_refused(schedule):
    message = f"cross_tuning is {schedule!r}, but must be epoch, off, or update:N with N of at least 1"
    with pytest.raises(ValueError) as refused:
        ADDrop(cross_tuning=schedule)
    assert str(refused.value) == message


def test_an_epoch_must_be_announced(translator, batch):
    with ADDrop().attach(translator):
        with pytest.raises(RuntimeError, match=r"^cross_tuning='epoch' counts epochs: call regularizer\.begin_epoch"):
            translator(*batch)
        translator.eval()(*batch)
        with torch.no_grad():
            translator.train()(*batch)


@pytest.mark.parametrize("counted", ["by the method", "by the caller"])
def test_updates_in_training(counted, translator, batch):
    with ADDrop(p=0.5, q=1.0, cross_tuning="update:2").attach(translator) as regularizer:
        for update in range(8) if counted == "by the method" else (0, 2, 7, 4, 1):
            if counted == "by the caller":
                regularizer.begin_update(update)
            for _ in range(2):  # accumulated batches are of one update
                translator(*batch)
                taken = regularizer.statistics.take()
                assert (taken["forwards"], taken["regularized"]) == (1, update // 2 % 2)
            regularizer.end_update()


def warnings_of_training(translator, batch, caplog, epochs=1, announced=None, **options):
    """Warnings of a training of so many epochs, of which `announced` were announced."""
    caplog.clear()
    with ADDrop(**options).attach(translator) as regularizer:
        regularizer.begin_training(None, announced)
        for epoch in range(1, epochs + 1):
            regularizer.begin_epoch(epoch)
            translator(*batch)
            regularizer.end_update()
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("announced", [None, sys.maxsize])
def test_a_training_that_was_plain_is_warned_about_at_its_end(announced, translator, batch, caplog):
    """A stream's epochs are not known before: Trainer announces a large number of them."""
    [message] = warnings_of_training(translator, batch, caplog, announced=announced)
    assert "this training ended in its first epoch: nothing was regularized; give cross_tuning='update:N'" in message
    [message] = warnings_of_training(translator, batch, caplog, announced=1)
    assert "this training has one epoch: nothing is regularized" in message, "the start has said so"
    assert not warnings_of_training(translator, batch, caplog, epochs=2, announced=announced)
    for options in ({"p": 0.0}, {"q": 0.0}, {"cross_tuning": "off"}, {"cross_tuning": "update:9"}):
        assert not warnings_of_training(translator, batch, caplog, announced=announced, **options)


@pytest.mark.parametrize("length", [(6, 3), (6, None)])
def test_a_training_that_failed_or_attaches_for_each_epoch_is_not_warned_about(length, translator, batch, caplog):
    caplog.set_level(logging.WARNING)
    with pytest.raises(KeyboardInterrupt), (regularizer := ADDrop()).attach(translator):
        regularizer.begin_training(None)
        regularizer.begin_epoch(1)
        translator(*batch)
        raise KeyboardInterrupt
    regularizer = ADDrop()
    regularizer.begin_training(*length)
    for epoch in (1, 2, 3):
        with regularizer.attach(translator):
            regularizer.begin_epoch(epoch)
            for _ in range(2):
                translator(*batch)
                regularizer.end_update()
    assert not caplog.messages
