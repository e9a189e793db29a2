"""`--task attn_reg_translation`: fairseq's translation task, regularized.

Beside the regularizers it can train on a part of the pairs.
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import BaseWrapperDataset, LanguagePairDataset, SubsampleDataset
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from attn_reg_plugin.dictionaries import check_binaries, read_dictionary
from attn_reg_plugin.labelled import Sampling
from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg
from attn_reg_plugin.tasks.example_flags import TrainingPartConfig, sampling_of


@dataclass
class MoreTranslationConfig(TrainingPartConfig, TranslationConfig):
    """fairseq's flags of translation, and ours."""


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

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> "AttnRegTranslationTask":
        """Set the task up, once it is clear that there is data for it."""
        folder = Path(str(cfg.data).split(":")[0])
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; give the one that fairseq-preprocess wrote")
        dictionaries = sorted(folder.glob("dict.*.txt"))
        if not dictionaries:
            raise ValueError(f"the data folder {folder} holds no dict.LANG.txt; give the one fairseq-preprocess wrote")
        for path in dictionaries:
            read_dictionary(path)  # what is wrong with it is said with its name
        return super().setup_task(cfg, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, *args: Any, **kwargs: Any) -> None:
        """Load fairseq's split, unless it is damaged; of the training set the part that the flags name."""
        folders = [Path(folder) for folder in str(self.cfg.data).split(":")]
        at = (epoch - 1) % len(folders) if split == self.cfg.train_subset else 0
        check_binaries(folders[at], split, folders[0])
        super().load_dataset(split, epoch, *args, **kwargs)
        if split == self.cfg.train_subset:
            keep_part(self.datasets[split], self.sampling)


def keep_part(pairs: LanguagePairDataset, sampling: Sampling) -> None:
    """Leave of sentence pairs, in place, the part that is drawn; the same in every process and after resuming."""
    if sampling == Sampling(seed=sampling.seed):  # all of them: numbers of many pairs take much memory
        return
    chosen = np.array(sampling.of(range(len(pairs))), dtype=np.int64)  # type: ignore[arg-type]
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
