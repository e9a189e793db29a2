"""Cross-tuning (AD-DROP): plain fine-tuning and AD-DROP take turns."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

logger = logging.getLogger(__name__)


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

    def warn_if_plain(self, epochs: int | None) -> None:
        """Warn where a training of so many epochs is plain from beginning to end; None: their number is not known."""
        if self.schedule == "epoch" and epochs == 1:
            logger.warning(
                "cross_tuning='epoch' leaves odd epochs plain; this training has one epoch: nothing is regularized; "
                "give cross_tuning='update:N' or 'off'"
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
                raise RuntimeError("cross_tuning='epoch' counts epochs: call regularizer.begin_epoch(epoch) first")
            return epoch % 2 == 0
        length = int(self.schedule.removeprefix("update:"))
        return (updates // length) % 2 == 1
