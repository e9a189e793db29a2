"""What fairseq forgets of a training that is resumed, with and without a method: its batches, and `--patience`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.checkpoint_utils import save_checkpoint
from fairseq.data import FairseqDataset, data_utils
from fairseq_cli.train import should_stop_early

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask
from tests.backends.fairseq_models import transformer
from tests.tasks.tasks_in_process import GivenModel, Optimizer, Regularized, attached, criterion, sample

METHODS = pytest.mark.parametrize("method", ["none", "ad_drop"])


class Numbers(FairseqDataset):
    """40 equally long examples, whose order fairseq draws; a batch is the indices in it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index

    def size(self, index: int) -> int:
        """One token."""
        return 1

    num_tokens = size

    def ordered_indices(self) -> Any:
        """At random."""
        return data_utils.np.random.permutation(len(self))

    def collater(self, samples: list[int]) -> torch.Tensor:
        """The indices."""
        return torch.tensor(samples)


class Anew(GivenModel):
    """A task that makes batches anew in every epoch, as those of fairseq's with an iterator of their own do."""

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Not the kept ones."""
        return super().get_batch_iterator(dataset, *args, **{**kwargs, "disable_iterator_cache": True})


class RegularizedAnew(AttnRegTask, Anew):
    """Regularized."""


def started(kind: type, method: str, epoch: int) -> tuple[Any, Any]:
    """A task, its training set, and its iterator as the trainer first asks for it."""
    task = attached(transformer(), kind, attn_reg=method) if method else kind(None)
    task.datasets = {"train": Numbers()}
    return task, iterator_of(task, epoch)


def iterator_of(task: Any, epoch: int) -> Any:
    """As `Trainer.get_train_iterator` makes it."""
    return task.get_batch_iterator(task.datasets["train"], max_sentences=4, seed=1, epoch=epoch)


def batches(kind: type, method: str, resumed: int | None) -> list[list[list[int]]]:
    """Of epochs 2 and 3; resumed before a batch of epoch 2, or undisturbed."""
    task, iterator = started(kind, method, 1 if resumed is None else 2)
    if resumed is None:
        list(iterator.next_epoch_itr())
        if method:
            update(task, 0)
        iterator = iterator_of(task, 2)
    else:
        iterator.load_state_dict({"version": 2, "epoch": 2, "iterations_in_epoch": resumed, "shuffle": True})
    second = [batch.tolist() for batch in iterator.next_epoch_itr()]
    if method:
        update(task, 9)
    return [second, [batch.tolist() for batch in iterator_of(task, 3).next_epoch_itr()]]


def update(task: AttnRegTask, number: int) -> None:
    """The task's training step."""
    model = task._config.model
    task.train_step(sample(), model.train(), criterion(), Optimizer(), number)


@METHODS
@pytest.mark.parametrize("kind", [Regularized, RegularizedAnew])
def test_a_resumed_training_has_the_batches_of_an_undisturbed_one(kind: type, method: str) -> None:
    """The stock task's, whether it keeps them for all epochs or makes them anew."""
    expected = batches(GivenModel if kind is Regularized else Anew, "", None)
    assert batches(kind, method, None) == expected
    for done in (0, 3):
        assert batches(kind, method, done) == [expected[0][done:], expected[1]]


def test_stock_fairseq_makes_others() -> None:
    assert batches(GivenModel, "", 0) != batches(GivenModel, "", None)
    assert batches(Anew, "", 0) == batches(Anew, "", None)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """fairseq's function of `--patience`, in a process that has validated nothing so far."""
    for function in (should_stop_early, save_checkpoint):
        monkeypatch.setattr(function, "__dict__", {})
    return should_stop_early


@METHODS
@pytest.mark.parametrize(
    ("updates", "restores", "expected"), [(7, True, (3.5, 2)), (7, False, None), (8, True, None), (0, True, None)]
)
def test_patience_goes_on_waiting(
    updates: int, restores: bool, expected: Any, method: str, waiting: Any, tmp_path: Path
) -> None:
    """In any task; not where fairseq resets its own best value, or where the checkpoint is another one."""
    flags = {"attn_reg": method, "attn_save_dir": str(tmp_path)}
    first = attached(transformer(), **flags)
    assert "patience" not in first.state_dict()
    waiting.best, waiting.num_runs = 3.5, 2
    state = first.state_dict()
    assert state["patience"] == {"best": 3.5, "num_runs": 2}
    kept = {"task_state": state, "optimizer_history": [{"num_updates": 7}]}
    torch.save(kept, tmp_path / "checkpoint_last.pt")
    del waiting.best, waiting.num_runs
    if restores:
        save_checkpoint.best = 3.5  # from the checkpoint, unless the optimizer or the meters are reset
    second = attached(transformer(), **flags)
    second.load_state_dict(state)
    update(second, updates)
    assert (getattr(waiting, "best", None), getattr(waiting, "num_runs", None)) == (expected or (None, None))
    if expected:
        waiting.best, waiting.num_runs = 3.0, 0  # a better one: the checkpoint is read once
        update(second, updates)
        assert waiting.num_runs == 0
