"""What tasks, older ones too, see of the rest of fairseq's configuration: how long a training is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attn_reg_plugin.tasks.fairseq_settings import total_epochs, total_updates
from tests.backends.fairseq_models import transformer
from tests.tasks.tasks_in_process import GivenModel, Regularized, RegularizedOlder, attached, sample, step


@pytest.mark.parametrize(
    ("flags", "batches", "updates", "epochs"),
    [
        ({}, 7, None, None),
        ({"max_update": "20"}, None, 20, None),
        ({"max_epoch": "3"}, 7, 21, 3),
        ({"max_epoch": "3"}, None, None, 3),
        ({"max_epoch": 3, "max_update": 20}, 7, 20, 3),
        ({"max_epoch": 3, "max_update": 200, "update_freq": [2]}, 7, 12, 3),
        ({"max_epoch": 3, "update_freq": [2], "skip_remainder_batch": "True"}, 7, 9, 3),
        ({"max_epoch": 2, "update_freq": [1, 4], "skip_remainder_batch": "True"}, 8, 7 + 1, 2),
        ({"max_epoch": 4, "update_freq": "[4, 1]"}, 7, 2 + 7 + 7 + 7, 4),
        ({"max_epoch": 1, "update_freq": [4, 1]}, 7, 2, 1),
        ({"max_epoch": "${optimization.max_epoch}"}, 7, None, None),
        # a training that ends in its first epoch has one
        ({"max_update": 7}, 7, 7, 1),
        ({"max_update": 8}, 7, 8, None),
        ({"max_update": 7}, None, 7, None),
        ({"max_update": 3, "max_epoch": 5}, 7, 3, 1),
        ({"max_update": 7, "max_epoch": 5, "update_freq": [2]}, 7, 7, 5),
    ],
)
def test_what_comes_first_ends_it(
    flags: dict[str, Any], batches: int | None, updates: int | None, epochs: int | None
) -> None:
    """A task with a config dataclass sees them as `attn_NAME`, another one as they are."""
    config = SimpleNamespace(**{f"attn_{name}": value for name, value in flags.items()})
    assert (total_updates(config, batches), total_epochs(config, batches)) == (updates, epochs)
    if "$" not in str(flags):
        older = SimpleNamespace(**flags)
        assert (total_updates(older, batches), total_epochs(older, batches)) == (updates, epochs)


#: a probability that falls from the middle of the training to its end
PROGRESS = {
    "attn_reg": "head_drop",
    "head_drop_unit": "progress",
    "head_drop_p": 0.4,
    "head_drop_turn": 0.5,
    "head_drop_end": 1.0,
}


@pytest.mark.parametrize(
    ("kind", "flags"),
    [(Regularized, {"attn_max_update": 8}), (RegularizedOlder, {"max_update": 8, "max_epoch": 0, "update_freq": [1]})],
)
def test_the_task_announces_it(kind: type, flags: dict[str, Any]) -> None:
    task = attached(transformer(), kind, **PROGRESS, **flags)
    step(task, task.regularizer.model, sample())
    task.regularizer.begin_update(2)
    assert task.regularizer.drop_probability() == pytest.approx(0.2)


class Listed(GivenModel):
    """A task whose training set is its iterator."""

    def get_batch_iterator(self, dataset: list, *args: Any, **kwargs: Any) -> list:
        return dataset


class RegularizedListed(Regularized, Listed):
    """Regularized."""


@pytest.mark.parametrize("data", ["a", "a:b"])
def test_the_first_epoch_tells_it(data: str) -> None:
    """With data in several parts, every epoch is taken to be as long."""
    for flags in ({"attn_max_epoch": 4}, {"attn_max_epoch": 4, "attn_max_update": 28}):
        task = attached(transformer(), RegularizedListed, **PROGRESS, data=data, **flags)
        task.datasets = {"train": [None] * 7}
        task.get_batch_iterator(task.datasets["train"])
        step(task, task.regularizer.model, sample())
        task.regularizer.begin_update(7)
        assert task.regularizer.drop_probability() == pytest.approx(0.2) and not task._iterators
        assert task.state_dict()["attn_reg_first_epoch"] == 7
