"""What a sweep optimizes: the validation figure by which a run's checkpoint is chosen, never a test set's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_reg_plugin.experiments.runs_before import Run
from attn_reg_plugin.experiments.training_log import TrainingLog

#: of these less is better
LOSSES = ("loss", "nll_loss")


@dataclass(frozen=True)
class Objective:
    """A figure of the validation set.

    Attributes:
        metric: its name.
        maximize: whether more is better.
        of_epoch: its value in a validation, of the log's figures; None where it isn't there.
        of_result: a finished run's, of its result.json, where the log is gone; None where it isn't there.
        measured_on: the examples it is of, for notes.
    """

    metric: str
    maximize: bool
    of_epoch: Callable[[Mapping[str, float]], float | None]
    of_result: Callable[[dict[str, Any]], float | None]
    measured_on: str = "the validation set"

    def by_epoch(self, log: TrainingLog) -> dict[int, float]:
        """The best figure of each epoch's validations, as far as the log goes; not finite where none of them is."""
        values: dict[int, list[float]] = {}
        for (epoch, _), figures in sorted(log.validations.items()):
            value = self.of_epoch(figures)
            if value is not None:
                values.setdefault(epoch, []).append(value)
        best = {epoch: self.best(dict(enumerate(those))) for epoch, those in values.items()}
        return {epoch: values[epoch][-1] if value is None else value for epoch, value in best.items()}

    def best(self, values: Mapping[int, float]) -> float | None:
        """The best of several validations' or epochs'; None where none is finite."""
        return (max if self.maximize else min)(filter(math.isfinite, values.values()), default=None)

    def of_run(self, run: Run) -> float | None:
        """A finished run's value, at its best epoch."""
        value = self.best(self.by_epoch(run.log())) if run.has_log() else None
        return self.of_result(run.result()) if value is None else value

    def gain(self, value: float, plain: float) -> float:
        """By how much a value is better than plain training's."""
        return value - plain if self.maximize else plain - value


def objective_of(run: Run, metric: str | None) -> Objective:
    """The objective of a sweep.

    Args:
        run: any of its runs.
        metric: by which checkpoints are chosen, as the comparison names it; None: the run's first one. Of a
            translation's `loss`, the log's `nll_loss` (bits per piece, without label smoothing) where there is one.
    """
    own = getattr(run, "metrics", ())
    chief = metric or next(iter(own), "loss")
    pieces = chief == "loss" and not own

    def of_epoch(figures: Mapping[str, float]) -> float | None:
        return figures.get("nll_loss", figures.get("loss")) if pieces else figures.get(chief)

    def of_result(result: dict[str, Any]) -> float | None:
        trained = result["training"]
        return trained.get("scores", {"loss": trained.get("best_valid_loss")}).get(chief)

    measured_on = "held-out training examples" if getattr(run, "held_out", False) else Objective.measured_on
    return Objective(chief, chief not in LOSSES, of_epoch, of_result, measured_on)
