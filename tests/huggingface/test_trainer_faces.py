"""Three faces of a method: fairseq, Trainer and a loop of one's own have the same masks, loss and gradients."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from attn_reg_plugin.huggingface.callback import divides_by_count
from attn_reg_plugin.regularizers import AttendOut, Regularizer, Tokens
from attn_reg_plugin.regularizers import build as make
from attn_reg_plugin.regularizers.r_drop import RDrop
from tests.backends.huggingface_models import build
from tests.huggingface.trainers import On, collate, examples, trainer_of, translating

SEED = 11
AD_DROP = {"p": 0.5, "q": 0.5, "cross_tuning": "off", "sites": "*"}
#: method and options, by what the comparison calls them
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "pseudo labels": ("ad_drop", {**AD_DROP, "labels": "pseudo"}),
    "gold labels": ("ad_drop", {**AD_DROP, "labels": "gold"}),
    "weights": ("attention_dropout", {"p": 0.4, "where": "weights", "sites": "*"}),
    "scores": ("attention_dropout", {"p": 0.4, "where": "scores", "sites": "*"}),
    "heads": ("head_drop", {"p": 0.5, "sites": "*"}),
    "layers": ("layer_drop", {"p": 0.5, "sites": "*"}),
    "attentions": ("attention_layer_drop", {"p": 0.5, "sites": "*"}),
    "schedule": ("scheduled_dropout", {"schedule": "drop *: 0:0.5", "sites": "*"}),
    "r_drop": ("r_drop", {"weight": 2.0}),
    "hidden_cut": ("hidden_cut", {"cut": 0.3, "weight": 2.0}),
    "several": (
        "ad_drop+head_drop+layer_drop+hidden_cut",
        {"ad_drop": AD_DROP, "head_drop": {"p": 0.5}, "layer_drop": {"p": 0.3}, "hidden_cut": {"cut": 0.3}},
    ),
}


class Step(NamedTuple):
    """A training step: keep masks of the sites, loss, and the gradient norm of every parameter."""

    masks: list[Tensor]
    loss: float
    norms: Tensor


def masks_of(regularizer: Regularizer) -> list[Tensor]:
    return [site.keep.clone() for site in regularizer.attached_sites if site.keep is not None]


def norms_of(model: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() if p.grad is not None else torch.zeros(()) for p in model.parameters()])


def assert_same(first: Step, second: Step) -> None:
    assert len(first.masks) == len(second.masks)
    assert all(torch.equal(x, y) for x, y in zip(first.masks, second.masks, strict=True))
    assert first.loss == pytest.approx(second.loss, abs=1e-4)
    torch.testing.assert_close(first.norms, second.norms, rtol=1e-3, atol=1e-5)


def under_trainer(folder: Path, name: str, method: str, options: dict[str, Any], **arguments: Any) -> Step:
    regularizer, own = make(method, **options), {"train_dataset": examples(name, 4)}
    steps: list[tuple[list[Tensor], Tensor]] = []
    seeded = On("on_step_begin", lambda *_, **__: torch.manual_seed(SEED))
    seen = On("on_optimizer_step", lambda *_, model, **__: steps.append((masks_of(regularizer), norms_of(model))))
    arguments = {"max_steps": 1, "logging_steps": 1, "train_sampling_strategy": "sequential", **arguments}
    trainer = trainer_of(folder, name, regularizer, callbacks=(seeded, seen), own=own, max_grad_norm=0.0, **arguments)
    trainer.train()
    ((masks, norms),) = steps
    return Step(masks, trainer.state.log_history[0]["loss"], norms)


def in_a_loop(
    name: str, method: str, options: dict[str, Any], tell: Callable[[Any], None] = lambda regularizer: None
) -> Step:
    model, regularizer = build(name, dropout=0.1), make(method, **options)
    batch = (translating(model) if name == "marian" else collate)(examples(name, 4))
    with regularizer.attach(model):
        tell(regularizer)
        torch.manual_seed(SEED)
        loss = regularizer.loss(lambda b: model(**b).loss, batch)
        masks = masks_of(regularizer)
        loss.backward()
        return Step(masks, loss.item(), norms_of(model))


class Data(list):
    """Examples as much of a dataset of fairseq's as a method needs."""

    def collater(self, rows: list[Any]) -> dict[str, Any]:
        batch = collate(rows)
        return {"net_input": batch, "target": batch.pop("labels"), "ntokens": len(rows), "nsentences": len(rows)}


class Backward:
    """As much of an optimizer as a training step needs."""

    def __init__(self, regularizer: Any) -> None:
        self.regularizer = regularizer

    def backward(self, loss: Tensor) -> None:
        self.masks = masks_of(self.regularizer)
        (loss / 4).backward()  # of the four examples' sum


def under_fairseq(method: str, options: dict[str, Any], tell: Callable[[Any], None] = lambda regularizer: None) -> Step:
    """A classifier behind fairseq: the task's training step; `tell` is given the regularizer once it is attached."""
    from fairseq.data import BaseWrapperDataset

    from attn_reg_plugin.criterions.labelled import ClassificationCriterion
    from attn_reg_plugin.labelled import own_task
    from attn_reg_plugin.models.hf_encoder import HFEncoderModel
    from tests.tasks.tasks_in_process import Regularized

    class Labelled(Regularized):
        labelled = own_task("classification", "text", labels="a,b,c", file_format="tsv")

    given = options if "+" in method else {method: options}
    flags = {f"{part}_{name}": value for part, of in given.items() for name, value in of.items() if name != "sites"}
    cfg = argparse.Namespace(attn_reg=method, attn_sites="*", model=HFEncoderModel(build("bert", dropout=0.1)), **flags)
    task = Labelled(cfg)
    model = task.build_model(cfg).train()
    task.regularizer.begin_epoch(1)
    tell(task.regularizer)
    task.datasets["train"] = data = BaseWrapperDataset(Data(examples("bert", 4)))
    optimizer, sample = Backward(task.regularizer), data.collater(data.dataset)
    torch.manual_seed(SEED)
    loss, size, log = task.train_step(sample, model, ClassificationCriterion(task), optimizer, 0)
    assert size == 4 and log["sample_size"] == 4 and log["ntokens"] == 4
    return Step(optimizer.masks, loss.item() / size, norms_of(model))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bert", "marian", "llama"])
def test_trainer_and_a_loop_agree(tmp_path: Path, name: str, method: str) -> None:
    if name == "llama" and method in ("hidden_cut", "several"):
        pytest.skip("its attention is the decoder's")
    step = under_trainer(tmp_path, name, *METHODS[method])
    assert_same(step, in_a_loop(name, *METHODS[method]))
    assert all(not mask.all() for mask in step.masks) and (step.masks or "labels" not in method)
    plain = build(name, dropout=0.1)
    torch.manual_seed(SEED)
    assert abs(step.loss - plain(**collate(examples(name, 4))).loss.item()) > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_fairseq_agrees(tmp_path: Path, method: str) -> None:
    name, options = METHODS[method]
    if "+" in name:  # fairseq has one flag for the sites of all
        options = {part: {**given, "sites": "*"} if part != "hidden_cut" else given for part, given in options.items()}
    assert_same(under_fairseq(name, options), under_trainer(tmp_path, "bert", name, options))


def test_attend_out_proposes_the_same_in_all_three(tmp_path: Path) -> None:
    """The generator is made in the first forward: from the same random numbers it is the same one."""

    def tokens(inputs: Any) -> dict[str, Tokens]:
        return {"encoder": Tokens(inputs["input_ids"], inputs["attention_mask"].bool())}

    problem = mock.Mock(tokens=tokens)  # no loss is asked for in the first update of a round

    def told(regularizer: AttendOut) -> None:
        regularizer.problem, regularizer.optimizer = problem, torch.optim.SGD(regularizer.model.parameters(), 0.1)
        regularizer.bind = lambda training: None  # fairseq's optimizer and data are not there

    expected = in_a_loop("bert", "attend_out", {"sites": "*"}, told)
    assert len(expected.masks) == 2
    assert_same(under_fairseq("attend_out", {}, told), expected)
    assert_same(under_trainer(tmp_path, "bert", "attend_out", {"sites": "*"}), expected)
    assert not problem.loss.called and not problem.validation.called


def losses(folder: Path, name: str, case: dict[str, Any], *methods: Regularizer | None) -> list[float]:
    """Losses of an update with two accumulated batches, without dropout."""
    found = []
    for method in methods:
        options = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        own = {"train_dataset": examples(name, 4), **{key: case[key] for key in case.keys() - {"torch_compile"}}}
        compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if "torch_compile" in case else {}
        trainer = trainer_of(folder, name, method, dropout=0.0, own=own, logging_steps=1, **options, **compiled)
        trainer.train()
        found.append(trainer.state.log_history[0]["loss"])
    return found


def by_a_number(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A `compute_loss_func` that divides by the count as a number of Python's, through which there is no gradient."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / int(num_items_in_batch)


def with_one_row_first(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate with a tensor that all examples share before those with a row for each."""
    collated = collate(batch)
    return {"position_ids": torch.arange(collated["input_ids"].size(1))[None], **collated}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("bert", {}),
        ("llama", {}),
        ("llama", {"compute_loss_func": by_a_number}),
        ("llama", {"torch_compile": True}),
        ("llama", {"data_collator": with_one_row_first}),
    ],
)
def test_the_divergence_is_divided_as_the_loss_is(
    tmp_path: Path, name: str, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama divides by the labels of both accumulated batches, bert gives a mean for each.

    There is no dropout: two passes are twice the loss of one; with a divergence of 1 for each item the weight is added.
    """
    one, two = losses(tmp_path, name, case, None, make("r_drop", weight=3.0))
    assert two == pytest.approx(2 * one, rel=1e-4)
    monkeypatch.setattr(RDrop, "divergence", lambda self, first, second: torch.ones(len(first)))
    low, high = losses(tmp_path, name, case, make("r_drop", weight=1.0), make("r_drop", weight=3.0))
    # of both batches together, or of each: bert's losses Trainer doesn't divide by the number of batches
    assert high - low == pytest.approx({"bert": 2 * 2.0, "llama": 2.0}[name], rel=1e-3)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda count: 2.0 / count + 0.2, True),  # with a loss of the experts, which is not divided
        (lambda count: 2.0, False),
        (lambda count: 0.0, None),
        (lambda count: float("nan"), None),
    ],
)
def test_whether_a_loss_depends_on_the_count(tmp_path: Path, loss: Callable[[int], float], found: bool | None) -> None:
    compute = lambda batch, num_items_in_batch: torch.tensor(loss(num_items_in_batch))  # noqa: E731
    assert divides_by_count(trainer_of(tmp_path), compute, {}, 16) is found
