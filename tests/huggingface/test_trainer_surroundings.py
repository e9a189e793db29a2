"""The callback among everything else: errors, refusals, copies, precisions, epochs, logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

import attn_reg_plugin
from attn_reg_plugin.backends.huggingface.inputs import described
from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.huggingface.running import Interception, refuse_unused_parameters
from attn_reg_plugin.regularizers import ADDrop, AttendOut, AttentionLayerDrop, Regularizer
from attn_reg_plugin.regularizers import build as make
from attn_reg_plugin.regularizers.base.attachment import attachments_of
from tests.backends.huggingface_models import batch, build
from tests.huggingface.trainers import ad_drop, examples, print_of, trainer_of, weights


def test_an_error_that_the_trainer_survives_does_not_detach(tmp_path: Path) -> None:
    class Careful(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            try:
                if self.state.global_step == 1:
                    raise KeyError
            except KeyError:
                return torch.tensor(0.0)
            return super().training_step(*args, **kwargs)

    regularizer = ad_drop()
    stock = trainer_of(tmp_path, "bert", regularizer, max_steps=3, logging_steps=3)
    stock.__class__ = Careful
    stock.train()
    assert stock.state.log_history[0]["regularized"] == 1.0


def test_two_callbacks_share_a_trainer(tmp_path: Path) -> None:
    first, second = ad_drop(sites="encoder.self"), AttentionLayerDrop(p=1.0, sites="decoder.self")
    trainer = trainer_of(tmp_path, "marian", first, callbacks=(AttnRegCallback(second),), max_steps=2, logging_steps=2)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["drop_decoder.self[0]"] == 1.0 and 0 < log["drop_encoder.self[0]"] < 1
    assert not {"training_step", "log", "save_model"} & set(vars(trainer))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (AttendOut(sites="decoder.self"), AttendOut(), "2 callbacks have attend_out; use one, with the sites of all"),
        (make("r_drop"), make("hidden_cut"), "r_drop and hidden_cut each run the batch several times"),
    ],
)
def test_two_callbacks_that_cannot_act_together_leave_nothing(
    tmp_path: Path, first: Regularizer, second: Regularizer, said: str
) -> None:
    trainer = trainer_of(tmp_path, "marian", first, callbacks=(AttnRegCallback(second),), max_steps=2)
    with pytest.raises(ValueError, match=said):
        trainer.train()
    assert not attachments_of(trainer.model)
    assert not {"training_step", "compute_loss", "log", "save_model"} & set(vars(trainer))


def test_a_mask_that_the_callback_reads_off_the_batch_need_not_fit(tmp_path: Path) -> None:
    """An audio model's counts raw samples."""
    seen: list[set[str]] = []
    regularizer = ADDrop(cross_tuning="off", objective=lambda outputs, inputs: seen.append({*inputs}) or outputs.loss)
    trainer_of(tmp_path, "bert", regularizer, max_steps=1).train()
    assert seen and all("token_mask" in names and "token_mask_supplied" not in names for names in seen)


def test_regression_of_several_numbers_is_told() -> None:
    """Its outputs have the shape of a classification's."""
    model, inputs = build("bert"), batch("bert")
    numbers = {**inputs, "labels": torch.zeros(len(inputs["input_ids"]), 3)}
    assert "regression" not in described(model, numbers)
    model.config.problem_type = "regression"
    assert described(model, numbers)["regression"] is True and "regression" not in described(model, inputs)


def test_interceptions_end_in_any_order() -> None:
    class Owner:
        def double(self, x: int) -> int:
            return 2 * x

    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)):
        owner = Owner()
        made = [Interception(owner, "double", lambda original, x: original(x) + 1) for _ in range(3)]
        for left, index in zip((2, 1, 0), order, strict=True):
            made[index].undo()
            assert owner.double(5) == 10 + left
        assert not vars(owner)


REFUSALS: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: ad_drop(sites="decoder.cross"), {}, r"matches nothing in this model; its sites are: encoder.self\[0\]"),
    (lambda: AttendOut(reward_subset="test"), {}, "the trainer has one unnamed eval_dataset"),
    (lambda: AttendOut(), {"own": {"eval_dataset": None}}, "the trainer has no eval_dataset"),
    (lambda: AttendOut(), {"own": {"eval_dataset": {"a": examples("bert", 2)}}}, "the evaluation sets are a;"),
    (lambda: AttendOut(steps=9), {}, "rewards each of the 9 updates"),
    (lambda: AttendOut(reward_subset="train[100%:]"), {}, "which is empty: there are 24 examples"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSALS)
def test_refusals_before_training(tmp_path: Path, make: Any, options: dict[str, Any], message: str) -> None:
    regularizer = make()
    trainer = trainer_of(tmp_path, "bert", regularizer, **options)
    before, start = print_of(trainer.model), weights(trainer.model)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert print_of(trainer.model) == before and torch.equal(weights(trainer.model), start)
    assert not regularizer.attached_sites


def test_gradients_that_data_parallel_training_would_wait_for(tmp_path: Path) -> None:
    """Trainer looks for unused parameters unless activations are checkpointed."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        regularizer = AttentionLayerDrop(p=0.5)
        for unused in (True, False):
            trainer = trainer_of(tmp_path / "out", "bert")
            trainer.model_wrapped = DistributedDataParallel(trainer.model, find_unused_parameters=unused)
            if unused:
                refuse_unused_parameters(trainer, regularizer)
                continue
            with pytest.raises(ValueError, match="set ddp_find_unused_parameters=True"):
                refuse_unused_parameters(trainer, regularizer)
            for harmless in (ad_drop(), AttentionLayerDrop(p=0.0)):
                refuse_unused_parameters(trainer, harmless)
    finally:
        torch.distributed.destroy_process_group()


def test_a_compiled_training(tmp_path: Path) -> None:
    """Trainer's `torch_compile`: the same masks and losses as without it."""
    logs = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        model = build("bert", 0.1, num_hidden_layers=1)
        trainer = trainer_of(tmp_path, "bert", ad_drop(), model, max_steps=1, logging_steps=1, **options)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    torch.compiler.reset()
    assert logs[0]["regularized"] == 1.0 and logs[0]["drop_encoder.self[0]"] > 0.1
    for name in ("loss", "grad_norm", "drop_encoder.self[0]"):
        assert logs[1][name] == pytest.approx(logs[0][name], rel=1e-4)


def test_the_package_has_the_callback_when_it_is_asked_for() -> None:
    assert attn_reg_plugin.AttnRegCallback is AttnRegCallback
    with pytest.raises(AttributeError, match="has no attribute 'AttnRegCallbacks'"):
        _ = attn_reg_plugin.AttnRegCallbacks


def test_what_is_no_regularizer_and_no_trainer() -> None:
    with pytest.raises(TypeError, match=r"takes a regularizer, such as .*, not type"):
        AttnRegCallback(ADDrop)
    with pytest.raises(RuntimeError, match=r"belongs in a transformers\.Trainer"):
        AttnRegCallback(ADDrop()).on_train_begin(None, None, None)


def test_epochs_count_from_one(tmp_path: Path) -> None:
    options = {"max_steps": -1, "num_train_epochs": 4, "logging_strategy": "epoch"}
    trainer = trainer_of(tmp_path, "bert", ad_drop(cross_tuning="epoch"), **options)
    trainer.train()
    assert [entry["regularized"] for entry in trainer.state.log_history if "loss" in entry] == [0, 1, 0, 1]


def test_updates_are_those_of_the_optimizer(tmp_path: Path) -> None:
    regularizer = ad_drop(cross_tuning="update:2")
    options = {"max_steps": 8, "logging_steps": 2, "gradient_accumulation_steps": 3}
    trainer = trainer_of(tmp_path, "bert", regularizer, **options)
    trainer.train()
    assert [entry["regularized"] for entry in trainer.state.log_history if "loss" in entry] == [0, 1, 0, 1]
    assert regularizer.updates == 8


@pytest.mark.parametrize("name", ["bert", "marian"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, name: str, reentrant: bool) -> None:
    checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    runs = []
    for options in ({}, checkpointed):
        # not Adam, which makes steps of the same size from the round-off of a gradient that is zero
        sgd = {"optim": "sgd", "learning_rate": 0.05, "max_steps": 3}
        trainer = trainer_of(tmp_path, name, ad_drop(), dropout=0.0, **sgd, **options)
        trainer.train()
        runs.append(weights(trainer.model))
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


def test_gold_labels_are_known_where_label_smoothing_takes_them(tmp_path: Path) -> None:
    class Masks(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.seen = [site.keep for site in regularizer.attached_sites]

    masks = []
    for smoothing in (0.0, 0.1):
        regularizer, kept = ad_drop(labels="gold", q=1.0), Masks()
        options = {"max_steps": 1, "label_smoothing_factor": smoothing}
        trainer_of(tmp_path, "bert", regularizer, dropout=0.0, callbacks=(kept,), **options).train()
        masks.append(kept.seen)
    assert all(torch.equal(x, y) for x, y in zip(*masks, strict=True))


def test_a_model_that_regresses(tmp_path: Path) -> None:
    data = [{**example, "labels": float(example["labels"])} for example in examples("bert")]
    padded = lambda rows: {  # noqa: E731
        "input_ids": nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True, 1),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }
    for method in (ad_drop(), AttendOut(steps=2, sites="*")):
        own = {"train_dataset": data, "eval_dataset": data[:6]}
        trainer = trainer_of(tmp_path, "bert", method, build("bert", num_labels=1), own=own, max_steps=4)
        trainer.data_collator = padded
        trainer.train()
        assert 0 < trainer.state.log_history[0]["drop_encoder.self[0]"] < 1


def test_one_epoch_of_cross_tuning_is_said_to_be_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 64}
    trainer_of(tmp_path, "bert", ADDrop(p=0.3, q=0.3), **options).train()
    assert sum("this training has one epoch" in message for message in caplog.messages) == 1
