"""The content of a log, in the same words for fairseq and Trainer: scores, curves, drop rates and time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.report.drop_rates import Rates, newest_trainer_state, rates_of_log
from attn_reg_plugin.experiments.training_log import finite, read_log, seconds_per_epoch
from attn_reg_plugin.files import read_json

#: figures that fairseq and Trainer log with every validation and that say nothing of the model
_OF_THE_MACHINE = ("num_updates", "wps", "wpb", "bsz", "ups", "wall", "train_wall", "ppl")
_OF_TRAINER = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
#: by how much the steps per second that Trainer logs can be off
_ROUNDED = 0.0005
#: beginnings of the names of curves
VALID, TRAIN = "validation", "training"


@dataclass(frozen=True)
class Logged:
    """The content of a log.

    Attributes:
        scores: by subset and metric.
        curves: `validation NAME` or `training NAME` -> epoch -> value.
        rates: the drop rates by site.
        seconds: elapsed, per epoch: of fairseq in updates, of Trainer of the session that ended last.
        epochs: that were trained.
    """

    scores: Mapping[tuple[str, str], float] = field(default_factory=dict)
    curves: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    rates: Mapping[str, Rates] = field(default_factory=dict)
    seconds: float | None = None
    epochs: float | None = None


def read_logged(folder: Path) -> Logged:
    """The log of a run: `train.log` or the first other json log of fairseq in its folder, else Trainer's state."""
    for path in (folder / "train.log", *sorted(folder.glob("*.log"))):
        if path.is_file() and (found := _of_fairseq(path)).curves:
            return found
    state = newest_trainer_state(folder)
    return Logged() if state is None else _of_trainer(state)


def _of_fairseq(path: Path) -> Logged:
    """The curves have the last validation of each epoch; the score is the lowest validation loss."""
    log = read_log(path)
    history = log.history().replace([math.inf, -math.inf], math.nan)
    nll = "valid_nll_loss" in history  # with label smoothing, `loss` is another function for some methods
    curves = {}
    for name in (name for name in history if name.startswith("valid_")):
        known = name[6:] in _OF_THE_MACHINE or name.startswith("valid_best_") or (nll and name == "valid_loss")
        if not known and (curve := history[name].dropna().to_dict()):
            curves[f"{VALID} {name[6:]}"] = curve
    loss = next((name for name in ("train_nll_loss", "train_loss") if name in history), None)
    if loss and (curve := history[loss].dropna().to_dict()):
        curves[f"{TRAIN} {loss[6:]}"] = curve
    try:
        name, best = log.best_validation()
        scores = {("valid", name): best}
    except ValueError:
        scores = {}
    seconds = seconds_per_epoch(log, path.parent / "checkpoints" / "checkpoint_last.pt")
    return Logged(scores, curves, rates_of_log(path), seconds, len(log.trainings) or None)


def _of_trainer(state: Path) -> Logged:
    """The scores are those of the step that Trainer chose as the best, else of the last evaluation; losses last.

    Raises:
        ValueError: it isn't such a file.
    """
    content = read_json(state)
    if not isinstance(content.get("log_history"), list):
        raise ValueError(f"{state} has no log_history, so Trainer did not write it")
    records = [record for record in content["log_history"] if isinstance(record, dict)]
    curves: dict[str, dict[float, float]] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for record in records:
        epoch = round(finite(record.get("epoch")) or 0.0, 4)
        if (loss := finite(record.get("loss"))) is not None:
            curves.setdefault(f"{TRAIN} loss", {})[epoch] = loss
        for key, value in record.items():
            name, number = str(key).removeprefix("eval_"), finite(value)
            if str(key).startswith("eval_") and number is not None and not name.endswith(_OF_TRAINER):
                curves.setdefault(f"{VALID} {name}", {})[epoch] = number
                evaluations.setdefault(int(finite(record.get("step")) or 0), {})[name] = number
    best = content.get("best_global_step")
    chosen = evaluations.get(best if best in evaluations else max(evaluations, default=0), {})
    scores = {("valid", name): chosen[name] for name in sorted(chosen, key=lambda name: "loss" in name)}
    ended = next((record for record in reversed(records) if "train_runtime" in record), {})
    return Logged(
        scores, curves, rates_of_log(state), _seconds_of_session(content | ended), finite(content.get("epoch"))
    )


def _seconds_of_session(ended: Mapping[str, Any]) -> float | None:
    """Seconds per epoch of the session of Trainer that ended last; its `train_runtime` leaves out those before it.

    Args:
        ended: what it logged at the end: `train_runtime` in seconds, the `epoch` and the `step` that it reached.
    """
    names = ("train_runtime", "epoch", "step", "train_steps_per_second")
    seconds, epochs, steps, rate = (finite(ended.get(name)) for name in names)
    if not seconds or not epochs:
        return None
    own = (rate or 0.0) * seconds  # its steps, of a rate that is rounded to thousandths
    resumed = steps and 0 < own < steps - max(0.5, _ROUNDED * seconds)
    # earlier versions of transformers divide all steps that were planned by the time, which says nothing
    return seconds / epochs * (steps / own if resumed else 1.0)
