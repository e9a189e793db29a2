"""One method, three faces: fairseq, Trainer and a loop of one's own draw the same masks and have the same loss."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from attn_reg_plugin.regularizers import AttendOut, Outcome, Regularizer, Tokens
from attn_reg_plugin.regularizers import build as make
from tests.backends.huggingface_models import build
from tests.huggingface.trainers import collate, examples, trainer_of, translating

SEED = 11
#: methods that draw, by what the comparison calls them
DRAWING: dict[str, tuple[str, dict[str, Any]]] = {
    "weights": ("attention_dropout", {"p": 0.4, "where": "weights"}),
    "scores": ("attention_dropout", {"p": 0.4, "where": "scores", "p_by_site": "*[0]: 0.2"}),
    "heads": ("head_drop", {"p": 0.5}),
    "layers": ("layer_drop", {"p": 0.5}),
    "attentions": ("attention_layer_drop", {"p": 0.5}),
    "schedule": ("scheduled_dropout", {"schedule": "drop *: 0:0.5"}),
}


def ad_drop(**options: Any) -> tuple[str, dict[str, Any]]:
    return "ad_drop", {"p": 0.5, "q": 0.5, "cross_tuning": "off", **options}


def masks_of(regularizer: Regularizer) -> list[Tensor]:
    return [site.keep.clone() for site in regularizer.attached_sites if site.keep is not None]


class Seen(TrainerCallback):
    """Seeds each step, and keeps the masks that were on the sites in it."""

    def __init__(self, regularizer: Any) -> None:
        self.regularizer, self.masks = regularizer, []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.manual_seed(SEED)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.masks = masks_of(self.regularizer)


def under_trainer(folder: Path, name: str, method: str, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    regularizer = make(method, sites="*", **options)
    seen = Seen(regularizer)
    own = {"train_dataset": examples(name, 4)}
    arguments = {"max_steps": 1, "logging_steps": 1, "train_sampling_strategy": "sequential"}
    trainer = trainer_of(folder, name, regularizer, callbacks=(seen,), own=own, **arguments)
    trainer.train()
    return seen.masks, trainer.state.log_history[0]["loss"]


def in_a_loop(name: str, method: str, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    model, regularizer = build(name, dropout=0.1), make(method, sites="*", **options)
    batch = (translating(model) if name == "marian" else collate)(examples(name, 4))
    with regularizer.attach(model):
        torch.manual_seed(SEED)
        loss = model(**batch).loss
        return masks_of(regularizer), loss.item()


class Backward:
    """As much of an optimizer as a training step needs."""

    masks: list[Tensor]

    def __init__(self, regularizer: Any) -> None:
        self.regularizer = regularizer

    def backward(self, loss: Tensor) -> None:
        self.masks = masks_of(self.regularizer)
        loss.backward()


def fairseq_step(
    method: str, options: dict[str, Any], tell: Callable[[Any], None] = lambda regularizer: None
) -> tuple[Any, Backward, float]:
    """A classifier behind fairseq: the task's training step with the criterion of labelled data.

    Args:
        tell: is given the regularizer once it is attached.
    """
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

    flags = {f"{method}_{name}": value for name, value in options.items()}
    task = Regularized(argparse.Namespace(attn_reg=method, attn_sites="*", **flags))
    model = task.build_model(None)
    task.regularizer.begin_epoch(1)
    tell(task.regularizer)
    batch = collate(examples("bert", 4))
    sample = {"net_input": batch, "target": batch.pop("labels"), "ntokens": 4, "nsentences": 4}
    torch.manual_seed(SEED)
    optimizer = Backward(task.regularizer)
    loss, size, _ = task.train_step(sample, model, ClassificationCriterion(task), optimizer, 0)
    return task, optimizer, loss.item() / size


def under_fairseq(method: str, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    _, optimizer, loss = fairseq_step(method, options)
    return optimizer.masks, loss


@pytest.mark.parametrize("name", ["bert", "marian"])
@pytest.mark.parametrize("labels", ["pseudo", "gold"])
def test_trainer_and_a_loop_agree(tmp_path: Path, name: str, labels: str) -> None:
    masks, loss = under_trainer(tmp_path, name, *ad_drop(labels=labels))
    again, loop_loss = in_a_loop(name, *ad_drop(labels=labels))
    assert all(torch.equal(x, y) for x, y in zip(masks, again, strict=True))
    assert all(not mask.all() for mask in masks)
    assert loss == pytest.approx(loop_loss, abs=1e-5)


@pytest.mark.parametrize("labels", ["pseudo", "gold"])
def test_fairseq_agrees(tmp_path: Path, labels: str) -> None:
    pytest.importorskip("fairseq")
    masks, loss = under_trainer(tmp_path, "bert", *ad_drop(labels=labels))
    theirs, fairseq_loss = under_fairseq(*ad_drop(labels=labels))
    assert len(masks) == 2 and all(torch.equal(x, y) for x, y in zip(masks, theirs, strict=True))
    assert loss == pytest.approx(fairseq_loss, abs=1e-5)


@pytest.mark.parametrize("drawing", DRAWING)
def test_what_is_drawn_is_the_same_in_all_three(tmp_path: Path, drawing: str) -> None:
    pytest.importorskip("fairseq")
    losses = [in_a_loop("bert", *DRAWING[drawing])[1], under_fairseq(*DRAWING[drawing])[1]]
    losses.append(under_trainer(tmp_path, "bert", *DRAWING[drawing])[1])
    assert losses == pytest.approx(losses[:1] * 3, abs=1e-5)
    plain = build("bert", dropout=0.1)
    torch.manual_seed(SEED)
    assert abs(losses[0] - plain(**collate(examples("bert", 4))).loss.item()) > 1e-3


class Named:
    """As much of a problem as the first update of a round needs."""

    def loss(self, model: nn.Module, inputs: Any) -> Outcome:
        raise NotImplementedError

    validation = loss

    def tokens(self, inputs: Any) -> dict[str, Tokens]:
        return {"encoder": Tokens(inputs["input_ids"], inputs["attention_mask"].bool())}


def test_attend_out_proposes_the_same_in_all_three(tmp_path: Path) -> None:
    """The generator is made in the first forward: from the same random numbers it is the same one."""
    pytest.importorskip("fairseq")

    def told(regularizer: Any) -> None:
        model = regularizer.model
        regularizer.problem, regularizer.optimizer = Named(), torch.optim.SGD(model.parameters(), 0.1)
        regularizer.bind = lambda training: None  # fairseq's optimizer and data are not there

    _, optimizer, fairseq_loss = fairseq_step("attend_out", {}, told)
    found = [(optimizer.masks, fairseq_loss), under_trainer(tmp_path, "bert", "attend_out", {})]
    model, regularizer = build("bert", dropout=0.1), AttendOut(sites="*")
    with regularizer.attach(model):
        told(regularizer)
        torch.manual_seed(SEED)
        loss = model(**collate(examples("bert", 4))).loss
        found.append((masks_of(regularizer), loss.item()))
    for masks, loss in found[:2]:
        assert len(masks) == 2 and all(torch.equal(x, y) for x, y in zip(masks, found[2][0], strict=True))
        assert loss == pytest.approx(found[2][1], abs=1e-5)
