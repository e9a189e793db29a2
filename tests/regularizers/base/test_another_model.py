"""One regularizer over several models, such as folds or seeds: with each it is as a new one."""

from __future__ import annotations

import pytest
import torch

from attn_reg_plugin.regularizers import Regularizer, build
from tests.attention.tiny_model import TinyClassifier, tokens

IDS = tokens([6, 3, 5], 6, seed=4)
PROGRESS = {"schedule": "drop encoder.self: 0:0.6 1:0", "unit": "progress"}
METHODS = {
    "scheduled_dropout": PROGRESS,
    "head_drop": {"p": 0.5, "turn": 0.5, "end": 0.9, "unit": "progress"},
    "ad_drop": {"cross_tuning": "update:3"},
    "ad_drop+r_drop": {"ad_drop": {"cross_tuning": "update:3"}},
    "scheduled_dropout+head_drop": {"scheduled_dropout": PROGRESS},
}


def outputs(regularizer: Regularizer, model: torch.nn.Module, announced: bool = True) -> list[torch.Tensor]:
    """Of four updates."""
    torch.manual_seed(1)
    if announced:
        regularizer.begin_training(4)
        regularizer.begin_epoch(1)
    made = []
    for _ in range(4):
        made.append(regularizer.loss(lambda batch: model(batch).logsumexp(-1).mean(), IDS).detach())
        regularizer.end_update()
    return made


def model() -> torch.nn.Module:
    """The same weights each time."""
    torch.manual_seed(5)
    return TinyClassifier(0.0).train()


@pytest.mark.parametrize("name", METHODS)
def test_its_schedule_begins_anew(name: str) -> None:
    """And so does the length of the training; on the same model it goes on, also where another is refused."""
    regularizer, seen = build(name, **METHODS[name]), []
    for _ in range(2):
        with regularizer.attach(kept := model()):
            seen.append(outputs(regularizer, kept))
    assert torch.stack(seen[0]).equal(torch.stack(seen[1])) and len(set(map(float, seen[0]))) > 1
    with pytest.raises(ValueError, match="no attention"):
        regularizer.attach(torch.nn.Linear(3, 3))
    with regularizer.attach(kept):
        assert all((part.updates, part.epoch) == (4, 1) for part in (regularizer, *regularizer.parts))
    if name == "scheduled_dropout":
        said = r"call regularizer\.begin_training"
        with regularizer.attach(other := model()), pytest.raises(RuntimeError, match=said):
            outputs(regularizer, other, announced=False)


@pytest.mark.parametrize("name", ["ad_drop", "ad_drop+r_drop"])
def test_a_loaded_state_is_continued(name: str) -> None:
    regularizer = build(name, **METHODS[name])
    with regularizer.attach(first := model()):
        outputs(regularizer, first)
        state = regularizer.state_dict()
    regularizer.load_state_dict({**state, "updates": 7})
    with regularizer.attach(model()):
        assert regularizer.attached_sites  # to look at a model's sites loses nothing
    with regularizer.attach(model()):
        assert (regularizer.updates, regularizer.epoch) == (7, 1)
        regularizer.resume({**state, "updates": 8})
        assert regularizer.updates == 8
    with regularizer.attach(model()):
        assert (regularizer.updates, regularizer.epoch) == (0, None), "that state was of the model before"
        assert all((part.updates, part.epoch) == (0, None) for part in regularizer.parts)
