"""The number of updates of a fairseq training, from its flags and its first epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fairseq")

from attn_reg_plugin.tasks.length import total_updates
from tests.backends.fairseq_models import transformer
from tests.tasks.tasks_in_process import attached, sample, step


@pytest.mark.parametrize(
    ("flags", "batches", "updates"),
    [
        ({}, 7, None),
        ({"max_update": "20"}, None, 20),
        ({"max_epoch": "3"}, 7, 21),
        ({"max_epoch": "3"}, None, None),
        ({"max_epoch": 3, "max_update": 20}, 7, 20),
        ({"max_epoch": 3, "max_update": 200, "update_freq": [2]}, 7, 12),
        ({"max_epoch": 3, "update_freq": [2], "skip_remainder_batch": "True"}, 7, 9),
        ({"max_epoch": 4, "update_freq": "[4, 1]"}, 7, 2 + 7 + 7 + 7),
        ({"max_epoch": 1, "update_freq": [4, 1]}, 7, 2),
        ({"max_epoch": "${optimization.max_epoch}"}, 7, None),
    ],
)
def test_what_comes_first_ends_it(flags: dict[str, Any], batches: int | None, updates: int | None) -> None:
    """A task with a config dataclass sees them as `attn_NAME`, another one as they are."""
    iterator = None if batches is None else [None] * batches
    seen = SimpleNamespace(**{f"attn_{name}": value for name, value in flags.items()})
    assert total_updates(seen, iterator) == updates
    if "$" not in str(flags):
        assert total_updates(SimpleNamespace(**flags), iterator) == updates


V = {"attn_reg": "head_drop", "head_drop_unit": "progress", "head_drop_turn": 0.5, "head_drop_end": 1.0}


def test_the_task_announces_it() -> None:
    task = attached(transformer(), **V, head_drop_p=0.4, attn_max_update=8)
    step(task, task.regularizer.model, sample())
    task.regularizer.begin_update(2)
    assert task.regularizer.drop_probability() == pytest.approx(0.2)


def test_a_training_without_an_end_is_refused() -> None:
    task = attached(transformer(), **V)
    with pytest.raises(ValueError, match=r"^--attn-reg head_drop: unit='progress' needs the number of updates"):
        step(task, task.regularizer.model, sample())
