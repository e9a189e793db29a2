"""`--task attn_reg_translation`: fairseq's translation task, regularized."""

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, with_attn_reg

AttnRegTranslationConfig = with_attn_reg(TranslationConfig)


@register_task("attn_reg_translation", dataclass=AttnRegTranslationConfig)
class AttnRegTranslationTask(AttnRegTask, TranslationTask):
    """Translation with an attention regularizer, chosen by `--attn-reg`."""
