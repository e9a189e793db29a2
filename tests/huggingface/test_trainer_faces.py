"""One method, three faces: fairseq, Trainer and a loop of one's own draw the same masks and have the same loss."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from tests.backends.huggingface_models import build
from tests.huggingface.trainers import ad_drop, collate, examples, trainer_of, translating

SEED = 11


class Seen(TrainerCallback):
    """Seeds each step, and keeps the masks that were on the sites in it."""

    def __init__(self, regularizer: Any) -> None:
        self.regularizer, self.masks = regularizer, []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.manual_seed(SEED)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.masks = [site.keep.clone() for site in self.regularizer.attached_sites]


def under_trainer(folder: Path, name: str, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    regularizer = ad_drop(**options)
    seen = Seen(regularizer)
    own = {"train_dataset": examples(name, 4)}
    arguments = {"max_steps": 1, "logging_steps": 1, "train_sampling_strategy": "sequential"}
    trainer = trainer_of(folder, name, regularizer, callbacks=(seen,), own=own, **arguments)
    trainer.train()
    return seen.masks, trainer.state.log_history[0]["loss"]


def in_a_loop(name: str, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    model, regularizer = build(name, dropout=0.1), ad_drop(**options)
    batch = (translating(model) if name == "marian" else collate)(examples(name, 4))
    with regularizer.attach(model):
        torch.manual_seed(SEED)
        loss = model(**batch).loss
        return [site.keep.clone() for site in regularizer.attached_sites], loss.item()


class Backward:
    """As much of an optimizer as a training step needs."""

    masks: list[Tensor]

    def __init__(self, regularizer: Any) -> None:
        self.regularizer = regularizer

    def backward(self, loss: Tensor) -> None:
        self.masks = [site.keep.clone() for site in self.regularizer.attached_sites if site.keep is not None]
        loss.backward()


def fairseq_step(options: dict[str, Any]) -> tuple[Any, Backward, Tensor, int]:
    """A classifier behind fairseq: the task's training step with the criterion of labelled data."""
    from fairseq.tasks import FairseqTask

    from attn_reg_plugin.criterions.classification import ClassificationCriterion
    from attn_reg_plugin.labelled import plain_task
    from attn_reg_plugin.models.hf_encoder import HFEncoderModel
    from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask

    class Stock(FairseqTask):
        labelled = plain_task("classification", text=("text",), label="label", labels=("a", "b", "c"))

        def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
            return HFEncoderModel(build("bert", dropout=0.1))

    class Regularized(AttnRegTask, Stock):
        pass

    flags = {f"ad_drop_{name}": value for name, value in {"p": 0.5, "q": 0.5, "cross_tuning": "off", **options}.items()}
    task = Regularized(argparse.Namespace(attn_reg="ad_drop", attn_sites="*", **flags))
    model = task.build_model(None)
    task.regularizer.begin_epoch(1)
    batch = collate(examples("bert", 4))
    sample = {"net_input": batch, "target": batch.pop("labels"), "ntokens": 4, "nsentences": 4}
    torch.manual_seed(SEED)
    optimizer = Backward(task.regularizer)
    loss, size, _ = task.train_step(sample, model, ClassificationCriterion(task), optimizer, 0)
    return task, optimizer, loss, size


def under_fairseq(options: dict[str, Any]) -> tuple[list[Tensor], float]:
    _, optimizer, loss, size = fairseq_step(options)
    return optimizer.masks, loss.item() / size


@pytest.mark.parametrize("name", ["bert", "marian"])
@pytest.mark.parametrize("labels", ["pseudo", "gold"])
def test_trainer_and_a_loop_agree(tmp_path: Path, name: str, labels: str) -> None:
    masks, loss = under_trainer(tmp_path, name, {"labels": labels})
    again, loop_loss = in_a_loop(name, {"labels": labels})
    assert all(torch.equal(x, y) for x, y in zip(masks, again, strict=True))
    assert all(not mask.all() for mask in masks)
    assert loss == pytest.approx(loop_loss, abs=1e-5)


@pytest.mark.parametrize("labels", ["pseudo", "gold"])
def test_fairseq_agrees(tmp_path: Path, labels: str) -> None:
    pytest.importorskip("fairseq")
    masks, loss = under_trainer(tmp_path, "bert", {"labels": labels})
    theirs, fairseq_loss = under_fairseq({"labels": labels})
    assert len(masks) == 2 and all(torch.equal(x, y) for x, y in zip(masks, theirs, strict=True))
    assert loss == pytest.approx(fairseq_loss, abs=1e-5)


# -- the kept probe: what the first, plain epoch leaves behind --------------------------------------------------------

KEPT = {"probe": "kept", "cross_tuning": "epoch"}


def regions(regularizer: Any) -> dict[bytes, tuple[Any, list[int]]]:
    """What is kept of each example."""
    return {digest: (kept.parts, kept.read().tolist()) for digest, kept in regularizer.kept.store._kept.items()}


class Kept(Seen):
    """What is kept after each step."""

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """No masks are kept on the sites."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.masks.append(regions(self.regularizer))


def kept_under_trainer(folder: Path, name: str, **options: Any) -> tuple[dict[bytes, Any], list[dict[str, float]]]:
    """Two epochs of one batch."""
    regularizer = ad_drop(**KEPT)
    seen = Kept(regularizer)
    arguments = {"max_steps": 2, "logging_steps": 1, "train_sampling_strategy": "sequential", **options}
    trainer = trainer_of(
        folder, name, regularizer, callbacks=(seen,), own={"train_dataset": examples(name, 4)}, **arguments
    )
    trainer.train()
    return seen.masks[0], trainer.state.log_history


def kept_in_a_loop(name: str) -> dict[bytes, Any]:
    model, regularizer = build(name, dropout=0.1), ad_drop(**KEPT)
    batch = (translating(model) if name == "marian" else collate)(examples(name, 4))
    regularizer.begin_epoch(1)
    with regularizer.attach(model):
        torch.manual_seed(SEED)
        model(**batch).loss.backward()
        regularizer.end_update()
        return regions(regularizer)


@pytest.mark.parametrize("name", ["bert", "marian"])
def test_trainer_and_a_loop_keep_the_same(tmp_path: Path, name: str) -> None:
    kept, log = kept_under_trainer(tmp_path, name)
    assert len(kept) == 4 and kept == kept_in_a_loop(name)
    sizes = [len(bits) for _, bits in kept.values()]
    assert log[0]["kept_bytes_per_example"] == sum(sizes) / 4 and "kept_hit_rate" not in log[0]
    assert log[1]["kept_hit_rate"] == 1 and log[1]["probe_share"] == 0 < log[1]["drop_encoder.self[0]"]


def test_fairseq_keeps_the_same(tmp_path: Path) -> None:
    pytest.importorskip("fairseq")
    task, *_ = fairseq_step(KEPT)
    task.regularizer.end_update()
    assert regions(task.regularizer) == kept_in_a_loop("bert")


def test_trainer_accumulates_and_smooths(tmp_path: Path) -> None:
    """All four examples of an update in batches of one; label smoothing takes the labels away."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "label_smoothing_factor": 0.1}
    kept, log = kept_under_trainer(tmp_path, "marian", **options)
    assert set(kept) == set(kept_in_a_loop("marian")) and log[1]["kept_hit_rate"] == 1
