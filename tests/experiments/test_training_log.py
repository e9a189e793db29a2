"""Reading fairseq-train's json log and the time in its checkpoints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from attn_reg_plugin.experiments.training_log import TrainingLog, seconds_per_epoch


def _valid(epoch: int, updates: int, **figures: object) -> str:
    record = {"epoch": epoch, "valid_num_updates": str(updates)}
    record |= {f"valid_{name}": str(value) for name, value in figures.items()}
    return f"2026-01-01 00:00:00 | INFO | valid | {json.dumps(record)}"


def _train(epoch: int, wall: object) -> str:
    return f"x | INFO | train | {json.dumps({'epoch': epoch, 'train_train_wall': str(wall), 'train_wall': '99'})}"


def _log(*lines: str) -> TrainingLog:
    log = TrainingLog()
    for line in lines:
        log.add(line)
    return log


def test_the_best_validation_is_the_lowest_nll_loss() -> None:
    log = _log(
        _valid(1, 10, loss=5.0, nll_loss=4.5),
        _valid(2, 20, loss=4.0, nll_loss=3.6),
        _valid(3, 30, loss=3.9, nll_loss=3.7),
        _valid(4, 40, loss="nan", nll_loss="nan"),
    )
    assert log.best_validation() == ("nll_loss", 3.6)
    assert _log(_valid(1, 10, loss=5.0), _valid(2, 20, loss=5.5)).best_validation() == ("loss", 5.0)
    with pytest.raises(ValueError, match="no validation loss"):
        _log(_train(1, 3), _valid(1, 10, loss="inf")).best_validation()


def test_the_chosen_epoch_is_that_of_fairseqs_best_checkpoint() -> None:
    """By smoothed loss or BLEU it is another than the one with the lowest nll_loss; of equals the later one."""
    log = _log(
        _valid(1, 10, loss=4.0, nll_loss=3.5, bleu=7.0),
        _valid(2, 20, loss=3.9, nll_loss=3.6, bleu=9.0),
        _valid(3, 30, loss=3.9, nll_loss=3.7, bleu=8.0),
    )
    assert [log.chosen(*one)[0] for one in (("nll_loss", False), ("loss", False), ("bleu", True))] == [1, 3, 2]
    with pytest.raises(ValueError, match='no validation with "chrf"'):
        log.chosen("chrf", True)


def test_a_better_validation_without_a_checkpoint_is_not_chosen(tmp_path: Path) -> None:
    """`--validate-interval-updates 10` and a checkpoint at the end of epochs only."""
    log = _log(*(_valid(1 + (n > 2), 10 * n, accuracy=score) for n, score in enumerate([70, 60, 80, 65], start=1)))
    best = tmp_path / "checkpoint_best.pt"
    torch.save({"optimizer_history": [{"num_updates": 1}, {"num_updates": 40}]}, best)
    assert log.chosen("accuracy", True, best) == (2, {"num_updates": 40, "accuracy": 65})
    torch.save({"model": {}}, best)
    assert log.chosen("accuracy", True, best)[1]["accuracy"] == 80
    assert log.chosen("accuracy", True, tmp_path / "gone.pt")[1]["accuracy"] == 80


def test_repeated_lines_count_once_and_the_last_holds() -> None:
    """A resumed run repeats an epoch."""
    log = _log(_train(1, 4), _train(2, 9), _train(2, 5), _valid(1, 10, loss=3), _valid(1, 10, loss=4))
    assert {epoch: figures["train_wall"] for epoch, figures in log.trainings.items()} == {1: 4.0, 2: 5.0}
    assert log.best_validation() == ("loss", 4.0)
    log.add('x | INFO | train_inner | {"epoch": 2, "update": 1.25, "loss": "4"}')
    assert log.position == 1.25


def test_other_lines_are_ignored() -> None:
    log = _log(
        "{'_name': None, 'common': {'no_progress_bar': False}}",
        "a line cut short {",
        '{"valid_num_updates": "3"}',
        "[1, 2]",
        "",
    )
    assert log == TrainingLog()


def test_the_time_comes_unrounded_from_the_checkpoint_else_from_the_log(tmp_path: Path) -> None:
    log, checkpoint = _log(_train(1, 2), _train(2, 3)), tmp_path / "last.pt"
    assert seconds_per_epoch(TrainingLog(), checkpoint) is None
    for meters, seconds in ((None, 2.5), ([], 2.5), ([(800, "train_wall", "StopwatchMeter", {"sum": 4.9})], 2.45)):
        if meters is not None:
            torch.save({"args": argparse.Namespace(), "extra_state": {"metrics": {"default": meters}}}, checkpoint)
        assert seconds_per_epoch(log, checkpoint) == pytest.approx(seconds)
