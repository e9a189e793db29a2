"""Methods that add to the loss, or act on weights and gradients: fairseq, Trainer and a loop of one's own agree."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attn_reg_plugin.regularizers import build
from tests.backends.huggingface_models import build as build_model
from tests.huggingface.test_trainer_faces import SEED, Seen
from tests.huggingface.trainers import collate, examples, trainer_of, translating

#: Child-Tuning by the Fisher information of the training set
DRIVEN = "mixout+child_tuning"
METHODS = {
    "r_drop": {"weight": 2.0},
    "hidden_cut": {"cut": 0.3, "weight": 2.0},
    "mixout": {"p": 0.5},
    "child_tuning": {"p": 0.5},
    DRIVEN: {"child_tuning": {"mode": "driven"}},
    "ad_drop+head_drop+layer_drop+hidden_cut": {
        "ad_drop": {"p": 0.5, "q": 0.5, "cross_tuning": "off"},
        "head_drop": {"p": 0.5},
        "layer_drop": {"p": 0.3},
        "hidden_cut": {"cut": 0.3},
    },
}


def gradient_norms(model: nn.Module) -> torch.Tensor:
    """Of every parameter."""
    return torch.stack([p.grad.norm() if p.grad is not None else torch.zeros(()) for p in model.parameters()])


class Norms(Seen):
    """Seeds each step, and keeps the norms of its gradients."""

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.masks = gradient_norms(kwargs["model"])


def under_trainer(folder: Path, name: str, method: str, **arguments: Any) -> tuple[float, torch.Tensor]:
    regularizer = build(method, **METHODS[method])
    seen, own = Norms(regularizer), {"train_dataset": examples(name, 4)}
    arguments = {"max_steps": 1, "logging_steps": 1, "train_sampling_strategy": "sequential", **arguments}
    trainer = trainer_of(folder, name, regularizer, callbacks=(seen,), own=own, max_grad_norm=0.0, **arguments)
    trainer.train()
    return trainer.state.log_history[0]["loss"], seen.masks


def in_a_loop(name: str, method: str) -> tuple[float, torch.Tensor]:
    model, regularizer = build_model(name, dropout=0.1), build(method, **METHODS[method])
    batch = (translating(model) if name == "marian" else collate)(examples(name, 4))
    with regularizer.attach(model):
        torch.manual_seed(SEED)
        if method == DRIVEN:
            regularizer.parts[0].estimate(lambda b: model(**b).loss, [batch])
            torch.randperm(4)  # the faces draw the examples for it
        loss = regularizer.loss(lambda b: model(**b).loss, batch)
        loss.backward()
        return loss.item(), gradient_norms(model)


class Data(list):
    """Examples as much of a dataset of fairseq's as a method needs."""

    def collater(self, rows: list[Any]) -> dict[str, Any]:
        batch = collate(rows)
        return {"net_input": batch, "target": batch.pop("labels"), "ntokens": len(rows), "nsentences": len(rows)}


def under_fairseq(method: str) -> tuple[float, torch.Tensor, dict[str, Any]]:
    from fairseq.data import BaseWrapperDataset
    from fairseq.tasks import FairseqTask

    from attn_reg_plugin.criterions.classification import ClassificationCriterion
    from attn_reg_plugin.labelled import plain_task
    from attn_reg_plugin.models.hf_encoder import HFEncoderModel
    from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask

    class Stock(FairseqTask):
        labelled = plain_task("classification", text=("text",), label="label", labels=("a", "b", "c"))

        def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
            return HFEncoderModel(build_model("bert", dropout=0.1))

    class Regularized(AttnRegTask, Stock):
        pass

    class Backward:
        def backward(self, loss: torch.Tensor) -> None:
            (loss / 4).backward()

    options = METHODS[method] if "+" in method else {method: METHODS[method]}
    flags = {f"{part}_{name}": value for part, given in options.items() for name, value in given.items()}
    task = Regularized(argparse.Namespace(attn_reg=method, **flags))
    model = task.build_model(None).train()
    task.datasets["train"] = data = BaseWrapperDataset(Data(examples("bert", 4)))
    sample = data.collater(data.dataset)
    torch.manual_seed(SEED)
    loss, size, log = task.train_step(sample, model, ClassificationCriterion(task), Backward(), 0)
    assert size == 4 and log["sample_size"] == 4 and log["ntokens"] == 4
    return loss.item() / size, gradient_norms(model), log


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bert", "marian", "llama"])
def test_trainer_and_a_loop_agree(tmp_path: Path, name: str, method: str) -> None:
    if name == "llama" and "hidden_cut" in method:
        pytest.skip("its attention is the decoder's")
    if name != "bert" and method == DRIVEN:
        pytest.skip("the Fisher information is of examples, and a translator's loss of tokens")
    loss, norms = under_trainer(tmp_path, name, method)
    own, again = in_a_loop(name, method)
    assert loss == pytest.approx(own, abs=1e-4)
    torch.testing.assert_close(norms, again, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_fairseq_agrees(tmp_path: Path, method: str) -> None:
    pytest.importorskip("fairseq")
    loss, norms = under_trainer(tmp_path, "bert", method)
    theirs, again, log = under_fairseq(method)
    assert loss == pytest.approx(theirs, abs=1e-4) and log["loss"].item() / 4 == pytest.approx(theirs, abs=1e-5)
    torch.testing.assert_close(norms, again, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_two_accumulated_batches_are_one(tmp_path: Path, name: str) -> None:
    """Llama divides by the labels of both batches, bert gives a mean for each; there is no dropout, so no divergence,
    and two passes are twice the loss of one."""
    found = []
    for method in (None, "r_drop"):
        regularizer = None if method is None else build(method, weight=3.0)
        options = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        own = {"train_dataset": examples(name, 4)}
        trainer = trainer_of(tmp_path, name, regularizer, dropout=0.0, own=own, logging_steps=1, **options)
        trainer.train()
        found.append(trainer.state.log_history[0]["loss"])
    assert found[1] == pytest.approx(2 * found[0], rel=1e-4)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_divergence_is_divided_as_the_loss_is(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    """With a divergence of 1 for each item and no dropout, what is added to the loss is the weight."""
    from attn_reg_plugin.regularizers.r_drop import RDrop

    monkeypatch.setattr(RDrop, "divergence", lambda self, passes, regression: torch.ones(len(passes[0])))
    losses = []
    for weight in (1.0, 3.0):
        options = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        own = {"train_dataset": examples(name, 4)}
        trainer = trainer_of(
            tmp_path, name, build("r_drop", weight=weight), dropout=0.0, own=own, logging_steps=1, **options
        )
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    # of both batches together, or of each: bert's losses Trainer doesn't divide by the number of batches
    assert losses[1] - losses[0] == pytest.approx({"bert": 2 * 2.0, "llama": 2.0}[name], rel=1e-3)


def test_evaluation_sees_nothing(tmp_path: Path) -> None:
    results = []
    for method in (None, "r_drop", "hidden_cut", "mixout+child_tuning"):
        regularizer = None if method is None else build(method)
        options = {"learning_rate": 0.0, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        trainer = trainer_of(tmp_path, "bert", regularizer, **options)
        trainer.train()
        results.append([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
    assert len(results[0]) == 2 and all(result == results[0] for result in results)
