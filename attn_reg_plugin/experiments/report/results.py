"""The runs of an experiment as a table and a page look at them: scores, examples, time, and what their logs hold."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.predicted import read_predictions
from attn_reg_plugin.experiments.report.differences import Key
from attn_reg_plugin.experiments.report.examples import Examples, of_predictions, of_translations
from attn_reg_plugin.experiments.running.run import LABELLED, Run, read_runs
from attn_reg_plugin.experiments.running.training_log import TrainingLog, read_log
from attn_reg_plugin.files import raw_lines

#: figures that fairseq logs with every validation and that say nothing of the model
_OF_THE_MACHINE = ("num_updates", "wps", "wpb", "bsz", "ups", "wall", "train_wall", "ppl")
#: beginnings of the names of curves
VALID, TRAIN = "validation", "training"
#: words in the names of scores of which the lower is the better
_ERRORS = frozenset(["loss", "perplexity", "wer", "cer", "ter", "mer", "mse", "rmse", "mae", "error", "err", "ppl"])


def lower_is_better(metric: str) -> bool:
    """Whether a score is a loss or counts errors, as its name says."""
    return not _ERRORS.isdisjoint(re.split(r"[^a-z]+", metric.lower()))


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run and its figures.

    Attributes:
        method, title: of the row.
        seed, folder: of the run.
        scores: by subset and metric, the chief one first.
        seconds: elapsed, of an epoch; None where it is unknown, as of a method that doesn't train.
        epochs: that were trained.
        constant: whether it predicts one class (or value) for every example, or translates each into one sentence.
        rising: whether the last of several validations is the best, so that more epochs may do better.
        finished: whether its training is over, and it has a score.
        settings: as `run.json` has them.
    """

    method: str
    title: str
    seed: int
    folder: Path
    scores: Mapping[Key, float]
    seconds: float | None = None
    epochs: float | None = None
    constant: bool = False
    rising: bool = False
    finished: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def log(self) -> TrainingLog:
        """The log of its training; empty without one."""
        return read_log(self.folder / "train.log")

    @property
    def idle(self) -> bool:
        """Whether it names a method that regularized none of the epochs, as its log says."""
        epochs, method = self.log.trainings.values(), self.settings.get("flags", {}).get("attn-reg", "none")
        return method != "none" and bool(epochs) and not any("attn_reg/regularized" in figures for figures in epochs)

    @property
    def warming(self) -> bool:
        """Whether it ended before the learning rate had risen."""
        updates = max((updates for _, updates in self.log.validations), default=math.inf)
        return bool(self.epochs) and updates < float(self.settings.get("flags", {}).get("warmup-updates", 0))

    @cached_property
    def curves(self) -> dict[str, dict[float, float]]:
        """`validation NAME` or `training NAME` -> epoch -> the last value in its log that is finite."""
        history = self.log.history().replace([math.inf, -math.inf], math.nan)
        nll = "valid_nll_loss" in history  # with label smoothing, `loss` is another function for some methods
        names = {}
        for name in (name for name in history if name.startswith("valid_")):
            if not (name[6:] in _OF_THE_MACHINE or name.startswith("valid_best_") or (nll and name == "valid_loss")):
                names[name] = f"{VALID} {name[6:]}"
        loss = [name for name in ("train_nll_loss", "train_loss") if name in history][:1]
        names |= {name: f"{TRAIN} {name[6:]}" for name in loss}
        return {title: curve for name, title in names.items() if (curve := history[name].dropna().to_dict())}

    @cached_property
    def examples(self) -> dict[Key, Examples]:
        """The scores as functions of the examples, of those subsets whose predictions are in the folder."""
        found: dict[str, dict[str, Examples]] = {}
        for path in sorted((self.folder / "translations").glob("*.references.*")):
            subset, _, language = path.name.split(".")
            text = path.with_name(f"{subset}.{language}")
            if text.is_file():
                found[subset] = of_translations(raw_lines(text), raw_lines(path), language)
        if self.settings.get("kind") == LABELLED:
            kind, labels = self.settings["task_kind"], self.settings.get("labels") or ()
            for path in sorted((self.folder / "predictions").glob("*.tsv")):
                metrics = [metric for subset, metric in self.scores if subset == path.stem]
                found[path.stem] = of_predictions(kind, metrics, *read_predictions(path, kind, labels))
        return {(subset, metric): one for subset, by_metric in found.items() for metric, one in by_metric.items()}


def result_of(run: Run) -> RunResult:
    """The figures of a run of `attn-reg compare` or `finetune`."""
    result = run.result()
    training = result.get("training", {})
    epochs, interval = training.get("epochs"), int(run.flags.get("validate-interval", 1))
    return RunResult(
        method=run.method,
        title=run.title,
        seed=run.seed,
        folder=run.folder,
        scores={(subset, name): value for subset, scores in run.scores.items() for name, value in scores.items()},
        seconds=training.get("seconds_per_epoch"),
        epochs=epochs,
        constant=bool(result.get("constant")),
        rising=bool(epochs and training["best_epoch"] == epochs > interval),
        finished=bool(result.get("scores")),
        settings=run.settings,
    )


def read_results(folder: Path) -> list[RunResult]:
    """The runs in a folder, method by method.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there is no run in it, or the files of one cannot be read.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give a folder of attn-reg compare or finetune")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if runs := read_runs(folder):
        return [result_of(run) for run in runs]
    raise ValueError(f"{folder} has no runs of attn-reg compare or finetune in it")
