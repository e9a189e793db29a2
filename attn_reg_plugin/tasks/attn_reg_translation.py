"""`--task attn_reg_translation`: fairseq's translation task, regularized.

Beside the regularizers it can train on a part of the pairs, and measure chrF on the validation set.
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg
from attn_reg_plugin.tasks.example_flags import TrainingPartConfig, sampling_of
from attn_reg_plugin.tasks.part_of_pairs import keep_part
from attn_reg_plugin.tasks.validation_chrf import ValidationChrF


@dataclass
class MoreTranslationConfig(TrainingPartConfig, TranslationConfig):
    """fairseq's flags of translation, and ours."""

    eval_chrf: bool = field(
        default=False,
        metadata={
            "help": "chrF of the validation set, by sacrebleu, as the metric chrf; --eval-bleu-args, --eval-bleu-detok "
            "and --eval-bleu-remove-bpe say how it is translated"
        },
    )


AttnRegTranslationConfig = with_attn_reg(MoreTranslationConfig)


@register_task("attn_reg_translation", dataclass=AttnRegTranslationConfig)
class AttnRegTranslationTask(AttnRegTask, TranslationTask):
    """Translation with an attention regularizer, chosen by `--attn-reg`."""

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.sampling = sampling_of(cfg)
        if self.sampling.examples and self.has_sharded_data("train"):
            raise ValueError(
                f"--train-examples {self.sampling.examples} would be drawn of each part of the data {cfg.data}; give "
                "--train-fraction, or data in one part"
            )
        # checkpoints of earlier versions do not know the flag
        self.validation_chrf = ValidationChrF() if getattr(cfg, "eval_chrf", False) else None

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> "AttnRegTranslationTask":
        """The task, once it is clear that there is data for it.

        Raises:
            ValueError: the data folder does not exist, or holds no binarized language pair; a part of the training
                set that cannot be, or a number of examples of data in several parts.
        """
        folder = Path(str(cfg.data).split(":")[0])
        if not folder.is_dir():
            raise ValueError(f"the data folder {folder} does not exist; give the one that fairseq-preprocess wrote")
        if not any(folder.glob("dict.*.txt")):
            raise ValueError(f"the data folder {folder} holds no dict.LANG.txt; give the one fairseq-preprocess wrote")
        return super().setup_task(cfg, **kwargs)

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> None:
        """fairseq's split; of the training set the part that the flags name."""
        super().load_dataset(split, *args, **kwargs)
        if split == self.cfg.train_subset:
            keep_part(self.datasets[split], self.sampling)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """The model, and what translates the validation set with it."""
        model = super().build_model(cfg, from_checkpoint)
        if self.validation_chrf is not None:
            self.validation_chrf.prepare(self, model)
        return model

    def valid_step(self, sample: Any, model: Any, criterion: Any) -> Any:
        """fairseq's step, and what chrF is computed from."""
        loss, sample_size, log = super().valid_step(sample, model, criterion)
        if self.validation_chrf is not None:
            log = {**log, **self.validation_chrf.of_batch(self, sample, model)}
        return loss, sample_size, log

    def reduce_metrics(self, logging_outputs: list, criterion: Any) -> None:
        """The task's metrics, and chrF of the whole validation set."""
        super().reduce_metrics(logging_outputs, criterion)
        if self.validation_chrf is not None:
            self.validation_chrf.log(logging_outputs)


print_flags_if_asked("attn_reg_translation", AttnRegTranslationConfig)
