"""What a training step logs can be added up over ranks, whichever layers each of them left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq.distributed.utils import all_reduce_dict

from tests.backends.fairseq_models import transformer
from tests.tasks.tasks_in_process import attached, criterion, sample, step

METHODS = {
    "ad_drop": {},
    "scheduled_dropout": {
        "attn_reg": "scheduled_dropout",
        "scheduled_dropout_schedule": "drop encoder.self: 0:0.3",
    },
}


def logged(layerdrop: float, loss: Any = None, **flags: Any) -> dict[str, Any]:
    """What a step logs of the method; with a layerdrop of 1 no layer of the encoder is called."""
    model = transformer(encoder_layerdrop=layerdrop)
    task = attached(model, attn_sites="encoder.self decoder.cross", **flags)
    log = step(task, model, {**sample(), "id": torch.arange(3)}, loss)[1]
    return {key: value for key, value in log.items() if key.startswith("attn_reg/")}


@pytest.mark.parametrize("method", METHODS)
def test_its_sums_are_of_one_kind_whichever_there_are(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq adds up numbers in one buffer and tensors in another one: both must be as long on every rank."""
    lengths: list[list[int]] = []
    monkeypatch.setattr(
        "fairseq.distributed.utils.all_reduce", lambda buffer, group: lengths[-1].append(buffer.numel())
    )
    logs = [logged(layerdrop, **METHODS[method]) for layerdrop in (0.0, 1.0)]
    for log in logs:
        lengths.append([])
        all_reduce_dict(log, torch.device("cpu"), None)
    assert list(logs[0]) == list(logs[1]) and lengths[0] == lengths[1] == [len(logs[0])]
    assert {value.dtype for log in logs for value in log.values()} == {torch.float64}
    assert logs[0] != logs[1], "the layers were left out"


def test_what_is_not_added_up_by_buffers_stays_small() -> None:
    """Of criterions whose outputs are gathered, as pickles of at most 16 KiB: a tensor's takes 300 bytes."""
    loss = criterion()
    loss.logging_outputs_can_be_summed = lambda: False
    log = logged(1.0, loss)
    assert type(log["attn_reg/forwards"]) is type(log["attn_reg/dropped/encoder.self[0]"]) is float
