"""The picture of the learning curves."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from attn_reg_plugin.experiments.curve_plot import limits, plot_validation, validation_curve
from attn_reg_plugin.experiments.training_log import TrainingLog


def _log(losses: list[float]) -> TrainingLog:
    return TrainingLog(validations={(epoch, 10 * epoch): {"nll_loss": x} for epoch, x in enumerate(losses, start=1)})


def test_a_curve_is_the_mean_of_the_epochs_that_all_seeds_have() -> None:
    assert validation_curve([_log([4, 3, 2]), _log([6, 5])], "nll_loss") == [(1, 5.0), (2, 4.0)]
    assert validation_curve([_log([4])], "loss") == validation_curve([], "loss") == []


def test_the_axis_shows_all_ends_and_leaves_out_the_start() -> None:
    curves = [[(1, 90.0), (2, 3.0)], [(1, 90.0), (2, 2.0), (3, 2.5)]]
    low, high = limits(curves)
    assert 1 < low < 2.0 and 3.0 < high < 10
    for equal in ([(1, 2.0), (2, 2.0)], [(1, 2.0), (2, math.nan)]):
        assert limits([equal]) == pytest.approx((1.9, 2.1))


def test_the_picture_is_written_and_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = {f"method {n}": [_log([9, 4 - n / 4, 3, 3 + n / 9])] for n in range(7)}
    assert plot_validation(logs, "nll_loss", tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not plot_validation(logs, "loss", tmp_path / "none.png")
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"encoder error.*curves\.png"):
        patch.setattr("matplotlib.figure.Figure.savefig", Mock(side_effect=RuntimeError("encoder error")))
        plot_validation(logs, "nll_loss", tmp_path / "curves.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="the picture needs matplotlib, which is not installed"):
        plot_validation(logs, "nll_loss", tmp_path / "curves.png")
