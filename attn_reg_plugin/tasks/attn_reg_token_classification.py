"""`--task attn_reg_token_classification`: a label for every word, regularized."""

from typing import ClassVar

from fairseq.tasks import register_task

from attn_reg_plugin.labelled import TAGGING
from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg
from attn_reg_plugin.tasks.labelled_task import LabelledTaskConfig, LabelledTextTask

AttnRegTokenClassificationConfig = with_attn_reg(LabelledTaskConfig)


@register_task("attn_reg_token_classification", dataclass=AttnRegTokenClassificationConfig)
class AttnRegTokenClassificationTask(AttnRegTask, LabelledTextTask):
    """Named entities and parts of speech in CoNLL and CoNLL-U files; `--criterion attn_reg_tagging`."""

    kinds: ClassVar[tuple[str, ...]] = (TAGGING,)


print_flags_if_asked("attn_reg_token_classification", AttnRegTokenClassificationConfig)
