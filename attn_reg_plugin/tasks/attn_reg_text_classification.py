"""`--task attn_reg_text_classification`: classes or values of texts and pairs of texts, regularized."""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
from dataclasses import dataclass, field
from typing import ClassVar

from fairseq.tasks import register_task

from attn_reg_plugin.labelled import CLASSIFICATION, REGRESSION
from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg
from attn_reg_plugin.tasks.labelled_task import LabelledTaskConfig, LabelledTextTask


@dataclass
class TextClassificationConfig(LabelledTaskConfig):
    """The flags."""

    regression: bool = field(default=False, metadata={"help": "without --labelled: the labels are values"})


AttnRegTextClassificationConfig = with_attn_reg(TextClassificationConfig)


@register_task("attn_reg_text_classification", dataclass=AttnRegTextClassificationConfig)
class AttnRegTextClassificationTask(AttnRegTask, LabelledTextTask):
    """GLUE, IMDB, HANS, PAWS-X, or texts of one's own; `--criterion attn_reg_classification`."""

    kinds: ClassVar[tuple[str, ...]] = (CLASSIFICATION, REGRESSION)


print_flags_if_asked("attn_reg_text_classification", AttnRegTextClassificationConfig)
