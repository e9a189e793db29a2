"""Positions in a training that schedules count: updates, epochs, or the share of the training that is over."""

from __future__ import annotations

from attn_reg_plugin.regularizers.base import Regularizer

#: what a schedule may count -> where it begins
STARTS = {"update": 0, "epoch": 1, "progress": 0}
UNITS = tuple(STARTS)


class Timed(Regularizer):
    """Base of methods with a schedule; their option `unit` is one of `UNITS`.

    `update` counts the optimizer updates made so far, from 0; `epoch` epochs from 1; `progress` is the share of the
    training's updates made so far, from 0 to 1, so that a schedule stretches over any training. For that the number of
    all updates has to be known: fairseq, Trainer and Lightning announce it, a loop of one's own by `begin_training`.
    """

    unit: str
    _total: int | None = None

    def begin_training(self, updates: int | None, epochs: int | None = None) -> None:
        """Announce a training of so many optimizer updates in all; None: their number is not known.

        Raises:
            ValueError: the number is not at least 1; or it is not known, and the schedule counts progress.
        """
        if updates is None and self.unit == "progress":
            raise ValueError(
                "unit='progress' needs the number of updates of the training, which is not known (fairseq: give "
                "--max-update or --max-epoch; Lightning: give max_epochs or max_steps, and leave the optimization to "
                "it; a loop of your own: begin_training(updates)); or use unit='update' or 'epoch'"
            )
        if updates is not None and updates < 1:
            raise ValueError(f"a training has at least 1 update, not {updates}")
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
