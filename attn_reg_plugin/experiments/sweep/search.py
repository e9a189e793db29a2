"""Carry out a sweep: try its commands, open its studies, do the trials that no other process does, show the result."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

import optuna
import pandas
from rich.console import Console

from attn_reg_plugin.experiments.checks import check_runs
from attn_reg_plugin.experiments.executing import Reporter, RunError, Slots, at_a_time, visible_gpus
from attn_reg_plugin.experiments.flags import differing
from attn_reg_plugin.experiments.sweep import trials
from attn_reg_plugin.experiments.sweep.report import publish
from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.files import FolderInUse
from attn_reg_plugin.terminal import say

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.runs import Run
    from attn_reg_plugin.experiments.sweep.settings import Arm, Sweep


def search(sweep: Sweep) -> int:
    """Do all trials that no other process does, and show the result; see `Sweep.carry_out`."""
    console, run, base = Console(file=sys.stdout), first_run(sweep), sweep.comparison()
    studies = open_studies(sweep, run)
    slots, begun = Slots([] if base.cpu else visible_gpus(), sweep.jobs), [len(study.trials) for study in studies]
    try:
        with Reporter(console, len(trials.left(studies, sweep.arms, begun))) as reporter:

            def train(arm: Arm, trial: optuna.Trial, values: dict[str, Any], stop: Event) -> float:
                one = sweep.run_of(arm, trial.user_attrs["trial"], trial.user_attrs["seed"], values)
                with slots.lent() as device:
                    return trained(dataclasses.replace(one, device=device), trial, reporter, base.epochs, stop)

            work = partial(trials.fill, studies, sweep.arms, sweep.out, begun, train)
            at_a_time([work] * sweep.jobs, sweep.jobs)
    except KeyboardInterrupt:
        say(console, "interrupted; the same command goes on")
        return 130
    return 0 if publish(sweep.out, studies, sweep.arms, run.metric[0], console) else 1


def first_run(sweep: Sweep) -> Run:
    """Try the commands of the first values, and of each value that is a text; the run of the first values.

    Raises:
        ValueError: a command cannot work.
        FileNotFoundError: data that is missing.
    """
    arm, kinds = sweep.arms[0], sweep.choices.items()
    first = {key: how["choices"][0] if kind == "categorical" else how["low"] for key, (kind, how) in kinds}
    texts = [{key: one} for key, (_, how) in kinds for one in how.get("choices", ())[1:] if isinstance(one, str | bool)]
    tried = [{**first, **text} for text in [{}, *texts]]
    runs = [sweep.run_of(arm, number, arm.trials[0][0], values) for number, values in enumerate(tried)]
    check_runs(runs)
    return runs[0]


def open_studies(sweep: Sweep, run: Run) -> list[optuna.Study]:
    """Open the study of each arm; a ValueError says that the folder holds a sweep with other settings."""
    own = {"searched": sweep.method, "space": sweep.space, "seeds": list(sweep.seeds), "drawn": bool(sweep.trials)}
    settings = {**run.settings, **own, "seed": None}
    # of epochs, which Optuna counts from 0, the first prunes none
    pruner = optuna.pruners.MedianPruner(5, 2) if sweep.pruner == "median" else optuna.pruners.NopPruner()
    how = {"pruner": pruner, "direction": "maximize" if run.metric[1] else "minimize"}
    sweep.out.mkdir(parents=True, exist_ok=True)
    studies = [trials.open_study(sweep.out, arm.name, **how) for arm in sweep.arms]
    for study in studies:
        if found := differing(study.user_attrs.get("settings", settings), settings):
            said = [f"{key}: {old or 'absent'} there, {new or 'absent'} asked for" for key, (old, new) in found.items()]
            said = f"holds a sweep with other settings ({'; '.join(said[:3])})"
            raise ValueError(f"{sweep.out} {said}; give another --out")
        study.set_user_attr("settings", settings)
    return studies


def trained(run: Run, trial: optuna.Trial, reporter: Reporter, epochs: int, stop: Event) -> float:
    """Do the run of a trial and report each epoch; the value of the best one.

    Raises:
        RunError: the training fails or is stopped.
        optuna.TrialPruned: the trial is hopeless.
    """
    metric, _ = run.metric
    progress, reported = reporter.start(run.name, epochs), set()

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
                watch(TrainingLog())
                run.carry_out(watch, stop)
                break
            except FolderInUse:  # a training that has outlived its process
                if stop.wait(trials.WAIT):
                    raise
        watch(run.log())
    except RunError as error:
        progress.set_aside(f"failed: {error}\n{error.tail}".strip())
        raise
    value = run.result()["training"]["figures"][metric]
    progress.finish(f"{metric} {value:.3f}")
    return value
