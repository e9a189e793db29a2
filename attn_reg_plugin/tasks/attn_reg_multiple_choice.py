"""`--task attn_reg_multiple_choice`: the right one of several endings, regularized."""

from typing import ClassVar

from fairseq.tasks import register_task

from attn_reg_plugin.labelled import MULTIPLE_CHOICE
from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg
from attn_reg_plugin.tasks.labelled_task import LabelledTaskConfig, LabelledTextTask

AttnRegMultipleChoiceConfig = with_attn_reg(LabelledTaskConfig)


@register_task("attn_reg_multiple_choice", dataclass=AttnRegMultipleChoiceConfig)
class AttnRegMultipleChoiceTask(AttnRegTask, LabelledTextTask):
    """SWAG, or choices of one's own; `--criterion attn_reg_classification`."""

    kinds: ClassVar[tuple[str, ...]] = (MULTIPLE_CHOICE,)


print_flags_if_asked("attn_reg_multiple_choice", AttnRegMultipleChoiceConfig)
