"""R-Drop: regularized dropout for neural networks (Liang et al., NeurIPS 2021).

Two passes of the same examples under different dropout, P1 and P2, and the loss (the paper's equation 4)

    −log P1(y|x) − log P2(y|x) + α · ½ [KL(P1 ‖ P2) + KL(P2 ‖ P1)].

As in the paper the two passes are one forward of the batch repeated twice. So an attention regularizer probes and
masks both halves, and activation checkpointing recomputes them with the masks they were made with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.regularizers.r_drop import symmetric_divergence

__all__ = ["REPEATED", "check_alpha", "repeated", "supplied", "symmetric_divergence"]

#: marks a sample that is repeated already: AttendOut's defender gets the attacker's
REPEATED = "repeated"


def repeated(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample with every example twice, first all of them, then all again; the sample itself stays as it is.

    Counts (`ntokens`, `nsentences`) stay those of the sample, for they are what losses are divided by.

    Args:
        sample: what of `net_input` and `target` is a tensor of B rows is repeated, B as in `target`.
    """
    if sample.get(REPEATED):
        return sample
    batch = sample["target"].size(0)

    def twice(value: Any) -> Any:
        batched = isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == batch
        return torch.cat([value, value]) if batched else value

    net_input = {name: twice(value) for name, value in sample["net_input"].items()}
    return {**sample, "net_input": net_input, "target": twice(sample["target"]), REPEATED: True}


@contextmanager
def supplied(task: Any, sample: dict[str, Any]) -> Iterator[None]:
    """While open, the task's regularizer is told of this sample in place of the one that the task gave it."""
    regularizer = getattr(task, "regularizer", None)
    before = None if regularizer is None else regularizer.supplied
    if before is None or before.batch is None or before.batch is sample:
        yield
        return
    regularizer.supply(replace(before, batch=sample, targets=sample["target"]))
    try:
        yield
    finally:
        regularizer.supply(before)


def check_alpha(alpha: float, task: Any = None) -> None:
    """Refuse a weight that is not one, and a task whose method runs the batch several times itself.

    Raises:
        ValueError: below 0 or not finite; or such a method.
    """
    if not 0 <= alpha < float("inf"):
        raise ValueError(f"--r-drop-alpha is {alpha}, but must be a number of at least 0")
    regularizer = getattr(task, "regularizer", None)
    if regularizer is not None and regularizer.passes > 1:
        raise ValueError(
            f"--attn-reg {regularizer.name} runs each batch several times, and so does this criterion; use the "
            "criterion without R-Drop"
        )
