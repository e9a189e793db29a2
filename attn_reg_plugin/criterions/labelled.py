"""Base of the criterions of labelled data, which differ in `losses` and `predictions`.

Their task describes its data by one attribute, `labelled`: a `LabelledTask` with its label set. The model
returns logits, in any form that `logits_of` knows. In training sums are logged; in validation the predictions, too,
from which the official metrics are computed over the whole set and all ranks:

    --best-checkpoint-metric mcc --maximize-best-checkpoint-metric
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.criterions.collecting import collected, log_collected
from attn_reg_plugin.labelled.metrics import check_scores
from attn_reg_plugin.labelled.task_table import REGRESSION, LabelledTask
from attn_reg_plugin.regularizers.ad_drop.objectives import logits_of
from attn_reg_plugin.regularizers.base.context import Outcome


@dataclass
class LabelledConfig(FairseqDataclass):
    """The flags of every criterion of labelled data."""

    label_smoothing: float = setting("share of the target spread over all labels, in [0, 1)", 0.0)
    validation_metrics: str = setting(
        "metrics computed in validation, separated by commas; default: the task's official", ""
    )


class LabelledCriterion(FairseqCriterion):
    """Base of the criterions of labelled data; refuses a task without `labelled`, or of another kind than `kinds`."""

    kinds: ClassVar[tuple[str, ...]] = ()

    def __init__(self, task: Any, label_smoothing: float = 0.0, validation_metrics: str = "") -> None:
        super().__init__(task)
        labelled = getattr(task, "labelled", None)
        if not isinstance(labelled, LabelledTask) or labelled.kind not in self.kinds:
            what = f"one of {labelled.kind}" if isinstance(labelled, LabelledTask) else type(task).__name__
            raise ValueError(f"{type(self).__name__} is for tasks of {', '.join(self.kinds)}, but the task is {what}")
        if not 0 <= label_smoothing < 1 or (label_smoothing and labelled.kind == REGRESSION):
            allowed = "0, for a regression has no labels" if labelled.kind == REGRESSION else "in [0, 1)"
            raise ValueError(f"--label-smoothing is {label_smoothing}, but must be {allowed}")
        self.labelled, self.label_smoothing = labelled, label_smoothing
        self.names = tuple(name.strip() for name in validation_metrics.split(",") if name.strip()) or labelled.metrics
        check_scores(self.names, labelled.kind, labelled.labels or ())

    # -- what a criterion implements --------------------------------------------------------------------------------

    def losses(self, logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the loss of every item (an example or a word) in fp32, those without a label left out."""
        raise NotImplementedError

    def predictions(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return every item's prediction and gold value, (N, 2)."""
        raise NotImplementedError

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the rows that metrics are computed from, (N, 2); see `labelled/metrics.py`."""
        return self.predictions(logits, target)

    def example_outcomes(self, model: nn.Module, sample: dict[str, Any]) -> Outcome:
        """Return each example's loss (the mean over its words, not smoothed) and score for AttendOut, both (B,)."""
        raise NotImplementedError

    # -- fairseq's side ---------------------------------------------------------------------------------------------

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the loss, always a sum over items; the number of items to divide it by; and what is logged."""
        target, logits = self.target_of(sample), self.logits(model, sample)
        losses = self.losses(logits, target, self.label_smoothing)
        log = self._log(losses.sum(), losses.numel(), sample, logits.detach(), target)
        if not model.training:
            log |= collected(self.rows(logits.detach(), target), self.labelled.kind, self.names)
        return losses.sum(), losses.numel(), log

    def logits(self, model: nn.Module, sample: dict[str, Any]) -> Tensor:
        """Return the model's logits in fp32."""
        return logits_of(model(**sample["net_input"])).float()

    def target_of(self, sample: dict[str, Any]) -> Tensor:
        """Return the labels of a batch, or refuse a batch without labels."""
        target = sample.get("target")
        if target is None:
            raise ValueError(f"a split of task {self.labelled.name} without labels has no loss; use attn-reg export")
        return target

    def _log(self, loss: Tensor, items: int, sample: dict[str, Any], logits: Tensor, target: Tensor) -> dict[str, Any]:
        """Return sums, which fairseq adds up over batches and ranks; the same keys in each."""
        log = {
            "loss": loss.detach(),
            "nll_loss": self.losses(logits, target).sum() if self.label_smoothing else loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": items,
        }
        if self.labelled.kind != REGRESSION:
            predicted, gold = self.predictions(logits, target).unbind(-1)
            log["n_correct"] = (predicted == gold).sum()
        return log

    @classmethod
    def reduce_metrics(cls, logging_outputs: Sequence[dict[str, Any]]) -> None:
        """Log the loss (in base 2, as fairseq does; of a regression the squared error), accuracy and the metrics."""
        keys = ("loss", "nll_loss", "n_correct", "sample_size")
        sums = {key: sum(float(log[key]) for log in logging_outputs if key in log) for key in keys}
        items = sums["sample_size"]
        if not items:
            return
        classes = any("n_correct" in log for log in logging_outputs)
        base = math.log(2) if classes else 1.0
        metrics.log_scalar("loss", sums["loss"] / items / base, items, round=4)
        if sums["nll_loss"] != sums["loss"]:
            metrics.log_scalar("nll_loss", sums["nll_loss"] / items / base, items, round=4)
        if classes:
            metrics.log_scalar("accuracy", 100 * sums["n_correct"] / items, items)
        log_collected(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Yes: predictions come in slots, see `collecting.py`."""
        return True
