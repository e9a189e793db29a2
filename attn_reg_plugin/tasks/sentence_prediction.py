"""`--task attn_reg_sentence_prediction`: fairseq's task on sentences, for its own RoBERTa, regularized."""

from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from torch import nn

from attn_reg_plugin.callbacks import example_outcomes
from attn_reg_plugin.regularizers import Outcome
from attn_reg_plugin.regularizers.base.outputs import logits_of
from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg

AttnRegSentencePredictionConfig = with_attn_reg(SentencePredictionConfig)


@register_task("attn_reg_sentence_prediction", dataclass=AttnRegSentencePredictionConfig)
class AttnRegSentencePredictionTask(AttnRegTask, SentencePredictionTask):
    """Classification and regression of sentences with an attention regularizer, chosen by `--attn-reg`."""

    def example_outcomes(self, model: nn.Module, sample: dict[str, Any]) -> Outcome:
        """Return loss and score of each example, both (B,), through the classification head."""
        head = {"features_only": True, "classification_head_name": self.cfg.classification_head_name}
        target = sample["target"].float() if self.cfg.regression_target else sample["target"].view(-1)
        return example_outcomes(logits_of(model(**sample["net_input"], **head)), target)


print_flags_if_asked("attn_reg_sentence_prediction", AttnRegSentencePredictionConfig)
