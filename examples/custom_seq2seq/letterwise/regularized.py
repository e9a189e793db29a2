"""All that makes the task a regularized one: the mixin before it, and the flags after its own."""

from fairseq.tasks import register_task

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, with_attn_reg

from .letter_task import LetterConfig, LetterTask


@register_task("regularized_letters", dataclass=with_attn_reg(LetterConfig))
class RegularizedLetterTask(AttnRegTask, LetterTask):
    """Letters, with every `--attn-reg`."""
