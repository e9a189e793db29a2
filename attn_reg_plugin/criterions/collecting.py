"""Predictions of all ranks, collected over a whole validation set through fairseq's logging.

fairseq adds up what the ranks log, batch by batch. So each puts its rows into a slot of its own of one tensor; a
process that only goes along with an empty batch adds zeros, by fairseq's own doing. (Its other way, gathering pickles,
needs a GPU and holds 16 KB a batch.) A meter joins the batches, and metrics are computed from it when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from fairseq.distributed import utils as distributed
from fairseq.logging import metrics
from torch import Tensor

from attn_reg_plugin.labelled.metrics import SCORES

#: a logging output's keys: the rows; and the metrics that they are for, as KIND/NAME
ROWS, WANTED = "predictions", "metric:"
#: the meter; fairseq does not print what starts with an underscore
_METER = "_predictions"


def packed(rows: Tensor) -> Tensor:
    """Put rows (N, 2) of a prediction and its gold value into this rank's slot; all ranks must call this together.

    Returns:
        float64 (ranks, 1 + the largest N, 2); a slot's first row holds its N, which may differ between ranks.
    """
    world, rank, longest = 1, 0, rows.size(0)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = distributed.get_data_parallel_group()
        world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if world > 1:
        size = torch.tensor([longest], device=rows.device)
        longest = int(distributed.all_reduce(size, group=group, op="max"))
    slots = torch.zeros(world, 1 + longest, 2, dtype=torch.float64, device=rows.device)
    slots[rank, 0] = rows.size(0)
    slots[rank, 1 : 1 + rows.size(0)] = rows
    return slots


def unpacked(slots: Tensor) -> Tensor:
    """Return the rows of all slots, (N, 2) on the CPU."""
    slots = slots.detach().cpu()
    return torch.cat([slot[1 : 1 + int(slot[0, 0])] for slot in slots])


def collected(rows: Tensor, kind: str, names: Sequence[str]) -> dict[str, Any]:
    """Make a criterion's logging output in validation: rows (N, 2), and the metrics to compute for a kind of task."""
    return {ROWS: packed(rows), **{f"{WANTED}{kind}/{name}": 1 for name in names}}


def log_collected(logging_outputs: Sequence[Mapping[str, Any]]) -> None:
    """Log the metrics that the logging outputs ask for; nothing in training."""
    rows = [unpacked(log[ROWS]) for log in logging_outputs if ROWS in log]
    rows = [some for some in rows if len(some)]
    if not rows:
        return
    metrics.log_concat_tensor(_METER, torch.cat(rows))
    for key in sorted({key for log in logging_outputs for key in log if key.startswith(WANTED)}):
        kind, name = key.removeprefix(WANTED).split("/")
        metrics.log_derived(name, partial(_score, kind, name))


def _score(kind: str, name: str, meters: Mapping[str, Any]) -> float:
    predicted, gold = meters[_METER].tensor.numpy().T
    return SCORES[kind][name](predicted, gold)
