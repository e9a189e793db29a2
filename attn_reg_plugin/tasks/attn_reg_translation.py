"""`--task attn_reg_translation`: fairseq's translation task, regularized.

Beside the regularizers it can train on a part of the pairs, and measure chrF (Popovic, 2015) on the validation set.
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
import importlib.util
import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import metrics, utils
from fairseq.data import BaseWrapperDataset, LanguagePairDataset, SubsampleDataset, encoders
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.dictionaries import check_binaries, read_dictionary
from attn_reg_plugin.labelled import Sampling
from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg
from attn_reg_plugin.tasks.example_flags import TrainingPartConfig, sampling_of

#: what a batch logs starts with this
_PREFIX = "_chrf_"
#: an unknown piece of a translation and of a reference: characters of no text, so they match nothing, nor each other
_UNKNOWN, _UNKNOWN_GOLD = "\ue000", "\ue001"


@dataclass
class MoreTranslationConfig(TrainingPartConfig, TranslationConfig):
    """fairseq's flags of translation, and ours."""

    eval_chrf: bool = setting(
        "chrF of the validation set, by sacrebleu, as the metric chrf; --eval-bleu-args, --eval-bleu-detok "
        "and --eval-bleu-remove-bpe say how it is translated",
        False,
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
        self.validation_chrf = ValidationChrF() if getattr(cfg, "eval_chrf", False) else None

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> "AttnRegTranslationTask":
        """Set the task up, once it is clear that there is data for it."""
        folder = Path(str(cfg.data).split(":")[0])
        if not folder.is_dir():
            raise ValueError(f"the data folder {folder} does not exist; give the one that fairseq-preprocess wrote")
        dictionaries = sorted(folder.glob("dict.*.txt"))
        if not dictionaries:
            raise ValueError(f"the data folder {folder} holds no dict.LANG.txt; give the one fairseq-preprocess wrote")
        for path in dictionaries:
            read_dictionary(path)  # what is wrong with it is said with its name
        return super().setup_task(cfg, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, *args: Any, **kwargs: Any) -> None:
        """Load fairseq's split, unless it is damaged; of the training set the part that the flags name."""
        folders = str(self.cfg.data).split(":")
        check_binaries(Path(folders[(epoch - 1) % len(folders) if split == self.cfg.train_subset else 0]), split)
        super().load_dataset(split, epoch, *args, **kwargs)
        if split == self.cfg.train_subset:
            keep_part(self.datasets[split], self.sampling)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model, and what translates the validation set with it."""
        model = super().build_model(cfg, from_checkpoint)
        if self.validation_chrf is not None:
            self.validation_chrf.prepare(self, model)
        return model

    def valid_step(self, sample: Any, model: Any, criterion: Any) -> Any:
        """Make fairseq's step, and log what chrF is computed from."""
        loss, sample_size, log = super().valid_step(sample, model, criterion)
        if self.validation_chrf is not None:
            log = {**log, **self.validation_chrf.of_batch(self, sample, model)}
        return loss, sample_size, log

    def reduce_metrics(self, logging_outputs: list, criterion: Any) -> None:
        """The task's metrics, and chrF of the whole validation set."""
        super().reduce_metrics(logging_outputs, criterion)
        if self.validation_chrf is not None:
            self.validation_chrf.log(logging_outputs)


# -- chrF of the validation set --------------------------------------------------------------------------------------


class ValidationChrF:
    """Translates batches, counts character n-grams, and logs the score as `chrf` (0 to 100)."""

    def __init__(self) -> None:
        if importlib.util.find_spec("sacrebleu") is None:
            raise ValueError("--eval-chrf needs sacrebleu, which is not installed: pip install sacrebleu")
        from sacrebleu.metrics import CHRF

        self.metric = CHRF()

    def prepare(self, task: Any, model: torch.nn.Module) -> None:
        """Make what translates, of the settings of --eval-bleu."""
        cfg = task.cfg
        detokenizer = json.loads(cfg.eval_bleu_detok_args or "{}")
        self.tokenizer = encoders.build_tokenizer(Namespace(tokenizer=cfg.eval_bleu_detok, **detokenizer))
        self.generator = task.build_generator([model], Namespace(**json.loads(cfg.eval_bleu_args or "{}")))

    def of_batch(self, task: Any, sample: dict[str, Any], model: torch.nn.Module) -> dict[str, float]:
        """Count n-grams of a batch, summed over its sentences, by the names under which they are logged."""
        found = task.inference_step(self.generator, [model], sample, prefix_tokens=None)
        targets = [utils.strip_pad(target, task.target_dictionary.pad()) for target in sample["target"]]
        hypotheses = [self._text(task, best[0]["tokens"], _UNKNOWN) for best in found]
        references = [self._text(task, target, _UNKNOWN_GOLD) for target in targets]
        counts = self.metric._extract_corpus_statistics(hypotheses, [references])  # (sentences, counts)
        return {f"{_PREFIX}{place}": float(count) for place, count in enumerate(np.sum(counts, axis=0))}

    def _text(self, task: Any, tokens: torch.Tensor, unknown: str) -> str:
        text = task.target_dictionary.string(tokens.int().cpu(), task.cfg.eval_bleu_remove_bpe, unk_string=unknown)
        return self.tokenizer.decode(text) if self.tokenizer else text

    def log(self, logging_outputs: list[dict[str, Any]]) -> None:
        """Add up what batches and ranks logged; of training steps there is nothing."""
        names = sorted({name for log in logging_outputs for name in log if name.startswith(_PREFIX)}, key=_place)
        if not names:
            return
        sums = [sum(float(log.get(name, 0)) for log in logging_outputs) for name in names]
        metrics.log_scalar("_chrf", np.array(sums))
        metrics.log_derived("chrf", lambda meters: self.score(meters["_chrf"].sum))

    def score(self, counts: np.ndarray) -> float:
        """Compute chrF of counts, (18,): per order of n-grams those of translations, of references, and shared."""
        return round(self.metric._compute_score_from_stats([round(count) for count in counts.tolist()]).score, 2)


def _place(name: str) -> int:
    return int(name.removeprefix(_PREFIX))


# -- a part of the pairs ----------------------------------------------------------------------------------------------


def keep_part(pairs: LanguagePairDataset, sampling: Sampling) -> None:
    """Leave of sentence pairs, in place, the part that is drawn; the same in every process and after resuming."""
    chosen = np.array(sampling.of(range(len(pairs))), dtype=np.int64)  # type: ignore[arg-type]
    if len(chosen) == len(pairs):
        return
    for name in ("src", "tgt", "align_dataset"):
        if getattr(pairs, name) is not None:
            setattr(pairs, name, ChosenDataset(getattr(pairs, name), chosen))
    for name in ("sizes", "src_sizes", "tgt_sizes", "bucketed_num_tokens"):
        if getattr(pairs, name, None) is not None:
            setattr(pairs, name, getattr(pairs, name)[chosen])


class ChosenDataset(SubsampleDataset):
    """The examples of a dataset with the numbers `chosen`, (N,), where fairseq's class draws them itself."""

    def __init__(self, dataset: Any, chosen: np.ndarray) -> None:
        BaseWrapperDataset.__init__(self, dataset)
        self.indices, self.actual_size = chosen, len(chosen)


print_flags_if_asked("attn_reg_translation", AttnRegTranslationConfig)
