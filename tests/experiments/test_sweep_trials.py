"""Trials that processes share: each is carried out once, whoever is killed, slow or in a hurry."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from attn_reg_plugin.experiments.sweep import search
from attn_reg_plugin.experiments.sweep.search import Side
from attn_reg_plugin.experiments.sweep.settings import Arm
from tests import processes

P, LR = CategoricalDistribution([0.1, 0.2, 0.3]), CategoricalDistribution([1.0, 2.0, 4.0, 8.0])
GRID = [(1, {"p": p, "lr": lr}) for p in P.choices for lr in LR.choices]
METHOD = Arm("ad_drop", {"p": P, "lr": LR}, GRID)
PLAIN = Arm("plain", {"lr": LR}, [(seed, {"lr": GRID[seed - 1][1]["lr"]}) for seed in range(1, 13)])
FAIL, COMPLETE, PRUNED = TrialState.FAIL, TrialState.COMPLETE, TrialState.PRUNED


def sides_of(folder: Path, *arms: Arm, pruner: Any = None) -> list[Side]:
    """Make these arms with their studies."""
    return [Side(arm, folder, direction="maximize", pruner=pruner) for arm in arms]


def fill(folder: Path, train: Callable[..., float], *arms: Arm, pruner: Any = None) -> list[dict[int, Any]]:
    """Carry out the trials of these arms; Optuna's last trial of each number."""
    sides = sides_of(folder, *arms, pruner=pruner or optuna.pruners.NopPruner())
    search.fill(sides, train, threading.Event())
    return [side.latest() for side in sides]


def number_of(arm: Arm, trial: Any, stop: Any) -> float:
    """In the place of a training: the number of the trial."""
    return float(trial.user_attrs["trial"])


def fill_and_hang(folder: Path, place: int | None) -> None:
    """Fill a sweep as a process does; of its own trials one hangs."""
    search.WAIT = 0.2
    begun: list[int] = []

    def train(arm: Arm, trial: Any, stop: Any) -> float:
        begun.append(trial.number)
        with (folder / "begun" / f"{arm.name}-{trial.user_attrs['trial']}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        while len(begun) == place:
            time.sleep(1)
        time.sleep(0.02)
        return number_of(arm, trial, stop)

    fill(folder, train, METHOD, PLAIN)


def test_two_processes_of_which_one_is_killed_carry_out_each_trial_once(tmp_path: Path) -> None:
    """Twelve trials and twelve plain ones; the killed process was in the middle of its third."""
    (tmp_path / "begun").mkdir()
    victim = processes.start(fill_and_hang, tmp_path, 3)

    def begun() -> list[Path]:
        return [path for path in tmp_path.glob("begun/*") if f"{victim.pid}\n" in path.read_text()]

    until = time.monotonic() + processes.PATIENCE
    while len(begun()) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    other = processes.start(fill_and_hang, tmp_path, None)  # an earlier one might leave the victim too few
    victim.kill()
    victim.join(processes.PATIENCE)
    other.join(processes.PATIENCE)
    assert other.exitcode == 0 and len(begun()) == 3
    for side in sides_of(tmp_path, METHOD, PLAIN):
        complete = sorted(one.value for one in side.study.trials if one.state == COMPLETE)
        assert complete == list(range(12)) and [one.value for one in side.latest().values()] == complete
    times = [len(path.read_text().split()) for path in tmp_path.glob("begun/*")]
    assert sorted(times) == [*[1] * 23, 2], "the third of the killed process, and nothing else, was carried out again"


def test_an_interrupted_trial_keeps_what_was_drawn_and_draws_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """The run of the trial goes on in its folder."""
    space = {
        **{"p": FloatDistribution(0.0, 1.0), "lr": FloatDistribution(1e-5, 1e-2, log=True)},
        **{"n": IntDistribution(1, 9), "sites": CategoricalDistribution(["*", "x"])},
    }
    arm, drawn = Arm("ad_drop", space, [(5, {}), (6, {})] * 6), []

    def train(arm: Arm, trial: Any, stop: Any) -> float:
        drawn.append(trial.params)
        if interrupted and len(drawn) == 1:
            raise KeyboardInterrupt
        return trial.params["p"]

    found = []
    for interrupted in (True, False):
        drawn.clear()
        folder = tmp_path / str(interrupted)
        folder.mkdir()
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                fill(folder, train, arm)
        (tried,) = fill(folder, train, arm)
        found.append([one.params for one in tried.values()])
        assert found[-1][0] == drawn[0] and 1e-5 <= drawn[0]["lr"] <= 1e-2 and drawn[0]["n"] in range(1, 10)
        assert [one.user_attrs["seed"] for one in tried.values()] == [5, 6] * 6
    assert found[0][0] == found[1][0] and len({one["p"] for one in found[1]}) == 12


def test_hopeless_trials_are_pruned(tmp_path: Path) -> None:
    """Trials 5 and 11 begin below the median of the others; six are complete before 11, not before 5."""

    def train(arm: Arm, trial: Any, stop: Any) -> float:
        number = trial.user_attrs["trial"]
        for epoch, value in enumerate([3.0, 2.0, 99.0] if number in (5, 11) else [5.0 + number, 6.0, 7.0], start=1):
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 5.0 + number

    (found,) = fill(tmp_path, train, METHOD, pruner=optuna.pruners.MedianPruner(6, 2))
    assert [one.state for one in found.values()] == [COMPLETE] * 11 + [PRUNED]
    assert found[11].intermediate_values == {1: 3.0, 2: 2.0}


def test_a_failed_trial_is_tried_again_by_the_next_process_only_and_nothing_but_failures_ends(tmp_path: Path) -> None:
    def train(arm: Arm, trial: Any, stop: Any) -> float:
        if trial.user_attrs["trial"] in broken:
            raise ValueError("no space left")
        return 1.0

    broken = range(12)
    with pytest.raises(ValueError, match="no space left"):
        fill(tmp_path, train, METHOD)
    broken, (side,) = range(4, 5), sides_of(tmp_path, METHOD)
    for times in (1, 2):
        (found,) = fill(tmp_path, train, METHOD)
        assert [one.state for one in found.values()] == [*[COMPLETE] * 4, FAIL, *[COMPLETE] * 7]
        counts = Counter(one.user_attrs["trial"] for one in side.study.trials)
        assert [counts[number] for number in range(12)] == [2, 2, 2, 1, times, *[1] * 7]
    assert found[4].user_attrs["error"] == "no space left"
