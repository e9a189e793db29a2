"""`--criterion attn_reg_classification`: classification, multiple choice and regression.

Classes and choices have the cross-entropy, regressions the squared error.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from torch import Tensor, nn

from attn_reg_plugin.criterions.labelled import LabelledConfig, LabelledCriterion
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, MULTIPLE_CHOICE, REGRESSION
from attn_reg_plugin.regularizers.base.context import Outcome


@register_criterion("attn_reg_classification", dataclass=LabelledConfig)
class ClassificationCriterion(LabelledCriterion):
    """One label per example; logits (B, C), of a regression (B,) or (B, 1); target (B,)."""

    kinds: ClassVar[tuple[str, ...]] = (CLASSIFICATION, MULTIPLE_CHOICE, REGRESSION)

    def losses(self, logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Losses of the examples, (B,)."""
        if self.labelled.kind == REGRESSION:
            return F.mse_loss(logits.reshape(-1), target.float(), reduction="none")
        return F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)

    def predictions(self, logits: Tensor, target: Tensor) -> Tensor:
        """The likeliest class, or the value, and the gold one."""
        predicted = logits.reshape(-1) if self.labelled.kind == REGRESSION else logits.argmax(-1)
        return torch.stack([predicted.double(), target.double()], dim=-1)

    def example_outcomes(self, model: nn.Module, sample: dict[str, Any]) -> Outcome:
        """Loss, and whether the class is right (of a regression: minus the loss)."""
        target, logits = self.target_of(sample), self.logits(model, sample)
        losses = self.losses(logits, target)
        return Outcome(losses, -losses if self.labelled.kind == REGRESSION else (logits.argmax(-1) == target).float())
