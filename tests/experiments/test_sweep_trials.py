"""Trials that processes share: each is carried out once, whoever is killed, slow or in a hurry."""

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from rich.console import Console

from attn_reg_plugin.experiments.running import executor as executing
from attn_reg_plugin.experiments.running.executor import carry_out
from attn_reg_plugin.experiments.running.run import Run
from attn_reg_plugin.experiments.sweep import search
from attn_reg_plugin.experiments.sweep.settings import TRIAL, Arm
from attn_reg_plugin.files import read_json, write_json
from tests import processes

P, LR = CategoricalDistribution([0.1, 0.2, 0.3]), CategoricalDistribution([1.0, 2.0, 4.0, 8.0])
GRID = [(1, {"p": p, "lr": lr}) for p in P.choices for lr in LR.choices]
METHOD = Arm("ad_drop", {"p": P, "lr": LR}, GRID)
PLAIN = Arm("plain", {"lr": LR}, [(seed, {"lr": GRID[seed - 1][1]["lr"]}) for seed in range(1, 13)])
COMPLETE = TrialState.COMPLETE


class Training(Run):
    """In the place of a run: its epochs are what `train` yields, and the last one is its result."""

    @property
    def metric(self) -> tuple[str, bool]:
        return "accuracy", True

    def record(self) -> None:
        pass

    def work(self, lock: int, watch: Any, stop: Any = None) -> None:
        for epoch, value in enumerate(self.settings["train"](), start=1):
            for figures in ({"valid_num_updates": epoch, "valid_accuracy": value}, {"train_train_wall": "3"}):
                with (self.folder / "train.log").open("a") as file:
                    file.write(json.dumps({"epoch": epoch, **figures}) + "\n")
            watch(self.log())
            write_json(self.folder / "result.json", {"accuracy": value})

    def result(self) -> dict[str, Any]:
        return {"training": {"figures": read_json(self.folder / "result.json")}}


def sides_of(folder: Path, *arms: Arm, pruner: Any = None) -> list[tuple[Arm, optuna.Study]]:
    """Make these arms with their studies."""
    return [(arm, search.open_study(folder, arm.name, direction="maximize", pruner=pruner)) for arm in arms]


def fill(folder: Path, train: Callable[..., Iterable[float]], *arms: Arm, pruner: Any = None) -> list[Any]:
    """Carry out the trials of these arms: the trials of each, as their folders have them."""

    def make(arm: Arm, number: int, values: Any) -> Training:
        return Training(folder / arm.folder(number), {"train": lambda: train(arm, number, values)})

    sides = sides_of(folder, *arms, pruner=pruner or optuna.pruners.NopPruner())
    trials = search.trials_of(folder, sides, make)
    if not carry_out(trials, Console(file=io.StringIO()), 3, lambda one: "well", go_on=True):
        raise KeyboardInterrupt
    return [trials_in(folder, arm) for arm in arms]


def trials_in(folder: Path, arm: Arm) -> list[dict[str, Any]]:
    """The trials of an arm, by number."""
    return [read_json(folder / arm.folder(number) / TRIAL) for number in range(len(arm.trials))]


def fill_and_hang(folder: Path, place: int | None) -> None:
    """Fill a sweep as a process does; of its own trials one hangs."""
    executing.WAIT = 0.2
    begun: list[int] = []

    def train(arm: Arm, number: int, values: Any) -> Iterator[float]:
        begun.append(number)
        with (folder / "begun" / f"{arm.name}-{number}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        while len(begun) == place:
            time.sleep(1)
        time.sleep(0.02)
        yield float(number)

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
    for arm, study in sides_of(tmp_path, METHOD, PLAIN):
        complete = sorted(one.value for one in study.trials if one.state == COMPLETE)
        assert complete == list(range(12)) and [one["value"] for one in trials_in(tmp_path, arm)] == complete
    times = [len(path.read_text().split()) for path in tmp_path.glob("begun/*")]
    assert sorted(times) == [*[1] * 23, 2], "the third of the killed process, and nothing else, was carried out again"


def test_an_interrupted_trial_keeps_what_was_drawn_and_draws_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """The run of the trial goes on in its folder."""
    space = {
        **{"p": FloatDistribution(0.0, 1.0), "lr": FloatDistribution(1e-5, 1e-2, log=True)},
        **{"n": IntDistribution(1, 9), "sites": CategoricalDistribution(["*", "x"])},
    }
    arm, drawn = Arm("ad_drop", space, [(5, {}), (6, {})] * 6), []

    def train(arm: Arm, number: int, values: Any) -> Iterator[float]:
        drawn.append(values)
        if interrupted and len(drawn) == 1:
            raise KeyboardInterrupt
        yield values["p"]

    found = []
    for interrupted in (True, False):
        drawn.clear()
        folder = tmp_path / str(interrupted)
        folder.mkdir()
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                fill(folder, train, arm)
        (tried,) = fill(folder, train, arm)
        found.append([one["values"] for one in tried])
        assert found[-1][0] == drawn[0] and 1e-5 <= drawn[0]["lr"] <= 1e-2 and drawn[0]["n"] in range(1, 10)
        assert [one["seed"] for one in tried] == [5, 6] * 6
    assert found[0][0] == found[1][0] and len({one["p"] for one in found[1]}) == 12


def test_what_is_killed_has_not_failed(tmp_path: Path) -> None:
    def train(arm: Arm, number: int, values: Any) -> Iterator[float]:
        time.sleep(0.1 * (number > 0))  # none is complete when the first fails
        if killed or number == 0:
            raise KeyboardInterrupt if killed else ValueError
        yield 1.0

    for killed in (True, True, False):
        with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
            fill(tmp_path, train, METHOD)
    assert [one["state"] for one in trials_in(tmp_path, METHOD)] == ["fail", *["complete"] * 11]


def test_hopeless_trials_are_pruned(tmp_path: Path) -> None:
    """Trials 5 and 11 begin below the median of the others; six are complete before 11, not before 5."""

    def train(arm: Arm, number: int, values: Any) -> Iterable[float]:
        return [3.0, 2.0, 99.0] if number in (5, 11) else [5.0 + number, 6.0, 7.0]

    (found,) = fill(tmp_path, train, METHOD, pruner=optuna.pruners.MedianPruner(6, 2))
    assert [one["state"] for one in found] == ["complete"] * 11 + ["pruned"]
    assert (found[11]["value"], found[11]["epochs"], found[5]["value"]) == (3.0, 2, 99.0)


def test_a_failed_trial_is_tried_again_by_the_next_process_only_and_nothing_but_failures_ends(tmp_path: Path) -> None:
    def train(arm: Arm, number: int, values: Any) -> Iterator[float]:
        begun.append(number)
        if number in broken:
            raise ValueError("no space left")
        yield 1.0

    broken, begun = range(12), []
    with pytest.raises(ValueError, match="no space left"):
        fill(tmp_path, train, METHOD)
    broken = range(4, 5)
    for times in (1, 2):
        (found,) = fill(tmp_path, train, METHOD)
        assert [one["state"] for one in found] == [*["complete"] * 4, "fail", *["complete"] * 7]
        assert [begun.count(number) for number in range(12)] == [2, 2, 2, 1, times, *[1] * 7]
    assert found[4]["error"] == "no space left"
