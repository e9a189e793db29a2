"""Trials that processes share: each is carried out once, whoever is killed, slow or in a hurry."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna
from optuna.trial import TrialState

from attn_reg_plugin.experiments.sweep import trials
from attn_reg_plugin.experiments.sweep.settings import Arm
from attn_reg_plugin.experiments.sweep.trials import attempts
from tests import processes

SPACE = {
    "p": ("categorical", {"choices": list((0.1, 0.2, 0.3))}),
    "lr": ("categorical", {"choices": list((1.0, 2.0, 4.0, 8.0))}),
}
GRID = [(1, {"p": p, "lr": lr}) for p in (0.1, 0.2, 0.3) for lr in (1.0, 2.0, 4.0, 8.0)]
METHOD = Arm("ad_drop", SPACE, GRID)
PLAIN = Arm("plain", {"lr": SPACE["lr"]}, [(i + 1, {"lr": v["lr"]}) for i, (_, v) in enumerate(GRID)])
Train = Callable[..., float]


def open_studies(folder: Path, *arms: Arm, pruner: Any = None) -> list[Any]:
    """The studies of these arms in an SQLite file."""
    storage = trials.open_storage(f"sqlite:///{folder / 'sweep.db'}")
    how = {"storage": storage, "direction": "maximize", "load_if_exists": True, "pruner": pruner}
    return [optuna.create_study(study_name=arm.name, **how) for arm in arms]


def fill(folder: Path, train: Train, *arms: Arm, pruner: Any = None) -> list[Any]:
    """Carry out the trials of these arms; their studies."""
    pruner = pruner or optuna.pruners.NopPruner()
    studies = open_studies(folder, *arms, pruner=pruner)
    trials.fill(studies, arms, folder, train, threading.Event())
    return studies


def standing(study: Any) -> dict[int, Any]:
    """The trial of each number that counts."""
    return {number: tried[0] for number, tried in attempts(study).items()}


def number_of(trial: Any) -> float:
    return float(trial.user_attrs["trial"])


def hang_at(folder: Path, place: int | None) -> None:
    """What a process does that fills a sweep; of its own trials one hangs."""
    trials.BEAT, trials.GRACE, trials.WAIT = 1, 2, 0.1
    begun: list[int] = []

    def train(arm: Arm, trial: Any, values: dict[str, Any], stop: Any) -> float:
        begun.append(trial.number)
        with (folder / "begun" / f"{arm.name}-{trial.user_attrs['trial']}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        while len(begun) == place:
            time.sleep(1)
        time.sleep(0.02)
        return number_of(trial)

    fill(folder, train, METHOD, PLAIN)


def test_two_processes_of_which_one_is_killed_carry_out_each_trial_once(tmp_path: Path) -> None:
    """Twelve trials and twelve plain ones; the killed process was in the middle of its third."""
    open_studies(tmp_path, METHOD, PLAIN)  # the tables
    (tmp_path / "begun").mkdir()
    victim = processes.start(hang_at, tmp_path, 3)
    other = processes.start(hang_at, tmp_path, None)

    def begun() -> list[Path]:
        return [path for path in tmp_path.glob("begun/*") if f"{victim.pid}\n" in path.read_text()]

    until = time.monotonic() + processes.PATIENCE
    while len(begun()) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    victim.kill()
    victim.join(processes.PATIENCE)
    other.join(processes.PATIENCE)
    assert other.exitcode == 0 and len(begun()) == 3
    lost = 0
    for study in open_studies(tmp_path, METHOD, PLAIN):
        complete = [one for one in study.trials if one.state == TrialState.COMPLETE]
        assert sorted(number_of(one) for one in complete) == [one.value for one in standing(study).values()]
        assert sorted(number_of(one) for one in complete) == list(range(12))
        lost += sum(
            len((tmp_path / "begun" / f"{study.study_name}-{number}").read_text().split()) == 2 for number in range(12)
        )
    assert lost == 1, "the third of the killed process, and nothing else, was carried out again"


def test_a_trial_that_was_killed_before_its_first_heartbeat_is_enqueued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_studies(tmp_path, METHOD)[0]
    trials.enqueue(study, METHOD)
    study.ask()
    trials.enqueue(study, METHOD)
    assert [len(tried) for tried in attempts(study).values()] == [1] * 12
    monkeypatch.setattr(trials, "GRACE", -1)
    trials.enqueue(study, METHOD)
    assert [len(tried) for tried in attempts(study).values()] == [2, *[1] * 11]


def test_of_two_trials_of_a_number_the_earlier_one_counts(tmp_path: Path) -> None:
    """As two machines without a common folder enqueue them."""
    study = open_studies(tmp_path, METHOD)[0]
    for number, (seed, values) in [*enumerate(GRID)] * 2:
        study.enqueue_trial(values, user_attrs={"trial": number, "seed": seed})
    begun: list[int] = []

    def train(arm: Arm, trial: Any, values: dict[str, Any], stop: Any) -> float:
        begun.append(trial.user_attrs["trial"])
        return number_of(trial)

    threads = [threading.Thread(target=fill, args=(tmp_path, train, METHOD)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == list(range(12))
    assert [one.state for one in standing(study).values()] == [TrialState.COMPLETE] * 12


def test_a_process_that_was_only_slow_stops_and_its_value_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = Arm("ad_drop", SPACE, GRID[:1])
    monkeypatch.setattr(trials, "WAIT", 0.0)
    values = []

    def train(arm: Arm, trial: Any, drawn: dict[str, Any], stop: Any) -> float:
        values.append(7.0 + len(values))
        if len(values) == 1:  # another process takes this one for dead
            trial.study.tell(trial.number, state=TrialState.FAIL)
        trial.report(0.5, 1)
        return values[-1]

    fill(tmp_path, train, arm)
    tried = attempts(open_studies(tmp_path, arm)[0])[0]
    assert [(one.state, one.value) for one in tried] == [(TrialState.COMPLETE, 8.0), (TrialState.FAIL, None)]


def test_an_interrupted_trial_is_free_at_once_and_what_was_drawn_stays(tmp_path: Path) -> None:
    """Its run goes on in its folder, so its values are those of before."""
    space = {
        "p": ("float", {"low": 0, "high": 1}),
        "lr": ("float", {"low": 1e-5, "high": 1e-2, "log": True}),
        "n": ("int", {"low": 1, "high": 9}),
    }
    arm = Arm("ad_drop", space | {"sites": ("categorical", {"choices": list(("*", "x"))})}, [(5, {}), (6, {}), (5, {})])
    drawn: list[dict[str, Any]] = []

    def train(arm: Arm, trial: Any, values: dict[str, Any], stop: Any) -> float:
        drawn.append(values)
        if len(drawn) == 1:
            raise KeyboardInterrupt
        return values["p"]

    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path, train, arm)
    fill(tmp_path, train, arm)
    assert sorted(one["p"] for one in drawn[1:]) == sorted({one["p"] for one in drawn}), (
        "three, of which one came twice"
    )
    assert 1e-5 <= drawn[0]["lr"] <= 1e-2 and drawn[0]["n"] in range(1, 10)
    found = standing(open_studies(tmp_path, arm)[0])
    assert [one.state for one in found.values()] == [TrialState.COMPLETE] * 3 and found[0].params == drawn[0]
    assert [one.user_attrs["seed"] for one in found.values()] == [5, 6, 5]


def test_draws_depend_on_the_trial_and_not_on_the_process(tmp_path: Path) -> None:
    arm = Arm("ad_drop", {"p": ("float", {"low": 0, "high": 1})}, [(1, {})] * 13)
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (study,) = fill(tmp_path / name, lambda arm, trial, values, stop: values["p"], arm)
        found.append([one.params["p"] for one in standing(study).values()])
    assert found[0] == found[1] and len(set(found[0])) == 13


def test_hopeless_trials_are_pruned(tmp_path: Path) -> None:
    """Trials 5 and 11 begin below the median of the others; six are complete before 11, not before 5."""

    def train(arm: Arm, trial: Any, values: dict[str, Any], stop: Any) -> float:
        number = trial.user_attrs["trial"]
        for epoch, value in enumerate([3.0, 2.0, 99.0] if number in (5, 11) else [5.0 + number, 6.0, 7.0], start=1):
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 5.0 + number

    fill(tmp_path, train, METHOD, pruner=optuna.pruners.MedianPruner(6, 2))
    found = standing(open_studies(tmp_path, METHOD)[0])
    assert [one.state for one in found.values()] == [TrialState.COMPLETE] * 11 + [TrialState.PRUNED]
    assert found[11].intermediate_values == {1: 3.0, 2: 2.0}


def test_a_failed_trial_is_tried_again_by_the_next_process_only(tmp_path: Path) -> None:
    def train(arm: Arm, trial: Any, values: dict[str, Any], stop: Any) -> float:
        if trial.user_attrs["trial"] == 4:
            raise ValueError("the training ended with exit status 1")
        return 1.0

    study = open_studies(tmp_path, METHOD)[0]
    for times in (1, 2):
        trials.enqueue(study, METHOD, again=True)
        fill(tmp_path, train, METHOD)
        assert [one.state for one in standing(study).values()] == [
            *[TrialState.COMPLETE] * 4,
            TrialState.FAIL,
            *[TrialState.COMPLETE] * 7,
        ]
        tried = attempts(study)
        assert [len(tried[number]) for number in tried] == [*[1] * 4, times, *[1] * 7]
    assert tried[4][-1].user_attrs["error"] == "the training ended with exit status 1"


def test_where_everything_fails_it_ends(tmp_path: Path) -> None:
    def train(*_: Any) -> float:
        raise ValueError("no space left")

    with pytest.raises(ValueError, match="no space left"):
        fill(tmp_path, train, METHOD)
    states = [one.state for one in standing(open_studies(tmp_path, METHOD)[0]).values()]
    assert states.count(TrialState.FAIL) == trials.HOPELESS and TrialState.RUNNING not in states


@pytest.mark.parametrize("url", ["nonsense", "nonsense://x", "postgresql://me:secret@localhost:1/x", "sqlite:////no/x"])
def test_a_storage_that_cannot_be_opened(url: str) -> None:
    with pytest.raises(ValueError, match=r"^--storage cannot be opened: ") as error:
        trials.open_storage(url)
    assert "secret" not in str(error.value)
