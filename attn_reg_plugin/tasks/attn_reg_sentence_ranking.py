"""`--task attn_reg_sentence_ranking`: fairseq's multiple choice by ranking (RoBERTa), regularized.

fairseq scores the choices one after the other, each in a forward of its own, so each has its own probe and masks. No
forward knows which choice will win; what is attributed is the score itself, the logit of its choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.sentence_ranking import SentenceRankingTask
from torch import Tensor

from attn_reg_plugin.regularizers.ad_drop.objectives import logits_of
from attn_reg_plugin.tasks.attn_reg_task import SEEN, AttnRegTask
from attn_reg_plugin.tasks.outputs import reads_predictions
from attn_reg_plugin.tasks.refusals import reads_fisher
from attn_reg_plugin.tasks.sentence_data import check_folders


def score_of_choice(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The objective: Σ of the choices' scores."""
    return logits_of(outputs).float().sum()


@register_task("attn_reg_sentence_ranking")
class AttnRegSentenceRankingTask(AttnRegTask, SentenceRankingTask):
    """Sentence ranking with an attention regularizer, chosen by `--attn-reg`."""

    def __init__(self, args: argparse.Namespace, dictionary: Any) -> None:
        super().__init__(args, dictionary)
        if self.regularizer is not None and (self.regularizer.one_forward or self.regularizer.passes > 1):
            raise ValueError(
                f"--attn-reg {self.regularizer.name} needs one forward per update, and sentence ranking makes one per "
                "choice; use --task attn_reg_multiple_choice"
            )
        if self.regularizer is not None and reads_fisher(self.regularizer):
            raise ValueError(
                "--child-tuning-mode driven needs a loss of one forward, and sentence ranking makes one per choice; "
                "use --task attn_reg_multiple_choice, or --child-tuning-mode free"
            )
        for part in filter(reads_predictions, self._objectives):
            part.objective = self._objectives[part] = score_of_choice

    @classmethod
    def setup_task(cls, args: argparse.Namespace, **kwargs: Any) -> AttnRegSentenceRankingTask:
        """The task, once it is clear that there is data for it; fairseq's own would make its own class.

        Raises:
            ValueError: another criterion than sentence_ranking, or a folder or its dictionary is missing.
        """
        if args.criterion != "sentence_ranking":
            raise ValueError(f"--criterion is {args.criterion}, but must be sentence_ranking for this task")
        check_folders(args.data, ["input0"])
        for name, _ in SEEN:  # a task without a config dataclass sees all of the command line
            setattr(args, f"attn_{name}", getattr(args, name, None))
        return cls(args, cls.load_dictionary(args, f"{args.data}/input0/dict.txt", source=True))
