"""`--task attn_reg_translation`: fairseq's translation task, regularized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg

AttnRegTranslationConfig = with_attn_reg(TranslationConfig)


@register_task("attn_reg_translation", dataclass=AttnRegTranslationConfig)
class AttnRegTranslationTask(AttnRegTask, TranslationTask):
    """Translation with an attention regularizer, chosen by `--attn-reg`."""

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> AttnRegTranslationTask:
        """The task, once it is clear that there is data for it.

        Raises:
            ValueError: the data folder does not exist, or holds no binarized language pair.
        """
        folder = Path(str(cfg.data).split(":")[0])
        if not folder.is_dir():
            raise ValueError(f"the data folder {folder} does not exist; give the one that fairseq-preprocess wrote")
        if not any(folder.glob("dict.*.txt")):
            raise ValueError(f"the data folder {folder} holds no dict.LANG.txt; give the one fairseq-preprocess wrote")
        return super().setup_task(cfg, **kwargs)


print_flags_if_asked("attn_reg_translation", AttnRegTranslationConfig)
