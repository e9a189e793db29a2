"""A task with made-up labelled data and a model that hardly is one, to run criterions under fairseq's own commands.

Importing it registers `--task labelled_toy` and `--arch labelled_toy`.
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from fairseq.tasks import FairseqTask, register_task
from torch import nn

import attn_reg_plugin.criterions  # noqa: F401  as the plugin's tasks do
from attn_reg_plugin.labelled import REGRESSION, TAGGING, Encoded, find_task
from attn_reg_plugin.labelled.dataset import LabelledDataset

WORDS = 40
SIZES = {"train": 24, "valid": 41}
TOKENIZER: Any = SimpleNamespace(pad_token_id=0, pad_token_type_id=0, padding_side="right")


def dataset(row: str, split: str) -> LabelledDataset:
    """A split whose labels depend on its words, but not on them alone."""
    task, generator = find_task(row), np.random.default_rng(len(split))
    rows = []
    for _ in range(SIZES[split]):
        ids = generator.integers(1, WORDS, generator.integers(2, 9)).astype(np.int32)
        if task.kind == REGRESSION:
            label = float(ids.mean() / 8)
        elif task.kind == TAGGING:
            label = np.where(generator.random(len(ids)) < 0.4, 0, ids % len(task.labels)).astype(np.int32)
            label[0] = -100
        else:
            label = int(ids.sum() % len(task.labels))
        rows.append(Encoded(ids, None, label))
    return LabelledDataset(rows, task.kind, TOKENIZER, shuffle=split == "train")


@dataclass
class LabelledToyConfig(FairseqDataclass):
    """The task's flags."""

    row: str = field(default="cola", metadata={"help": "row of the table of tasks"})


@register_task("labelled_toy", dataclass=LabelledToyConfig)
class LabelledToyTask(FairseqTask):
    """Made-up data of a row of the table."""

    source_dictionary = target_dictionary = None

    def __init__(self, cfg: LabelledToyConfig, **kwargs: Any) -> None:
        super().__init__(cfg)
        self.labelled = find_task(cfg.row)

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        self.datasets[split] = dataset(self.cfg.row, split)

    def max_positions(self) -> int:
        return 512


@register_model("labelled_toy", dataclass=FairseqDataclass)
class LabelledToyModel(BaseFairseqModel):
    """A table of words, averaged over the text where there is one label."""

    def __init__(self, kind: str, labels: int) -> None:
        super().__init__()
        self.tagging, self.table, self.dropout = kind == TAGGING, nn.Embedding(WORDS, labels), nn.Dropout(0.1)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> BaseFairseqModel:
        return cls(task.labelled.kind, max(1, len(task.labelled.labels)))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        words = self.dropout(self.table(input_ids)) * attention_mask.unsqueeze(-1)
        return {"logits": words if self.tagging else words.sum(1) / attention_mask.sum(1, keepdim=True)}

    def max_positions(self) -> int:
        return 512


def register(rank: int = 0) -> None:
    """For a process that has just started: importing this file is all."""
