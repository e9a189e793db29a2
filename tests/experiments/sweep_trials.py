"""Sweeps whose runs train nothing: trials in a storage, and processes that fill them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from rich.console import Console

from attn_reg_plugin.experiments import sweep_study, sweep_work
from attn_reg_plugin.experiments.executing_before import RunError
from attn_reg_plugin.experiments.jobs import Slots
from attn_reg_plugin.experiments.progress import Reporter
from attn_reg_plugin.experiments.sweep_objective import Objective
from attn_reg_plugin.experiments.sweep_space import Arm, Dimension, Slot, equal_budget, slots_of
from attn_reg_plugin.experiments.sweep_storage import open_storage, sqlite_url
from attn_reg_plugin.experiments.sweep_study import SharedTrials
from attn_reg_plugin.experiments.sweep_work import Worker
from attn_reg_plugin.experiments.training_log import TrainingLog

DIMENSIONS = (Dimension("p", values=(0.1, 0.2, 0.3)), Dimension("lr", True, (1.0, 2.0, 4.0, 8.0)))
SHARED = DIMENSIONS[1:]
SLOTS = slots_of(DIMENSIONS, (1,), 0)
METHOD = Arm("ad_drop", "AD-DROP", DIMENSIONS, SLOTS)
PLAIN = Arm("plain", "plain", SHARED, equal_budget(SLOTS, SHARED, (1,)))
ACCURACY = Objective("accuracy", True, lambda figures: figures.get("accuracy"), lambda result: result["accuracy"])


def trials(folder: Path, arm: Arm = METHOD, pruner: Any = None) -> SharedTrials:
    """An arm's trials in an SQLite file."""
    return SharedTrials(open_storage(sqlite_url(folder / "sweep.db"), folder), arm.name, arm, True, pruner)


class FakeRun:
    """A run that says in a file that it was started, and is done at once.

    Attributes:
        curve: the accuracy after each epoch; by default one epoch of the slot's number.
    """

    def __init__(
        self, folder: Path, arm: Arm, slot: Slot, curve: list[float] | None = None, hangs: bool = False
    ) -> None:
        self.title, self.folder, self.hangs = f"{arm.name} {slot.number}", folder / f"{arm.name}-{slot.number}", hangs
        self.curve = [float(slot.number)] if curve is None else curve

    def claim(self) -> None:
        self.folder.mkdir(exist_ok=True)

    def carry_out(self, watch: Callable[[TrainingLog], None], stop: Event) -> None:
        with (self.folder / "started").open("a") as file:
            file.write(f"{os.getpid()}\n")
        while self.hangs:
            time.sleep(1)
        for epochs in range(1, len(self.curve) + 1):
            watch(self.log(epochs))
            if stop.is_set():
                raise RunError(f"{self.title} was stopped")

    def has_log(self) -> bool:
        return (self.folder / "started").exists()

    def log(self, epochs: int | None = None) -> TrainingLog:
        validations = {(i, i): {"accuracy": x} for i, x in enumerate(self.curve[:epochs], start=1)}
        return TrainingLog(train_wall={epoch: 1.0 for epoch, _ in validations}, validations=validations)

    def result(self) -> dict[str, Any]:
        return {"accuracy": max(self.curve), "training": {"epochs": len(self.curve)}}


def worker(folder: Path, make: Callable[..., Any], *arms: SharedTrials) -> Worker:
    """Of runs that train nothing."""
    silent = Reporter(Console(file=(folder / "said").open("a")))
    silent.__enter__()
    return Worker(arms, make, ACCURACY, silent, 3, Slots((), 1))


def fill(folder: Path, hangs_at: int | None, beat: float, grace: float) -> None:
    """What a process does that fills a sweep; of its own runs one hangs."""
    sweep_study.BEAT, sweep_study.GRACE, sweep_work.WAIT = beat, grace, 0.1
    made: list[int] = []

    def make(arm: Arm, slot: Slot, values: dict[str, Any]) -> FakeRun:
        made.append(slot.number)
        time.sleep(0.02)
        return FakeRun(folder, arm, slot, hangs=len(made) == hangs_at)

    worker(folder, make, trials(folder, METHOD), trials(folder, PLAIN)).work(threading.Event())
