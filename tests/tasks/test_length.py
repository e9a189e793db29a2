"""The number of updates of a fairseq training, from its flags and its first epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fairseq")

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask
from attn_reg_plugin.tasks.length import total_epochs, total_updates
from tests.backends.fairseq_models import transformer
from tests.tasks.tasks_in_process import GivenModel, Optimizer, attached, criterion, options, sample, step


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
        ({"max_epoch": 2, "update_freq": [1, 4], "skip_remainder_batch": "True"}, 8, 7 + 1),
        ({"max_epoch": 4, "update_freq": "[4, 1]"}, 7, 2 + 7 + 7 + 7),
        ({"max_epoch": 1, "update_freq": [4, 1]}, 7, 2),
        ({"max_epoch": "${optimization.max_epoch}"}, 7, None),
    ],
)
def test_what_comes_first_ends_it(flags: dict[str, Any], batches: int | None, updates: int | None) -> None:
    """A task with a config dataclass sees them as `attn_NAME`, another one as they are."""
    seen = SimpleNamespace(**{f"attn_{name}": value for name, value in flags.items()})
    assert total_updates(seen, batches) == updates
    epochs = flags.get("max_epoch")
    assert total_epochs(seen, batches) == (None if "$" in str(epochs or "$") else int(epochs))
    if "$" not in str(flags):
        assert total_updates(SimpleNamespace(**flags), batches) == updates


@pytest.mark.parametrize(
    ("flags", "batches", "epochs"),
    [
        ({"max_update": 7}, 7, 1),
        ({"max_update": 8}, 7, None),
        ({"max_update": 7}, None, None),
        ({"max_update": 3, "max_epoch": 5}, 7, 1),
        ({"max_update": 7, "max_epoch": 5, "update_freq": [2]}, 7, 5),
    ],
)
def test_a_training_that_ends_in_its_first_epoch_has_one(
    flags: dict[str, Any], batches: int | None, epochs: int | None
) -> None:
    assert total_epochs(SimpleNamespace(**flags), batches) == epochs


V = {"attn_reg": "head_drop", "head_drop_unit": "progress", "head_drop_turn": 0.5, "head_drop_end": 1.0}


def test_the_task_announces_it() -> None:
    task = attached(transformer(), **V, head_drop_p=0.4, attn_max_update=8)
    step(task, task.regularizer.model, sample())
    task.regularizer.begin_update(2)
    assert task.regularizer.drop_probability() == pytest.approx(0.2)


class Parts(GivenModel):
    """A task whose training set is its iterator, and another one in every epoch."""

    def get_batch_iterator(self, dataset: list, *args: Any, **kwargs: Any) -> list:
        """The dataset."""
        return dataset


class RegularizedParts(AttnRegTask, Parts):
    """Regularized."""


def trained(batches: int, update: int, **flags: Any) -> RegularizedParts:
    """A task that began, or went on, in an epoch of so many batches."""
    task = attached(transformer(), RegularizedParts, **flags)
    task.datasets = {"train": [None] * batches}
    task.get_batch_iterator(task.datasets["train"])
    task.train_step(sample(), task.regularizer.model.train(), criterion(), Optimizer(), update)
    return task


@pytest.mark.parametrize(
    ("data", "kept", "epochs", "expected"),
    [("a:b", True, 4, 7 * 4), ("a:b", True, 5, 7 * 5), ("a:b", False, 4, 9 * 4), ("a", True, 4, 7 * 4)],
    ids=["in parts", "longer", "of an earlier version", "other batches in one part"],
)
@pytest.mark.parametrize("method", ["head_drop", "r_drop+head_drop"])
def test_resumed_in_another_part_of_the_data(
    data: str, kept: bool, epochs: int, expected: int, method: str, tmp_path: Path
) -> None:
    """The first part has 7 batches, the second one 9; of the state twice, for it may be resumed again."""
    file = tmp_path / "checkpoint.pt"
    flags = {**V, "attn_reg": method, "data": data, "attn_restore_file": str(file), "attn_save_dir": str(tmp_path)}
    state = trained(7, 0, **flags, attn_max_epoch=4).state_dict()
    assert state.get("attn_reg_first_epoch") == 7
    for update in (7, 8):
        state = state if kept else {}
        torch.save({"task_state": state, "optimizer_history": [{"num_updates": update}]}, file)
        task = trained(9, update, **flags, attn_max_epoch=epochs)
        task.regularizer.begin_update(expected // 4)
        (dropping,) = (part for part in task.regularizer.parts if part.name == "head_drop")
        assert dropping.drop_probability() == pytest.approx(0.2 * (1 - (expected // 4) / (expected / 2)))
        state = task.state_dict()
        task.load_state_dict(state)


def test_without_a_method_no_iterator_is_kept() -> None:
    task = RegularizedParts(options(attn_reg="none"))
    for _ in range(2):
        task.get_batch_iterator([None])
    assert not task._iterators and "attn_reg_first_epoch" not in task.state_dict()


def test_a_training_without_an_end_is_refused() -> None:
    task = attached(transformer(), **V)
    with pytest.raises(ValueError, match=r"^--attn-reg head_drop: unit='progress' needs the number of updates"):
        step(task, task.regularizer.model, sample())
