"""Schedules: a drop probability that changes over training, and what it counts."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from attn_reg_plugin.regularizers.base.regularizer import Regularizer

#: what a schedule may count -> where it begins
STARTS = {"update": 0, "epoch": 1, "progress": 0}
UNITS = tuple(STARTS)


@dataclass(frozen=True)
class Curve:
    """A drop probability that is linear between its points, and constant before the first and after the last.

    Attributes:
        points: (position, drop probability) pairs; positions from 0 and increasing, probabilities in [0, 1].
        deepest: drop probabilities of the last layer at the same positions, where layers differ: `points` are those of
            the first one then, and the others lie between; none: all layers have `points`.

    Raises:
        ValueError: there is no point, or one is out of range or out of order.
    """

    points: tuple[tuple[float, float], ...]
    deepest: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the points."""
        if not self.points:
            raise ValueError("a curve needs at least one position:probability, such as 0:0.6")
        last = -math.inf
        for position, _ in self.points:
            if not 0 <= position < math.inf:
                raise ValueError(f"position is {position:.15g}, but must be a number from 0")
            if position <= last:
                raise ValueError(f"position {position:.15g} follows {last:.15g}, but positions must increase")
            last = position
        for drop in (*(drop for _, drop in self.points), *self.deepest):
            if not 0 <= drop <= 1:  # NaN, too
                raise ValueError(f"drop probability is {drop:.15g}, but must lie in [0, 1]")

    def __call__(self, position: float) -> float:
        """The drop probability at `position`."""
        after = bisect_right(self.points, position, key=lambda point: point[0])
        if after in (0, len(self.points)):
            return self.points[max(after - 1, 0)][1]
        (x0, y0), (x1, y1) = self.points[after - 1 : after + 1]
        return y0 + (y1 - y0) * (position - x0) / (x1 - x0)

    def at_depth(self, share: float) -> Curve:
        """The curve of a layer; `share` is 0 of the first one and 1 of the last."""
        if not self.deepest:
            return self
        pairs = zip(self.points, self.deepest, strict=True)
        return Curve(tuple((x, first + (last - first) * share) for (x, first), last in pairs))


class Timed(Regularizer):
    """Base of methods with a schedule; their option `unit` is one of `UNITS`.

    `update` counts the optimizer updates made so far, from 0; `epoch` epochs from 1; `progress` is the share of the
    training's updates made so far, from 0 to 1, so that a schedule stretches over any training. For that the number of
    all updates has to be known: fairseq, Trainer and Lightning announce it, a loop of one's own by `begin_training`.
    """

    unit: str
    _total: int | None = None

    def begin_training(self, updates: int | None, epochs: int | None = None) -> None:
        """As `Regularizer.begin_training`.

        Raises:
            ValueError: the number of updates is not at least 1; or it is not known, and the schedule counts progress.
        """
        if updates is None and self.unit == "progress":
            raise ValueError(
                "unit='progress' needs the number of updates of the training, which is not known (fairseq: give "
                "--max-update or --max-epoch; Lightning: give max_epochs or max_steps, and leave the optimization to "
                "it; a loop of your own: begin_training(updates)); or use unit='update' or 'epoch'"
            )
        super().begin_training(updates, epochs)
        self._total = updates

    def begin_anew(self) -> None:
        """As `Regularizer.begin_anew`: the number of all updates is announced for each training."""
        super().begin_anew()
        self._total = None

    def position(self) -> float:
        """Where the training is, in the schedule's unit.

        Raises:
            RuntimeError: what the unit needs was not announced.
        """
        if self.unit == "update":
            return self.updates
        if self.unit == "epoch":
            if self.epoch is None:
                raise RuntimeError("unit='epoch' counts epochs: call regularizer.begin_epoch(epoch) after attaching")
            return self.epoch
        if self._total is None:
            raise RuntimeError(
                "unit='progress' counts the share of the training: after attaching, call "
                "regularizer.begin_training(updates), with the number of all its updates"
            )
        return min(1.0, self.updates / self._total)
