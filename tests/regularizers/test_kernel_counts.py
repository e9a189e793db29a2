"""Kernels of a training step, in units of the plain one's: on a GPU a short step is as long as their number.

Counted are the operations that are no views, of forward, backward and SGD in one operation, on BERT with 12 layers; the
sizes do not matter. No clock is involved.
"""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from attn_reg_plugin.bench.families import CLASSES, PADDING, Workload
from attn_reg_plugin.bench.measure import step_of
from attn_reg_plugin.bench.rows import Row

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, LENGTH = 4, 16
POSITIONS: dict[str, Any] = {"sites": "encoder.self", "cross_tuning": "off"}
#: method, options, and budgets without and with an attention dropout of 0.1
METHODS: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "attention_dropout": ("attention_dropout", {"p": 0.1}, 1.43, 1.0),
    "head_drop": ("head_drop", {}, 1.25, 1.25),
    "positions": ("ad_drop", POSITIONS, 2.3, 1.95),
    "tokens": ("ad_drop", {**POSITIONS, "unit": "token", "p": 0.1, "q": 0.6}, 2.05, 2.0),
    "random": ("ad_drop", {**POSITIONS, "attribution": "random"}, 1.45, 1.45),
    "attend_out": ("attend_out", {"steps": 8}, 3.0, 2.8),
}


class Kernels(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += not function.is_view and function.overloadpacket is not torch.ops.aten._unsafe_view
        return function(*args, **(kwargs or {}))


def workload(dropout: float) -> Workload:
    """A classifier with dropout of its states, and `dropout` of its attention."""
    torch.manual_seed(1)
    size = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.BertConfig(
        **size, pad_token_id=PADDING, num_labels=CLASSES, attention_probs_dropout_prob=dropout
    )
    lengths = torch.tensor([LENGTH, 15, 13, 12]).unsqueeze(-1)
    ids = torch.randint(4, 50, (BATCH, LENGTH)).masked_fill(torch.arange(LENGTH) >= lengths, PADDING)
    inputs = {"input_ids": ids, "attention_mask": ids.ne(PADDING).long()}
    model = transformers.BertForSequenceClassification(config)
    work = Workload(model, inputs, torch.randint(CLASSES, (BATCH,)), {"encoder": "input_ids"})
    work.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    return work


def kernels(row: Row, dropout: float) -> int:
    """Count those of the second step, which of AttendOut is one within a round."""
    with step_of(row, workload(dropout)) as step:
        step()
        with Kernels() as counted:
            step()
    return counted.number


@cache
def plain(dropout: float) -> int:
    return kernels(Row("plain", "plain"), dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_stays_within_its_budget(name: str, dropout: float) -> None:
    method, options, *budgets = METHODS[name]
    ours = kernels(Row(name, name, method, {"sites": "encoder.self", **options}), dropout)
    assert ours / plain(dropout) <= budgets[dropout > 0]


def test_attention_dropout_takes_no_more_than_the_models_own_of_the_same_rate() -> None:
    method, options, *_ = METHODS["attention_dropout"]
    ours = kernels(Row("ours", "ours", method, {"sites": "encoder.self", **options}), dropout=0.0)
    assert ours <= plain(dropout=0.1)
