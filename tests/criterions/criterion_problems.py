"""What the tests of criterions share: stand-ins for a task and a model, and fairseq's way of reducing metrics."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.logging import metrics
from torch import Tensor, nn

from attn_reg_plugin.labelled import LabelledTask, find_task

NER = find_task("wnut17")


def task_for(row: LabelledTask | str, regularizer: Any = None, **changes: Any) -> SimpleNamespace:
    """A task as far as a criterion looks at it."""
    row = find_task(row) if isinstance(row, str) else row
    return SimpleNamespace(labelled=dataclasses.replace(row, **changes), regularizer=regularizer)


class Fixed(nn.Module):
    """Returns given logits; in training with noise, as dropout would make it."""

    def __init__(self, logits: Tensor, noise: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.table, self.noise, self.calls = logits, noise, []

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        self.calls.append(rows.clone())
        logits = self.table[rows] * self.weight
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(len(self.calls)))
        return {"logits": logits + self.noise * noise * self.training}


def sample_of(rows: Tensor, target: Tensor | None) -> dict[str, Any]:
    """A batch: the numbers of the rows of logits, and their labels."""
    return {
        "id": rows,
        "net_input": {"rows": rows},
        "target": target,
        "ntokens": 3 * len(rows),
        "nsentences": len(rows),
    }


def validate(criterion: Any, model: nn.Module, target: Tensor, sizes: list[int]) -> dict[str, float]:
    """The logged values of a validation in batches of these sizes."""
    model.eval()
    with metrics.aggregate(new_root=True) as aggregator, torch.no_grad():
        for rows in torch.arange(sum(sizes)).split(sizes):
            _, _, log = criterion(model, sample_of(rows, target[rows]))
            with metrics.aggregate():
                type(criterion).reduce_metrics([log])
        return aggregator.get_smoothed_values()
