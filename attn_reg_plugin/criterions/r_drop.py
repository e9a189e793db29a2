"""`--criterion label_smoothed_cross_entropy_with_r_drop`: a name for `label_smoothed_cross_entropy` and `r_drop`."""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
from dataclasses import dataclass, field
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)

from attn_reg_plugin.regularizers.r_drop import RDrop


@dataclass
class WithRDropConfig(LabelSmoothedCrossEntropyCriterionConfig):
    """The stock criterion's flags, and R-Drop's weight."""

    r_drop_alpha: float = field(default=5.0, metadata={"help": "weight of R-Drop's divergence, at least 0"})


@register_criterion("label_smoothed_cross_entropy_with_r_drop", dataclass=WithRDropConfig)
class WithRDrop(LabelSmoothedCrossEntropyCriterion):
    """The same as `--criterion label_smoothed_cross_entropy --attn-reg r_drop --r-drop-weight 5`.

    Raises:
        ValueError: `--r-drop-alpha` is below 0; or the task is not one of the plugin's.
    """

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Build the stock criterion, and let the method act in the task."""
        if not hasattr(task, "add_method"):
            raise ValueError("this criterion needs a task of the plugin, such as attn_reg_translation")
        try:
            task.add_method(RDrop(weight=cfg.r_drop_alpha))
        except ValueError as error:
            raise ValueError(f"--criterion label_smoothed_cross_entropy_with_r_drop: {error}") from None
        return cls(task, cfg.sentence_avg, cfg.label_smoothing, cfg.ignore_prefix_size, cfg.report_accuracy)
