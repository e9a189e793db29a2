"""What a log says of a run, in the same words for fairseq and Trainer: scores, curves, drop rates and time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attn_reg_plugin.experiments.drop_rates import Rates, rates_of_lines, rates_of_log
from attn_reg_plugin.experiments.training_log import TrainingLog, finite, seconds_per_epoch
from attn_reg_plugin.files import read_json

#: figures that fairseq and Trainer log with every validation and that say nothing of the model
_OF_THE_MACHINE = ("num_updates", "wps", "wpb", "bsz", "ups", "wall", "train_wall", "ppl")
_OF_TRAINER = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
#: by how much the steps per second that Trainer logs can be off
_ROUNDED = 0.0005
#: the scores of a translation -> what they are called
TRANSLATION = {"bleu": "BLEU", "chrf": "chrF"}
#: words in the names of scores of which the lower is the better
_ERRORS = frozenset(["wer", "cer", "ter", "mer", "mse", "rmse", "mae", "error", "err", "ppl", "nll", "brier", "ece"])
#: what the curves are called
VALID, TRAIN = "validation", "training"
#: the same of examples held out of training
HELD_OUT = "held-out"


@dataclass(frozen=True)
class Figures:
    """What is known of a run.

    Attributes:
        scores: by name, the chief one first; see `lower_is_better`.
        curves: `validation NAME` or `training NAME` -> epoch -> value.
        rates: the drop rates by site.
        seconds: per epoch.
        epochs: that were trained.
    """

    scores: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    rates: Mapping[str, Rates] = field(default_factory=dict)
    seconds: float | None = None
    epochs: float | None = None


def lower_is_better(score: str) -> bool:
    """Whether a score is a loss or counts errors, as its name says."""
    return _is_loss(score) or not _ERRORS.isdisjoint(re.split(r"[^a-z]+", score.lower()))


def _is_loss(score: str) -> bool:
    return "loss" in score or "perplexity" in score


def figures_of_log(
    logs: Iterable[Path], result: Mapping[str, Any], checkpoints: Path, held_out: bool = False
) -> Figures:
    """The figures of a fairseq training.

    Args:
        logs: its json logs; those that are missing say nothing.
        result: what `result.json` of the run holds.
        checkpoints: folder of its checkpoints.
        held_out: whether it was validated on examples held out of its training set, and not on the validation set.
    """
    log, rates = TrainingLog(), {}
    for path in logs:
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines:
                log.add(line)
            rates = rates_of_lines(lines) or rates
    training = _mapping(result.get("training"))
    seconds = training.get("seconds_per_epoch", seconds_per_epoch(log, checkpoints / "checkpoint_last.pt"))
    logged = len(log.train_wall) or None
    return Figures(
        scores=_scores(log, result, held_out),
        curves=_curves(log, HELD_OUT if held_out else VALID),
        rates=rates,
        seconds=finite(seconds),
        epochs=finite(training.get("epochs", logged)),
    )


def _scores(log: TrainingLog, result: Mapping[str, Any], held_out: bool) -> dict[str, float]:
    """Official scores first, then the lowest validation loss."""
    training = _mapping(result.get("training"))
    subsets = _mapping(_mapping(result.get("translation")).get("scores"))
    found: dict[str, Any] = {}
    for subset, scores in subsets.items():
        for key, name in TRANSLATION.items():
            found[name if len(subsets) == 1 else f"{name} {subset}"] = _mapping(scores).get(key)
    for subset, scores in _mapping(_mapping(result.get("reported")).get("scores")).items():
        found |= {name if subset == "valid" else f"{name} {subset}": value for name, value in _mapping(scores).items()}
    chosen_by = _mapping(training.get("scores"))
    found |= {f"{name} held out": value for name, value in chosen_by.items()} if held_out else chosen_by
    found |= _mapping(_mapping(result.get("evaluation")).get("scores"))
    if "best_valid_loss" in training:
        found[f"best validation {training.get('loss', 'loss')}"] = training["best_valid_loss"]
    elif log.validations and "scores" not in training:
        try:
            name, value = log.best_validation()
            found[f"best validation {name}"] = value
        except ValueError:
            pass
    return {name: number for name, value in found.items() if (number := finite(value)) is not None}


def _curves(log: TrainingLog, valid: str = VALID) -> dict[str, dict[float, float]]:
    """The curves: what is validated, by epoch (the last validation of each), and the training loss.

    Args:
        valid: what it is validated on.
    """
    curves: dict[str, dict[float, float]] = {}
    for (epoch, _), figures in sorted(log.validations.items()):
        for name, value in figures.items():
            if name not in _OF_THE_MACHINE and not name.startswith("best_") and math.isfinite(value):
                curves.setdefault(f"{valid} {name}", {})[epoch] = value
    for epoch, figures in sorted(log.trainings.items()):
        name = "nll_loss" if "nll_loss" in figures else "loss"
        if math.isfinite(figures.get(name, math.nan)):
            curves.setdefault(f"{TRAIN} {name}", {})[epoch] = figures[name]
    nll = f"{valid} nll_loss"
    if nll in curves:  # with label smoothing, `loss` is another function for some methods
        curves.pop(f"{valid} loss", None)
    return curves


def figures_of_trainer(state: Path) -> tuple[Figures, dict[str, str]]:
    """The figures of a training of Trainer and its settings, from its `trainer_state.json`.

    Raises:
        ValueError: it isn't such a file.
    """
    content = read_json(state)
    history = content.get("log_history")
    if not isinstance(history, list):
        raise ValueError(f"{state} has no log_history, so Trainer did not write it")
    records = [record for record in history if isinstance(record, dict)]
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
    scores = {f"{VALID} {name}" if "loss" in name else name: value for name, value in chosen.items()}
    ended = next((record for record in reversed(records) if "train_runtime" in record), {})
    figures = Figures(
        scores=dict(sorted(scores.items(), key=lambda entry: _is_loss(entry[0]))),
        curves=curves,
        rates=rates_of_log(state),
        seconds=_seconds_of_session(content | ended),
        epochs=finite(content.get("epoch")),
    )
    return figures, _settings_of_trainer(state, content)


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


def _settings_of_trainer(state: Path, content: Mapping[str, Any]) -> dict[str, str]:
    """What the files beside a state tell of a training: Trainer's own arguments are kept as a pickle, left unread."""
    found = {name: content[name] for name in ("num_train_epochs", "max_steps", "train_batch_size") if name in content}
    config = state.parent / "config.json"
    values = read_json(config) if config.is_file() else {}
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads")
    found |= {name: values[name] for name in names if name in values}
    methods = sorted(state.parent.glob("attn_reg_*.pt"))
    if methods:
        found["attn_reg"] = ", ".join(path.stem.removeprefix("attn_reg_") for path in methods)
    return {name: str(value) for name, value in found.items()}


def mean_curve(curves: Iterable[Mapping[float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Epochs, means and standard deviations over runs, each (N,), at the epochs that all of them have."""
    runs = list(curves)
    epochs = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    values = np.array([[run[epoch] for epoch in epochs] for run in runs]).reshape(len(runs), len(epochs))
    spread = values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(epochs))
    return np.array(epochs, dtype=float), values.mean(0) if runs else np.zeros(0), spread


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
