"""fairseq's tasks on sentences, for its own RoBERTa, regularized: sentence prediction and sentence ranking.

Ranking scores the choices of an example one after the other, each in a forward of its own, so each has its own probe
and masks. No forward knows which choice will win; what is attributed is the score itself, the logit of its choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from fairseq.tasks.sentence_ranking import SentenceRankingTask
from torch import Tensor, nn

from attn_reg_plugin.regularizers import Outcome
from attn_reg_plugin.regularizers.ad_drop.objectives import logits_of
from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg
from attn_reg_plugin.tasks.fairseq_settings import FAIRSEQ_SETTINGS
from attn_reg_plugin.tasks.predictions import reads_predictions

AttnRegSentencePredictionConfig = with_attn_reg(SentencePredictionConfig)


@register_task("attn_reg_sentence_prediction", dataclass=AttnRegSentencePredictionConfig)
class AttnRegSentencePredictionTask(AttnRegTask, SentencePredictionTask):
    """Classification and regression of sentences with an attention regularizer, chosen by `--attn-reg`."""

    def example_outcomes(self, model: nn.Module, sample: dict[str, Any]) -> Outcome:
        """Return loss and score of each example, both (B,), through the classification head."""
        head = {"features_only": True, "classification_head_name": self.cfg.classification_head_name}
        logits = logits_of(model(**sample["net_input"], **head)).float()
        if self.cfg.regression_target:
            losses = (logits.reshape(len(logits), -1) - sample["target"].float().reshape(len(logits), -1)).square()
            return Outcome(losses.sum(-1), -losses.sum(-1))
        target = sample["target"].view(-1)
        losses = nn.functional.cross_entropy(logits, target, reduction="none")
        return Outcome(losses, (logits.argmax(-1) == target).float())


def score_of_choice(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the objective of ranking, Σ of the choices' scores."""
    return logits_of(outputs).float().sum()


@register_task("attn_reg_sentence_ranking")
class AttnRegSentenceRankingTask(AttnRegTask, SentenceRankingTask):
    """Multiple choice by ranking with an attention regularizer, chosen by `--attn-reg`."""

    def __init__(self, args: argparse.Namespace, dictionary: Any) -> None:
        super().__init__(args, dictionary)
        if self.regularizer is not None and (self.regularizer.one_forward or self.regularizer.passes > 1):
            raise ValueError(
                f"--attn-reg {self.regularizer.name} needs one forward per update, and sentence ranking makes one per "
                "choice; use --task attn_reg_multiple_choice"
            )
        for method in filter(reads_predictions, self._objectives):
            method.objective = self._objectives[method] = score_of_choice

    @classmethod
    def setup_task(cls, args: argparse.Namespace, **kwargs: Any) -> AttnRegSentenceRankingTask:
        """Set up the task with the dictionary of fairseq's own task, which is of fairseq's class."""
        for name, _ in FAIRSEQ_SETTINGS:  # a task without a config dataclass sees all of the command line
            setattr(args, f"attn_{name}", getattr(args, name, None))
        return cls(args, SentenceRankingTask.setup_task(args).dictionary)


print_flags_if_asked("attn_reg_sentence_prediction", AttnRegSentencePredictionConfig)
