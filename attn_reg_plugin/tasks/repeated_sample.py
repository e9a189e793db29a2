"""A criterion whose loss a method adds to: it gets the repeated sample, and logs what one pass of it comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from attn_reg_plugin.regularizers import Regularizer

#: counts of a sample that are not tensors
COUNTS = ("ntokens", "nsentences")


class AddingCriterion:
    """Stands in for fairseq's criterion in a training step of a method with several passes.

    The sample size and all that is logged are of one pass, the mean over all of them; but for `loss`, which is the
    whole loss, a sum.
    """

    def __init__(self, criterion: Any, regularizer: Regularizer) -> None:
        self.criterion, self.regularizer = criterion, regularizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.criterion, name)

    def __call__(
        self, model: nn.Module, sample: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return loss, sample size and what is logged; alignments, of positions in the whole batch, are refused."""
        regularizer, passes = self.regularizer, self.regularizer.passes
        if sample.get("alignments") is not None:
            raise ValueError(
                f"--attn-reg {regularizer.name} repeats the batch, and alignments cannot be repeated with it; train "
                "without --load-alignments, or use another --attn-reg"
            )
        size: Any = None
        log: dict[str, Any] = {}

        def compute(batch: dict[str, Any]) -> Tensor:
            nonlocal size, log
            counts = {name: batch[name] * passes for name in COUNTS if isinstance(batch.get(name), int)}
            batch = {**batch, **counts}
            told = regularizer.supplied
            regularizer.supply(replace(told, batch=batch, targets=batch.get("target")))
            try:
                loss, size, log = self.criterion(model, batch, *args, **kwargs)
            finally:
                regularizer.supply(told)
            return loss / passes

        loss = regularizer.loss(compute, sample, share=lambda total, count: total)
        log = {name: _of_one_pass(value, passes) for name, value in log.items()}
        whole = {"loss": loss.detach()} if "loss" in log else {}
        return loss, _of_one_pass(size, passes), {**log, **whole}


def _of_one_pass(value: Any, passes: int) -> Any:
    """Divide a sum over all passes by their number; whole numbers stay whole where they can."""
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        return value
    return value // passes if isinstance(value, int) and value % passes == 0 else value / passes
