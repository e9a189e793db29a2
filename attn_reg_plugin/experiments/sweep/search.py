"""Carry out a sweep: trials that any number of processes share, each carried out once; and show the result.

An arm of a sweep, the method or plain training, is a study of Optuna's in a journal. A trial is a run in a folder, and
what was drawn for it stands there. Whoever holds the folder carries it out, so a process that is killed frees it; the
trial then begins again with the same values, and its training goes on where it was.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import optuna
import pandas
from optuna.samplers import PartialFixedSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState
from rich.console import Console

from attn_reg_plugin.experiments.running.checks import check_runs
from attn_reg_plugin.experiments.running.executor import RunError, carry_out
from attn_reg_plugin.experiments.running.flags import contrast
from attn_reg_plugin.experiments.running.run import Run
from attn_reg_plugin.experiments.running.training_log import TrainingLog
from attn_reg_plugin.experiments.sweep.report import publish
from attn_reg_plugin.experiments.sweep.settings import TRIAL, text_of
from attn_reg_plugin.files import lock_folder, read_json, write_json

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.sweep.settings import Arm, Sweep

#: failures of an arm without a success, after which the settings are wrong, not the trial
HOPELESS = 3
COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


@dataclass(frozen=True, kw_only=True)
class TrialRun(Run):
    """The run of a trial, whose values are drawn when it begins.

    Attributes:
        arm, number, study: whose trial it is.
        make: the run with some values, in the same folder.
    """

    arm: Arm
    number: int
    study: optuna.Study
    make: Callable[[Mapping[str, Any]], Run]

    @property
    def trial(self) -> dict[str, Any]:
        """The trial as its folder has it: its values, and once it has ended its state; empty before it begins."""
        path = self.folder / TRIAL
        return read_json(path) if path.exists() else {}

    def finished(self) -> bool:
        """Whether it is complete or pruned."""
        return self.trial.get("state") in ("complete", "pruned")

    def carry_out(self, watch: Callable[[TrainingLog], None], stop: Event | None = None) -> None:
        """Carry it out unless it is over; a RunError says that it failed, another ValueError that all trials do."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.folder) as lock:
            if self.finished():
                return
            trial = self.ask()
            try:
                self.end(trial, COMPLETE, self.train(trial, lock, watch, stop))
            except optuna.TrialPruned:
                self.end(trial, PRUNED)
            except ValueError as error:
                if stop is None or not stop.is_set():
                    trial.set_user_attr("error", str(error))
                    self.end(trial, FAIL, error=str(error))
                tried = self.study.get_trials(deepcopy=False)
                failed = sum("error" in one.user_attrs for one in tried)  # what was lost to a kill is no failure
                if failed >= HOPELESS and all(one.state != COMPLETE for one in tried):
                    raise ValueError(str(error)) from None
                raise RunError(str(error), getattr(error, "tail", "")) from None

    def ask(self) -> Trial:
        """A trial of Optuna's, with the values of the one before it where that was lost or failed."""
        before, (seed, values) = self.trial, self.arm.trials[self.number]
        if before:
            self.study.tell(before["number"], state=FAIL, skip_if_finished=True)
            values = before["values"]
        own = copy.copy(self.study)  # another thread's has a sampler of its own
        # draws depend on the trial and those before it, not on the process
        own.sampler = PartialFixedSampler(values, TPESampler(seed=self.number, multivariate=False, constant_liar=True))
        trial = own.ask(dict(self.arm.space))
        about = {"arm": self.arm.name, "trial": self.number, "seed": seed, "folder": self.folder.name}
        write_json(self.folder / TRIAL, {**about, "number": trial.number, "values": trial.params})
        trial.set_user_attr("folder", self.folder.name)
        return trial

    def train(self, trial: Trial, lock: int, watch: Callable[[TrainingLog], None], stop: Event | None) -> float:
        """Do the run and report each epoch; the value of the best one. A TrialPruned says that it is hopeless."""
        run = dataclasses.replace(self.make(trial.params), device=self.device)
        (metric, _), reported = run.metric, set()

        def report(grown: TrainingLog) -> None:
            watch(grown)
            log = run.log()  # also of before an interruption
            for epoch, value in log.history().get(f"valid_{metric}", pandas.Series()).dropna().items():
                if epoch not in reported and log.over(epoch):
                    reported.add(epoch)
                    trial.report(value, epoch)
                    if trial.should_prune():
                        raise optuna.TrialPruned

        run.record()
        run.work(lock, report, stop)
        report(run.log())
        return run.result()["training"]["figures"][metric]

    def end(self, trial: Trial, state: TrialState, value: float | None = None, error: str | None = None) -> None:
        """Tell Optuna and the folder how a trial ended; a pruned one has the best value that it had reached."""
        ended = self.study.tell(trial, value, state)
        if state == PRUNED:
            best = max if self.study.direction.name == "MAXIMIZE" else min
            value = best(ended.intermediate_values.values())
        about = {"state": state.name.lower(), "value": value, "epochs": ended.last_step, "error": error}
        write_json(self.folder / TRIAL, {**self.trial, **about})


def trials_of(out: Path, sides: Sequence[tuple[Arm, optuna.Study]], make: Callable[..., Run]) -> list[TrialRun]:
    """The trials that are left, in an order that keeps budgets equal; `make` is as `Sweep.run_of`."""
    trials = []
    for number, (arm, study) in itertools.product(range(len(sides[0][0].trials)), sides):
        about = {"method": f"{arm.name}, trial {number}", "seed": arm.trials[number][0]}
        own = {"arm": arm, "number": number, "study": study, "make": partial(make, arm, number)}
        trials.append(TrialRun(out / arm.folder(number), about, **own))
    return [one for one in trials if not one.finished()]


def open_study(out: Path, name: str, **how: Any) -> optuna.Study:
    """The study in a folder's journal, which is begun if there is none; `how` is for `optuna.create_study`."""
    storage = JournalStorage(JournalFileBackend(str(out / "sweep.journal")))
    return optuna.create_study(study_name=name, storage=storage, load_if_exists=True, **how)


def search(sweep: Sweep) -> int:
    """Do all trials that no other process does, and show the result; see `Sweep.carry_out`."""
    console, run, base = Console(file=sys.stdout), first_run(sweep), sweep.comparison()
    metric, maximize = run.metric
    # of epochs, which Optuna counts from 0, the first prunes none
    pruner = optuna.pruners.MedianPruner(5, 2) if sweep.pruner == "median" else optuna.pruners.NopPruner()
    how = {"pruner": pruner, "direction": "maximize" if maximize else "minimize"}
    sweep.out.mkdir(parents=True, exist_ok=True)
    sides = [(arm, open_study(sweep.out, arm.name, **how)) for arm in sweep.arms]
    own = {"searched": sweep.method, "space": sweep.space, "seeds": list(sweep.seeds), "drawn": bool(sweep.trials)}
    settings, (_, plain) = {**run.settings, **own, "seed": None}, sides[-1]
    if said := contrast(plain.user_attrs.get("settings", settings), settings):
        raise ValueError(f"{sweep.out} holds a sweep with other settings ({said}); give another --out")
    plain.set_user_attr("settings", settings)

    def summary(one: TrialRun) -> str:
        said = "pruned" if one.trial["state"] == "pruned" else f"{metric} {one.trial['value']:.3f}"
        return " with ".join(filter(None, [said, text_of(one.trial["values"])]))

    trials = trials_of(sweep.out, sides, sweep.run_of)
    if not carry_out(trials, console, base.epochs, summary, sweep.jobs, base.gpus, go_on=True):
        return 130
    return 0 if publish(sweep.out, sweep.arms, metric, maximize, console) else 1


def first_run(sweep: Sweep) -> Run:
    """Try the commands of the first values, and of each value that is a text; the run of the first values.

    Raises:
        ValueError: a command cannot work.
        FileNotFoundError: data that is missing.
    """
    values = {key: getattr(how, "choices", None) or [how.low] for key, how in sweep.choices.items()}
    first = {key: own[0] for key, own in values.items()}
    texts = [{key: one} for key, own in values.items() for one in own[1:] if isinstance(one, str | bool)]
    runs = [sweep.run_of(sweep.arms[0], 0, {**first, **text}) for text in [{}, *texts]]
    check_runs(runs)
    return runs[0]
