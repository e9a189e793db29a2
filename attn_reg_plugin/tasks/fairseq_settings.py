"""The rest of fairseq's configuration, as far as a task looks at it, and how long a training is by it."""

import ast
import math
from typing import Any

from omegaconf import ListConfig

#: a name, and where fairseq's configuration has it; as fields of a task's config they are no flags (text: fairseq's
#: parser takes an interpolated bool for True)
FAIRSEQ_SETTINGS = (
    ("save_dir", "checkpoint.save_dir"),
    ("restore_file", "checkpoint.restore_file"),
    ("clip_norm", "optimization.clip_norm"),
    ("cpu", "common.cpu"),
    ("tpu", "common.tpu"),
    ("fp16", "common.fp16"),
    ("memory_efficient_fp16", "common.memory_efficient_fp16"),
    ("fp16_no_flatten_grads", "common.fp16_no_flatten_grads"),
    ("max_update", "optimization.max_update"),
    ("max_epoch", "optimization.max_epoch"),
    ("update_freq", "optimization.update_freq"),
    ("skip_remainder_batch", "optimization.skip_remainder_batch"),
    ("train_subset", "dataset.train_subset"),
    ("ddp_backend", "distributed_training.ddp_backend"),
)
#: settings that are lists, which a text cannot take
LISTS = ("update_freq",)


def fairseq_setting(config: Any, name: str) -> Any:
    """Look one of `FAIRSEQ_SETTINGS` up; a task without a config dataclass has all of fairseq's configuration."""
    value = getattr(config, f"attn_{name}", None)
    return getattr(config, name, None) if value is None or str(value).startswith("${") else value


def total_updates(config: Any, batches: int | None) -> int | None:
    """Count updates to the first of --max-update and --max-epoch; None where neither is given.

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
    """`--max-epoch`, or 1 where `--max-update` comes first; None where neither says it; arguments as before."""
    most, epochs = (int(_numbers(config, name)[0]) for name in ("max_update", "max_epoch"))
    return 1 if most > 0 and batches and most <= _by_epoch(config, batches)[0] else epochs or None


def _by_epoch(config: Any, batches: int) -> list[int]:
    """Count the updates of each epoch that --update-freq names; --skip-remainder-batch leaves the last batch out."""
    skips = fairseq_setting(config, "skip_remainder_batch") in (True, "True")
    frequencies = _numbers(config, "update_freq", 1)
    if min(frequencies) < 1:
        raise ValueError(f"--update-freq is {min(frequencies):g}, but must be at least 1")
    return [math.floor((batches - 1) / freq) if skips else math.ceil(batches / freq) for freq in frequencies]


def _numbers(config: Any, name: str, default: float = 0) -> list[float]:
    """A value that is a number, or several; as numbers or as text."""
    value = fairseq_setting(config, name)
    value = ast.literal_eval(value) if isinstance(value, str) else value
    several = value if isinstance(value, list | tuple | ListConfig) else [value]
    return [default if number is None else float(number) for number in several] or [default]
