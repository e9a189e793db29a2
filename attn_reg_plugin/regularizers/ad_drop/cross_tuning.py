"""Cross-tuning (AD-DROP): plain fine-tuning and AD-DROP take turns."""

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from attn_reg_plugin.regularizers.base import Regularizer

logger = logging.getLogger(__name__)
PLAIN = "cross_tuning='epoch' leaves odd epochs plain; {}; give cross_tuning='update:N' or 'off'"


@dataclass(frozen=True)
class CrossTuning:
    """A schedule: `epoch` is plain on odd and regularized on even epochs (the paper's, epochs count from 1),
    `update:N` alternates every N updates, `off` regularizes always.

    Raises:
        ValueError: the schedule isn't one of these.
    """

    schedule: str = "epoch"

    def __post_init__(self) -> None:
        """Refuse a schedule that is not understood."""
        match = re.fullmatch(r"update:([0-9]{1,18})", self.schedule)
        if self.schedule not in ("epoch", "off") and (match is None or int(match[1]) < 1):
            raise ValueError(
                f"cross_tuning is {self.schedule!r}, but must be epoch, off, or update:N with N of at least 1"
            )

    def regularized(self, epoch: int | None, updates: int) -> bool:
        """Whether a forward in `epoch` (from 1), after `updates` updates, is regularized.

        Raises:
            RuntimeError: the schedule counts epochs and none was announced.
        """
        if self.schedule == "off":
            return True
        if self.schedule == "epoch":
            if epoch is None:
                raise RuntimeError(
                    "cross_tuning='epoch' counts epochs: call regularizer.begin_epoch(epoch) after attaching"
                )
            return epoch % 2 == 0
        length = int(self.schedule.removeprefix("update:"))
        return (updates // length) % 2 == 1


class CrossTuned(Regularizer):
    """Base of a method with cross-tuning, which says so where a training was plain from beginning to end.

    How many epochs a training has may not be known before it ends, as of a stream with a number of updates. A loop that
    announces none may attach for each epoch anew.
    """

    schedule: CrossTuning
    #: whether it does anything where its schedule says so
    acts_at_all: Callable[[], bool]
    #: the updates of a training whose number of epochs is not known, 0 where that isn't either; None: no such training
    _length: int | None = None

    def when(self) -> str:
        """Say which epochs or updates are regularized."""
        if self.schedule.schedule.startswith("update:"):
            return f"every other {self.schedule.schedule.removeprefix('update:')} updates"
        return "from epoch 2, every other" if self.schedule.schedule == "epoch" else ""

    def begin_training(self, updates: int | None, epochs: int | None = None) -> None:
        """As `Regularizer.begin_training`; warns of a schedule that never comes to an epoch it regularizes."""
        super().begin_training(updates, epochs)
        if self.schedule.schedule == "epoch" and epochs == 1:
            logger.warning(PLAIN.format("this training has one epoch: nothing is regularized"))
        known = epochs is not None and 0 < epochs < sys.maxsize
        self._length = None if known else updates or 0

    def detach(self) -> None:
        """As `Regularizer.detach`; warns after a training that was announced and ended in its first epoch."""
        seen = self._attachment is not None and self._attachment.reach.seen
        plain = self.schedule.schedule == "epoch" and self.epoch == 1 and self.acts_at_all()
        over = self._length is not None and self.updates >= self._length
        if seen and plain and over and sys.exc_info()[0] is None:  # by itself, not by an exception
            logger.warning(PLAIN.format("this training ended in its first epoch: nothing was regularized"))
            self._length = None
        super().detach()
