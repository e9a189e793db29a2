"""`--criterion attn_reg_tagging`: a label for every word."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from torch import Tensor, nn

from attn_reg_plugin.criterions.labelled import LabelledConfig, LabelledCriterion
from attn_reg_plugin.labelled.encoding import IGNORED
from attn_reg_plugin.labelled.metrics import SENTENCE_END, tag_codes
from attn_reg_plugin.labelled.task_table import TAGGING
from attn_reg_plugin.regularizers.base.context import Outcome


@register_criterion("attn_reg_tagging", dataclass=LabelledConfig)
class TaggingCriterion(LabelledCriterion):
    """One label per word, at its first sub-token; logits (B, T, C); target (B, T), -100 where there is no label.

    Losses, the sample size and every metric are of words; words that were truncated away are in none of them.
    """

    kinds: ClassVar[tuple[str, ...]] = (TAGGING,)

    def __init__(self, task: Any, label_smoothing: float = 0.0, validation_metrics: str = "") -> None:
        super().__init__(task, label_smoothing, validation_metrics)
        self.codes = torch.tensor(tag_codes(self.labelled.labels))

    def losses(self, logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Losses of the words, (N,)."""
        words = target != IGNORED
        return F.cross_entropy(logits[words], target[words], reduction="none", label_smoothing=label_smoothing)

    def predictions(self, logits: Tensor, target: Tensor) -> Tensor:
        """The likeliest label of every word, and the gold one."""
        words = target != IGNORED
        return torch.stack([logits.argmax(-1)[words], target[words]], dim=-1)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """The same as codes of `tag_codes`, with a row of `SENTENCE_END` after each sentence."""
        codes = self.codes.to(target.device)
        words = target != IGNORED
        pairs = torch.stack([codes[logits.argmax(-1)], codes[target.masked_fill(~words, 0)]], dim=-1)
        ends = pairs.new_full((len(pairs), 1, 2), SENTENCE_END)
        return torch.cat([pairs, ends], dim=1)[F.pad(words, (0, 1), value=True)]

    def example_outcomes(self, model: nn.Module, sample: dict[str, Any]) -> Outcome:
        """Mean loss and share of right words of each sentence."""
        target, logits = self.target_of(sample), self.logits(model, sample)
        words = target != IGNORED
        losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none", ignore_index=IGNORED)
        count = words.sum(-1).clamp(min=1)
        return Outcome(losses.sum(-1) / count, ((logits.argmax(-1) == target) & words).sum(-1) / count)
