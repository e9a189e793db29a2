"""`--criterion label_smoothed_cross_entropy_with_r_drop`: translation with R-Drop (Liang et al., NeurIPS 2021).

In evaluation it is fairseq's `label_smoothed_cross_entropy`, exactly. (fairseq's own `..._with_rdrop` doubles the
batches of validation too, and changes the sample it is given.)
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
    label_smoothed_nll_loss,
)
from fairseq.logging import metrics
from torch import Tensor, nn

from attn_reg_plugin.criterions.doubled import check_alpha, repeated, supplied, symmetric_divergence


@dataclass
class LabelSmoothedCrossEntropyWithRDropConfig(LabelSmoothedCrossEntropyCriterionConfig):
    """The stock criterion's flags, and R-Drop's."""

    r_drop_alpha: float = field(default=5.0, metadata={"help": "weight of R-Drop's divergence, at least 0"})


@register_criterion("label_smoothed_cross_entropy_with_r_drop", dataclass=LabelSmoothedCrossEntropyWithRDropConfig)
class LabelSmoothedCrossEntropyWithRDropCriterion(LabelSmoothedCrossEntropyCriterion):
    """Two passes in one forward in training; the divergence counts real target tokens only.

    The sample size is the plain criterion's. The logged `nll_loss` is the mean of both passes, to compare with plain
    training, and `r_drop` the divergence per token, in base 2.

    Args:
        r_drop_alpha: α, at least 0.
    """

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
        r_drop_alpha: float = 5.0,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        check_alpha(r_drop_alpha, task)
        self.alpha = r_drop_alpha

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """The loss, the sample size and what is logged, as the stock criterion returns them."""
        if not model.training:
            return super().forward(model, sample, reduce)
        doubled = repeated(sample)
        with supplied(self.task, doubled):
            net_output = model(**doubled["net_input"])
        # log-probabilities (2BT, V): the first pass, then the second; prefix tokens to ignore are cut off
        log_probs, target = self.get_lprobs_and_target(model, net_output, doubled)
        loss, nll_loss = label_smoothed_nll_loss(log_probs, target, self.eps, self.padding_idx, reduce)
        real = target.chunk(2)[0].ne(self.padding_idx)
        first, second = (half[real] for half in log_probs.chunk(2))
        divergence = symmetric_divergence(first, second).sum()
        sentences = doubled["target"].size(0) // 2
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        loss = loss + self.alpha * divergence
        logging_output = {
            "loss": loss.detach(),
            "nll_loss": nll_loss.detach() / 2,
            "divergence": divergence.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            right = (log_probs.chunk(2)[0].argmax(-1) == target.chunk(2)[0]) & real
            logging_output["n_correct"] = utils.item(right.sum())
            logging_output["total"] = utils.item(real.sum())
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: Sequence[dict[str, Any]]) -> None:
        """The stock criterion's metrics; in training also the divergence."""
        super().reduce_metrics(logging_outputs)
        if any("divergence" in log for log in logging_outputs):
            tokens = sum(log.get("ntokens", 0) for log in logging_outputs)
            divergence = sum(float(log.get("divergence", 0)) for log in logging_outputs)
            metrics.log_scalar("r_drop", divergence / tokens / math.log(2), tokens, round=3)
