"""Carry out a sweep: trials that any number of processes share, each carried out once; and show the result.

An arm of a sweep, the method or plain training, is a study of Optuna's in a journal. A trial has a number, a seed and,
of a grid, its values. Whoever holds the lock of its number carries it out, so a process that is killed frees it; it
then begins again with the values that were drawn for it, and its run goes on where it was.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import optuna
import pandas
from optuna.samplers import PartialFixedSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial
from optuna.trial import TrialState as State
from rich.console import Console

from attn_reg_plugin.experiments.checks import check_runs
from attn_reg_plugin.experiments.executing import Reporter, RunError, Slots, at_a_time, visible_gpus
from attn_reg_plugin.experiments.flags import contrast
from attn_reg_plugin.experiments.sweep.report import publish
from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.files import FolderInUse, lock_folder
from attn_reg_plugin.terminal import say

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.runs import Run
    from attn_reg_plugin.experiments.sweep.settings import Arm, Sweep

#: seconds between two looks for work
WAIT = 2.0
#: after so many failures and no success the settings are wrong, not the trial
HOPELESS = 3
#: carries out a trial until the event is set; a ValueError is the trial's failure
Train = Callable[["Arm", Trial, Event], float]

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class Side:
    """An arm and its study, which is opened in a folder or begun there; `how` is for `optuna.create_study`."""

    def __init__(self, arm: Arm, folder: Path, **how: Any) -> None:
        storage = JournalStorage(JournalFileBackend(str(folder / "sweep.journal")))
        self.arm, self.folder = arm, folder
        self.study = optuna.create_study(study_name=arm.name, storage=storage, load_if_exists=True, **how)
        #: of Optuna's trials at the start; those of them that had failed are tried again
        self.begun = len(self.study.trials)

    def latest(self) -> dict[int, FrozenTrial]:
        """Optuna's last trial of each number."""
        trials = (one for one in self.study.get_trials(deepcopy=False) if "trial" in one.user_attrs)
        return dict(sorted((one.user_attrs["trial"], one) for one in trials))

    def failed(self) -> dict[int, str]:
        """Trials that failed since the start: number -> error."""
        found = {number: one for number, one in self.latest().items() if one.number >= self.begun}
        return {number: one.user_attrs["error"] for number, one in found.items() if "error" in one.user_attrs}

    def left(self) -> list[int]:
        """The numbers of the trials that are not over."""
        ended = {number for number, one in self.latest().items() if one.state in (State.COMPLETE, State.PRUNED)}
        return [number for number in range(len(self.arm.trials)) if number not in ended | self.failed().keys()]

    def carry_out(self, number: int, train: Train, stop: Event) -> None:
        """Carry out a trial that is not over, with the values of the one before it that was lost or failed."""
        if number not in self.left():
            return
        (seed, values), before = self.arm.trials[number], self.latest().get(number)
        if before is not None:
            self.study.tell(before.number, state=State.FAIL, skip_if_finished=True)
            values = {**values, **before.params}
        own = copy.copy(self.study)  # another thread's has a sampler of its own
        # draws depend on the trial and those before it, not on the process
        own.sampler = PartialFixedSampler(values, TPESampler(seed=number, multivariate=False, constant_liar=True))
        trial = own.ask(dict(self.arm.space))
        trial.set_user_attr("trial", number)
        trial.set_user_attr("seed", seed)
        try:
            own.tell(trial, train(self.arm, trial, stop))
        except optuna.TrialPruned:
            own.tell(trial, state=State.PRUNED)
        except ValueError as error:
            if not stop.is_set():
                trial.set_user_attr("error", str(error))
            own.tell(trial, state=State.FAIL)


def fill(sides: Sequence[Side], train: Train, stop: Event) -> None:
    """Carry out trials until all are done, here or elsewhere; several threads and processes may do so.

    Raises:
        ValueError: the first trials all failed.
    """
    while not stop.is_set():
        errors = [error for side in sides for error in side.failed().values()]
        if len(errors) >= HOPELESS and not any(side.study.get_trials(False, [State.COMPLETE]) for side in sides):
            raise ValueError(errors[-1])
        left = sorted((number, place) for place, side in enumerate(sides) for number in side.left())
        if not left:
            return
        for number, place in left:  # in an order that keeps budgets equal
            side = sides[place]
            with contextlib.suppress(FolderInUse), lock_folder(side.folder, f"{place}-{number}.lock"):
                side.carry_out(number, train, stop)
                break
        else:
            stop.wait(WAIT)


def search(sweep: Sweep) -> int:
    """Do all trials that no other process does, and show the result; see `Sweep.carry_out`."""
    console, run, base = Console(file=sys.stdout), first_run(sweep), sweep.comparison()
    sides, slots = open_sides(sweep, run), Slots([] if base.cpu else visible_gpus(), sweep.jobs)
    try:
        with Reporter(console, sum(len(side.left()) for side in sides)) as reporter:

            def train(arm: Arm, trial: Trial, stop: Event) -> float:
                one = sweep.run_of(arm, trial.user_attrs["trial"], trial.user_attrs["seed"], trial.params)
                with slots.lent() as device:
                    return trained(dataclasses.replace(one, device=device), trial, reporter, base.epochs, stop)

            at_a_time([partial(fill, sides, train)] * sweep.jobs, sweep.jobs)
    except KeyboardInterrupt:
        say(console, "interrupted; the same command goes on")
        return 130
    return 0 if publish(sweep.out, sides, *run.metric, console) else 1


def first_run(sweep: Sweep) -> Run:
    """Try the commands of the first values, and of each value that is a text; the run of the first values.

    Raises:
        ValueError: a command cannot work.
        FileNotFoundError: data that is missing.
    """
    values = {key: getattr(how, "choices", None) or [how.low] for key, how in sweep.choices.items()}
    first = {key: own[0] for key, own in values.items()}
    texts = [{key: one} for key, own in values.items() for one in own[1:] if isinstance(one, str | bool)]
    tried = enumerate({**first, **text} for text in [{}, *texts])
    runs = [sweep.run_of(sweep.arms[0], number, sweep.seeds[0], values) for number, values in tried]
    check_runs(runs)
    return runs[0]


def open_sides(sweep: Sweep, run: Run) -> list[Side]:
    """Open the studies; a ValueError says that the folder holds a sweep with other settings."""
    own = {"searched": sweep.method, "space": sweep.space, "seeds": list(sweep.seeds), "drawn": bool(sweep.trials)}
    settings = {**run.settings, **own, "seed": None}
    # of epochs, which Optuna counts from 0, the first prunes none
    pruner = optuna.pruners.MedianPruner(5, 2) if sweep.pruner == "median" else optuna.pruners.NopPruner()
    direction = "maximize" if run.metric[1] else "minimize"
    sweep.out.mkdir(parents=True, exist_ok=True)
    sides = [Side(arm, sweep.out, pruner=pruner, direction=direction) for arm in sweep.arms]
    plain = sides[-1].study
    if said := contrast(plain.user_attrs.get("settings", settings), settings):
        raise ValueError(f"{sweep.out} holds a sweep with other settings ({said}); give another --out")
    plain.set_user_attr("settings", settings)
    return sides


def trained(run: Run, trial: Trial, reporter: Reporter, epochs: int, stop: Event) -> float:
    """Do the run of a trial and report each epoch; the value of the best one.

    Raises:
        RunError: the training fails or is stopped.
        optuna.TrialPruned: the trial is hopeless.
    """
    (metric, _), reported = run.metric, set()
    progress = reporter.begin(run.name, epochs)

    def watch(grown: TrainingLog) -> None:
        progress.watch(grown)
        log = run.log()  # also of before an interruption
        for epoch, value in log.history().get(f"valid_{metric}", pandas.Series()).dropna().items():
            if epoch not in reported and log.over(epoch):
                reported.add(epoch)
                trial.report(value, epoch)
                if trial.should_prune():
                    progress.finish("pruned")
                    raise optuna.TrialPruned

    trial.set_user_attr("folder", run.folder.name)
    try:
        while True:
            try:
                run.claim()
                run.carry_out(watch, stop)
                break
            except FolderInUse:  # a training that has outlived its process
                if stop.wait(WAIT):
                    raise
    except RunError as error:
        progress.set_aside(f"failed: {error}\n{error.tail}".strip())
        raise
    watch(run.log())
    value = run.result()["training"]["figures"][metric]
    progress.finish(f"{metric} {value:.3f}")
    return value
