"""Cross-tuning: which epochs and updates are regularized."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers.ad_drop.cross_tuning import CrossTuning


def test_even_epochs_are_regularized():
    schedule = CrossTuning()
    assert [schedule.regularized(epoch, updates=epoch * 7) for epoch in range(1, 7)] == [False, True] * 3


def test_off_is_always_regularized():
    schedule = CrossTuning("off")
    assert all(schedule.regularized(epoch, updates) for epoch in (None, 1, 2) for updates in range(5))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_updates_take_turns(length):
    schedule = CrossTuning(f"update:{length}")
    turns = [schedule.regularized(None, updates) for updates in range(4 * length)]
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
        translator.eval()
        translator(*batch)
        with torch.no_grad():
            translator.train()(*batch)


@pytest.mark.parametrize("epoch", [0, -1])
def test_epochs_count_from_one(epoch):
    with pytest.raises(ValueError, match=f"^epoch is {epoch}, but must be at least 1$"):
        ADDrop().begin_epoch(epoch)


def regularized(regularizer):
    """Whether the last forward was."""
    taken = regularizer.statistics.take()
    assert taken["forwards"] == 1
    return bool(taken["regularized"])


def test_updates_in_training(translator, batch):
    regularizer = ADDrop(p=0.5, q=1.0, cross_tuning="update:2")
    seen = []
    with regularizer.attach(translator):
        for _ in range(8):
            for _ in range(2):  # accumulated batches are of one update
                translator(*batch)
                seen.append(regularized(regularizer))
            regularizer.end_update()
    assert seen == ([False] * 4 + [True] * 4) * 2


def test_updates_counted_by_the_caller(translator, batch):
    regularizer = ADDrop(p=0.5, q=1.0, cross_tuning="update:3")
    with regularizer.attach(translator):
        for update, expected in ((0, False), (3, True), (5, True), (6, False), (2, False)):
            regularizer.begin_update(update)
            translator(*batch)
            assert regularized(regularizer) == expected


def plain_training(translator, batch, caplog, epochs=1, announced=None, **options):
    """What is said of a training of so many epochs, of which `announced` were."""
    caplog.clear()
    regularizer = ADDrop(**options)
    with regularizer.attach(translator):
        regularizer.begin_training(None, announced)
        for epoch in range(1, epochs + 1):
            regularizer.begin_epoch(epoch)
            translator(*batch)
            regularizer.end_update()
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("announced", [None, sys.maxsize])
def test_a_training_that_was_plain_is_warned_about_at_its_end(announced, translator, batch, caplog):
    """A stream's epochs are not known before: Trainer announces a large number of them."""
    [message] = plain_training(translator, batch, caplog, announced=announced)
    assert "this training ended in its first epoch: nothing was regularized; give cross_tuning='update:N'" in message
    assert len(plain_training(translator, batch, caplog, announced=1)) == 1, "the start has said so"
    assert not plain_training(translator, batch, caplog, epochs=2, announced=announced)
    for options in ({"p": 0.0}, {"q": 0.0}, {"cross_tuning": "off"}, {"cross_tuning": "update:9"}):
        assert not plain_training(translator, batch, caplog, announced=announced, **options)


def test_a_training_that_failed_is_not_warned_about(translator, batch, caplog):
    with pytest.raises(KeyboardInterrupt), (regularizer := ADDrop()).attach(translator):
        regularizer.begin_training(None)
        regularizer.begin_epoch(1)
        translator(*batch)
        raise KeyboardInterrupt
    assert not any("plain" in message for message in caplog.messages)


@pytest.mark.parametrize("length", [(6, 3), (6, None)])
def test_a_loop_that_attaches_for_each_epoch_is_not_warned(length, translator, batch, caplog):
    regularizer = ADDrop()
    regularizer.begin_training(*length)
    for epoch in (1, 2, 3):
        with regularizer.attach(translator):
            regularizer.begin_epoch(epoch)
            for _ in range(2):
                translator(*batch)
                regularizer.end_update()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
