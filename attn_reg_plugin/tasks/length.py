"""How many updates a fairseq training will make in all, as far as its flags and its first epoch say."""

from __future__ import annotations

import ast
import math
from typing import Any

from omegaconf import ListConfig

from attn_reg_plugin.tasks.flags import seen


def total_updates(config: Any, batches: int | None) -> int | None:
    """The fewer of --max-update and of the updates in --max-epoch epochs; None where neither is given.

    What ends a training early (patience, time, a small learning rate) is not foreseen, and with data in several parts
    every epoch is taken to be as long as the first.

    Args:
        config: the task's.
        batches: in the first epoch; None where that is not known: only --max-update counts.
    """
    most, epochs = (_numbers(config, name)[0] for name in ("max_update", "max_epoch"))
    limits = [int(most)] if most > 0 else []
    if epochs > 0 and batches:
        by_epoch = _by_epoch(config, batches)[: int(epochs)]
        limits.append(sum(by_epoch) + by_epoch[-1] * (int(epochs) - len(by_epoch)))
    return max(1, min(limits)) if limits else None


def total_epochs(config: Any, batches: int | None) -> int | None:
    """`--max-epoch`, or 1 where `--max-update` comes first; None where neither says it.

    Args:
        config, batches: as in `total_updates`.
    """
    most, epochs = (int(_numbers(config, name)[0]) for name in ("max_update", "max_epoch"))
    return 1 if most > 0 and batches and most <= _by_epoch(config, batches)[0] else epochs or None


def _by_epoch(config: Any, batches: int) -> list[int]:
    """The updates of the epochs that --update-freq names, each with so many batches.

    With --skip-remainder-batch fairseq leaves out the last batch, and then the last update if that lacks batches.
    """
    skips = seen(config, "skip_remainder_batch") in (True, "True")
    frequencies = _numbers(config, "update_freq", 1)
    return [math.floor((batches - 1) / freq) if skips else math.ceil(batches / freq) for freq in frequencies]


def _numbers(config: Any, name: str, default: float = 0) -> list[float]:
    """A value that is a number, or several; as numbers or as text."""
    value = seen(config, name)
    if isinstance(value, str):
        value = ast.literal_eval(value)
    several = list(value) if isinstance(value, list | tuple | ListConfig) else [value]
    return [default if one is None else float(one) for one in several] or [default]
