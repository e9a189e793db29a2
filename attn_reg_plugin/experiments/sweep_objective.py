"""What a sweep optimizes: the validation figure by which a run's checkpoint is chosen, never a test set's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_reg_plugin.experiments.runs import Run
from attn_reg_plugin.experiments.training_log import TrainingLog


@dataclass(frozen=True)
class Objective:
    """A figure of the validation set.

    Attributes:
        metric: its name.
        maximize: whether more is better.
        of_result: a finished run's, of its result.json.
        of_epoch: the same after an epoch, of the log's figures; None where it isn't there.
    """

    metric: str
    maximize: bool
    of_result: Callable[[dict[str, Any]], float]
    of_epoch: Callable[[Mapping[str, float]], float | None]

    def by_epoch(self, log: TrainingLog) -> dict[int, float]:
        """The figure after each epoch, as far as the log goes."""
        found = {epoch: self.of_epoch(figures) for (epoch, _), figures in sorted(log.validations.items())}
        return {epoch: value for epoch, value in found.items() if value is not None}

    def best(self, values: Mapping[int, float]) -> float | None:
        """The best of several epochs'; None where none is finite."""
        return (max if self.maximize else min)(filter(math.isfinite, values.values()), default=None)

    def gain(self, value: float, plain: float) -> float:
        """By how much a value is better than plain training's."""
        return value - plain if self.maximize else plain - value


def _of_finetune(run: Run) -> Objective:
    metric = run.metrics[0]  # type: ignore[attr-defined]
    return Objective(
        metric, True, lambda result: result["training"]["scores"][metric], lambda figures: figures.get(metric)
    )


def _of_compare(run: Run) -> Objective:
    def of_epoch(figures: Mapping[str, float]) -> float | None:
        return figures.get("nll_loss", figures.get("loss"))

    return Objective("validation loss", False, lambda result: result["training"]["best_valid_loss"], of_epoch)


_BY_SECTION = {"finetune": _of_finetune, "compare": _of_compare}


def objective_of(section: str, run: Run) -> Objective:
    """The objective of a sweep over `finetune` or `compare`.

    Args:
        run: any of its runs.
    """
    return _BY_SECTION[section](run)
