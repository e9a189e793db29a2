"""Trainers whose outputs only they can read: the loss of their step is probed; and what AttendOut refuses of them."""

from __future__ import annotations

import functools
import types
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer

from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.huggingface.step_loss import records
from attn_reg_plugin.regularizers import AttendOut, Regularizer
from attn_reg_plugin.regularizers import build as make
from attn_reg_plugin.regularizers.attend_out.defender import check_copyable
from tests.backends.huggingface_models import _ENCODER, build
from tests.huggingface.test_trainer_heads import stacked
from tests.huggingface.trainers import ad_drop, collate, examples, trainer_of, weights


class Noting(Trainer):
    """Notes down what it computes, as TRL's trainers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.noted: dict[str, list[float]] = {"loss": []}
        self.tokens = 0
        super().__init__(*args, **kwargs)

    def note(self, loss: Tensor, ids: Tensor) -> Tensor:
        self.noted["loss"].append(loss.item())
        self.tokens += ids.numel()
        return loss


class Contrasting(Noting):
    """Two forwards, their embeddings, and random draws before the first of them."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        inputs.pop("labels")
        scale = 1 + torch.rand(())
        first, second = (model(**inputs).pooler_output for _ in range(2))
        loss = nn.functional.cross_entropy(scale * first @ second.T, torch.arange(len(first)))
        return self.note(loss, inputs["input_ids"])


class Comparing(Noting):
    """Rewards, (B, 1), of a better and a worse half; its batches are lists of prompts."""

    def _prepare_inputs(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        made = super()._prepare_inputs(collate(inputs))
        made.pop("labels")
        return made

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        better, worse = model(**inputs).logits.squeeze(-1).chunk(2)
        return self.note(-nn.functional.logsigmoid(better - worse).mean(), inputs["input_ids"])


def trained(folder: Path, kind: type[Noting], *regularizers: Regularizer, **options: Any) -> Any:
    torch.manual_seed(1)
    if kind is Contrasting:
        model: Any = transformers.BertModel(transformers.BertConfig(**_ENCODER))
    else:
        model = build("bert", dropout=0.1, num_labels=1)
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 6}
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=6, remove_unused_columns=False, **{**quiet, **options}
    )
    made = kind(
        model=model,
        args=args,
        train_dataset=examples("bert"),
        data_collator=(lambda rows: rows) if kind is Comparing else collate,
        callbacks=[AttnRegCallback(regularizer) for regularizer in regularizers],
    )
    made.train()
    return made


@pytest.mark.parametrize("kind", [Contrasting, Comparing])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}], ids=str)
def test_the_step_is_probed_and_leaves_no_trace(tmp_path: Path, kind: type[Noting], options: dict[str, Any]) -> None:
    stock = trained(tmp_path, kind, **options)
    for plain in (ad_drop(p=0.0), ad_drop(cross_tuning="update:6")):  # of 6 updates, the first 6 are plain
        found = trained(tmp_path, kind, plain, **options)
        assert torch.equal(weights(found.model), weights(stock.model))
        assert (found.noted, found.tokens) == (stock.noted, stock.tokens)
    ours = trained(tmp_path, kind, ad_drop(), **options)
    log = ours.state.log_history[0]
    assert log["regularized"] == 1 and log["probe_fallbacks"] == 0 and 0 < log["drop_encoder.self[1]"] < 1
    assert len(ours.noted["loss"]) == len(stock.noted["loss"]) and ours.tokens == stock.tokens, "no probe is noted"
    assert not torch.equal(weights(ours.model), weights(stock.model))


@pytest.mark.parametrize("first", [0, 1])
def test_two_callbacks_of_which_one_probes_the_step(tmp_path: Path, first: int) -> None:
    probing, drawing = ad_drop(sites="encoder.self[0]"), make("attention_dropout", p=0.4, sites="encoder.self[1]")
    both = trained(tmp_path, Contrasting, *[(probing, drawing), (drawing, probing)][first])
    log = both.state.log_history[0]
    assert 0 < log["drop_encoder.self[0]"] < 0.35 < log["drop_encoder.self[1]"] < 0.45
    assert len(both.noted["loss"]) == 6


def test_records_are_copied_as_deep_as_they_go() -> None:
    noted = defaultdict(list, loss=[1.0])
    held = {"train": noted, "seen": {1}, "logs": deque([1], maxlen=2), "model": nn.Linear(1, 1)}
    copied = records(held)
    copied["train"]["loss"].append(2.0)
    copied["train"]["accuracy"].append(2.0)
    copied["seen"].add(2)
    copied["logs"].append(2)
    assert noted == {"loss": [1.0]} and held["seen"] == {1} and held["logs"] == deque([1])
    assert copied["model"] is held["model"]


# -- AttendOut --------------------------------------------------------------------------------------------------------


def test_reward_data_without_a_loss_is_refused_at_the_start(tmp_path: Path) -> None:
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**{**_ENCODER, "num_labels": 2}))
    rows = [{"input_ids": torch.randint(4, 90, (6,)), "attention_mask": torch.ones(6).long()} for _ in range(8)]
    answered = [{**row, "start_positions": torch.tensor(1), "end_positions": torch.tensor(2)} for row in rows]
    for subset in ("valid", "train[50%:]"):
        own = {"train_dataset": answered, "eval_dataset": rows}
        regularizer = AttendOut(steps=2, reward_subset=subset)
        trainer = trainer_of(tmp_path, "bert", regularizer, model, own=own, max_steps=2)
        trainer.data_collator = stacked
        before = weights(model)
        if subset != "valid":
            trainer.train()
            continue
        message = r"example of 'valid' gives BertForQuestionAnswering none \(the batch has: input_ids, attention_mask\)"
        with pytest.raises(ValueError, match=message):
            trainer.train()
        assert torch.equal(weights(model), before) and not regularizer.attached_sites


def closing_over(model: nn.Module) -> None:
    """As TRL's `add_fused_lm_head` does it: a method that calls the model's own, bound one."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def bound_to(model: nn.Module) -> None:
    """As accelerate's hooks do it: a copy of the model has one that is bound to the copy."""
    model._old_forward = model.forward
    model.forward = functools.partial(lambda module, *args, **kwargs: module._old_forward(*args, **kwargs), model)


def test_a_forward_that_a_copy_would_share_is_refused_at_the_start(tmp_path: Path) -> None:
    for patch, refused in ((bound_to, False), (closing_over, True)):
        regularizer = AttendOut(steps=2)
        trainer = trainer_of(tmp_path, "bert", regularizer, max_steps=2)
        patch(trainer.model)
        before = weights(trainer.model)
        if not refused:
            check_copyable(trainer.model)
            continue
        with pytest.raises(ValueError, match=r"forward of BertForSequenceClassification \(the model itself\) was repl"):
            trainer.train()
        assert torch.equal(weights(trainer.model), before) and not regularizer.attached_sites
