"""Repairs of fairseq: a resumed training's batches and patience, whole copies of checkpoints, numpy 2, the log."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.checkpoint_utils import save_checkpoint
from fairseq.data import FairseqDataset, LanguagePairDataset, ListDataset, data_utils
from fairseq.file_io import PathManager
from fairseq.logging import metrics
from fairseq.modules.dynamic_crf_layer import DynamicCRF
from fairseq_cli.train import should_stop_early as waiting

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask
from tests.backends.fairseq_models import transformer, words
from tests.tasks.tasks_in_process import GivenModel, Optimizer, Regularized, attached, criterion, sample

METHODS = pytest.mark.parametrize("method", ["none", "ad_drop"])


class Numbers(FairseqDataset):
    """40 equally long examples, whose order fairseq draws; a batch is the indices in it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index

    def size(self, index: int) -> int:
        return 1

    num_tokens = size

    def ordered_indices(self) -> Any:
        return data_utils.np.random.permutation(len(self))

    def collater(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples)


class Anew(GivenModel):
    """A task that makes batches anew in every epoch, as those of fairseq's with an iterator of their own do."""

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return super().get_batch_iterator(dataset, *args, **{**kwargs, "disable_iterator_cache": True})


class RegularizedAnew(AttnRegTask, Anew):
    """Regularized."""


def iterator_of(task: Any, epoch: int) -> Any:
    return task.get_batch_iterator(task.datasets["train"], max_sentences=4, seed=1, epoch=epoch)


def batches(kind: type, method: str, resumed: int | None) -> list[list[list[int]]]:
    """Batches of epochs 2 and 3; resumed before a batch of epoch 2, or undisturbed."""
    task = attached(transformer(), kind, attn_reg=method) if method else kind(None)
    task.datasets = {"train": Numbers()}
    iterator = iterator_of(task, 1 if resumed is None else 2)
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
    if kind is Regularized:
        assert batches(GivenModel, "", 0) != expected, "stock fairseq makes others"


@METHODS
@pytest.mark.parametrize(
    ("updates", "restores", "expected"), [(7, True, (3.5, 2)), (7, False, None), (8, True, None), (0, True, None)]
)
def test_patience_goes_on_waiting(
    updates: int, restores: bool, expected: Any, method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In any task; not where fairseq resets its own best value, or where the checkpoint is another one."""
    for function in (waiting, save_checkpoint):
        monkeypatch.setattr(function, "__dict__", {})  # as in a process that has validated nothing so far
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


def test_a_copy_takes_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while fairseq copies a checkpoint to another name leaves what was there."""
    source, target = tmp_path / "checkpoint_best.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new"), target.write_bytes(b"old")
    copy = shutil.copyfile

    def killed(_: str, half: str) -> None:
        Path(half).write_bytes(b"ne")
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", killed)
    with pytest.raises(KeyboardInterrupt):
        PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"old"
    monkeypatch.setattr(shutil, "copyfile", copy)
    assert PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 2


SENTENCES = [torch.tensor([4, 5, 2]), torch.tensor([6, 2]), torch.tensor([7, 8, 9, 4, 2])]
SIZES = np.array([len(sentence) for sentence in SENTENCES])


def test_batches_in_buckets() -> None:
    assert data_utils.get_buckets(SIZES, 2).tolist() == [3, 5]
    data = ListDataset(SENTENCES, SIZES)
    dataset = LanguagePairDataset(data, SIZES, words(), data, SIZES, words(), num_buckets=2)
    assert dataset.bucketed_num_tokens.tolist() == [3, 3, 5]


def test_nat_with_a_crf() -> None:
    layer = DynamicCRF(12, low_rank=2, beam_size=3)
    likelihood = layer(torch.randn(2, 4, 12), torch.randint(12, (2, 4)), torch.ones(2, 4).bool())
    assert likelihood.shape == (2,) and likelihood.isfinite().all()


def test_averages_of_nothing_are_left_out() -> None:
    with metrics.aggregate(new_root=True) as meters:
        metrics.log_scalar("sometimes", 3.0, 2)
        metrics.log_scalar_sum("sum", 1.0)
        assert meters.get_smoothed_values() == {"sometimes": 3.0, "sum": 1.0}
        meters.reset()
        assert meters.get_smoothed_values() == {"sum": 0.0}
