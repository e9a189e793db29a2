"""The callback among everything else: what it is given and refuses, other callbacks, features of Trainer, logs."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate
from transformers import Trainer

import attn_reg_plugin
from attn_reg_plugin import LightningCallback
from attn_reg_plugin.callbacks import refuse_unused_parameters
from attn_reg_plugin.huggingface.callback import AttnRegCallback
from attn_reg_plugin.regularizers import ADDrop, AttendOut, AttentionLayerDrop, Combination
from attn_reg_plugin.regularizers import build as make
from attn_reg_plugin.regularizers.base.hooks.attachment import attachments_of
from tests.backends.huggingface_models import build
from tests.backends.oracle_models import batch, tiny
from tests.huggingface.trainers import On, ad_drop, examples, print_of, trainer_of, weights
from tests.processes import group_of_one

INTERCEPTED = {"training_step", "compute_loss", "log", "save_model"}


def logs(trainer: Trainer, name: str = "regularized") -> list[float | None]:
    """A quantity in each line of the training log."""
    return [entry.get(f"attn_reg/{name}") for entry in trainer.state.log_history if "loss" in entry]


def test_a_method_is_given_as_it_is_or_by_its_name() -> None:
    named = AttnRegCallback("ad_drop", p=0.4)
    assert type(named.regularizer) is ADDrop and named.regularizer.p == 0.4
    assert repr(named).startswith("AttnRegCallback(ADDrop(") and "p=0.4" in repr(named)
    several = AttnRegCallback([ADDrop(), "layer_drop"]).regularizer
    assert isinstance(several, Combination) and several.name == "ad_drop+layer_drop"
    assert attn_reg_plugin.AttnRegCallback is AttnRegCallback


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (
            ADDrop,
            {},
            r"takes a regularizer, such as AttnRegCallback\(ADDrop\(p=0.3, q=0.3\)\), .* not the class ADDrop",
        ),
        (None, {}, "takes a regularizer, such as .*, not NoneType"),
        ([], {}, "takes a regularizer, such as .*, not list"),
        (["ad_drop", 1], {}, "takes a regularizer, such as .*, not int"),
        (ADDrop(), {"p": 0.3}, r"p goes with the name of a method: AttnRegCallback\('ad_drop', p=0.3\)"),
        ("adrop", {}, "unknown method 'adrop'; the methods are: ad_drop, "),
    ],
)
def test_what_is_no_method(given: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        AttnRegCallback(given, **options)
    with pytest.raises(RuntimeError, match=r"belongs in a transformers\.Trainer"):
        AttnRegCallback(ADDrop()).on_train_begin(None, None, None)


METHOD = r"ADDrop is a method and no callback; .*AttnRegCallback\(ADDrop\(\.\.\.\)"
LIGHTNINGS = "LightningCallback has no on_init_end: AttnRegCallback is for transformers' Trainer"


@pytest.mark.parametrize(
    ("given", "said"), [(ADDrop(), METHOD), (ADDrop, METHOD), (LightningCallback("ad_drop"), LIGHTNINGS)]
)
def test_what_is_none_of_its_callbacks(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        trainer_of(tmp_path, callbacks=(given,))


def test_what_is_attached_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    methods = [ADDrop(p=0.4), make("layer_drop", p=0.5, sites="encoder.self[1]"), make("r_drop")]
    with caplog.at_level(logging.INFO, "attn_reg_plugin.huggingface"):
        trainer_of(tmp_path, "bert", Combination(methods), max_steps=1).train()
    assert (
        "ad_drop on 2 of 2 attentions of BertForSequenceClassification: encoder.self; p 0.4, q 0.3; from epoch 2, "
        "every other + layer_drop on 1 of 2 attentions of BertForSequenceClassification: encoder.self[1]; p 0.5 + "
        "r_drop on BertForSequenceClassification"
    ) in [message for message in caplog.messages if message.startswith("ad_drop on")]


REFUSALS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "site": ((ad_drop(sites="decoder.cross"),), {}, r"matches nothing in this model; its sites are: encoder.self\[0\]"),
    "a decoder": ((ADDrop(),), {"name": "llama"}, r"its sites are: decoder.self\[0\] .*; write sites='decoder.self'"),
    "a set": ((AttendOut(reward_subset="test"),), {}, "the trainer has one unnamed eval_dataset"),
    "no set": ((AttendOut(),), {"own": {"eval_dataset": None}}, "the trainer has no eval_dataset"),
    "sets": ((AttendOut(),), {"own": {"eval_dataset": {"a": examples("bert", 2)}}}, "the evaluation sets are a;"),
    "few rewards": ((AttendOut(steps=9),), {}, "rewards each of the 9 updates"),
    "no rewards": ((AttendOut(reward_subset="train[100%:]"),), {}, "which is empty: there are 24 examples"),
    "two": (
        (ADDrop(), make("layer_drop")),
        {},
        "a trainer takes one AttnRegCallback; for several methods give it a li",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_leave_nothing(tmp_path: Path, case: str) -> None:
    """As the trainer is made, or as it begins to train."""
    methods, options, message = REFUSALS[case]
    model = trainer_of(tmp_path, options.get("name", "bert")).model
    before, start = print_of(model), weights(model)
    callbacks = tuple(AttnRegCallback(method) for method in methods)
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, model=model, callbacks=callbacks, **{"name": "bert", **options}).train()
    assert print_of(model) == before and torch.equal(weights(model), start) and not attachments_of(model)
    assert not any(method.attached_sites for method in methods)


def test_gradients_that_data_parallel_training_would_wait_for(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        waits, looks = (DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=one) for one in (False, True))
        with pytest.raises(ValueError, match="no gradient, which data parallel training waits for; set that"):
            refuse_unused_parameters(waits, AttentionLayerDrop(p=0.5), "set that")
        refuse_unused_parameters(looks, AttentionLayerDrop(p=0.5), "")
        for harmless in (ad_drop(), AttentionLayerDrop(p=0.0)):
            refuse_unused_parameters(waits, harmless, "")


def test_an_error_that_the_trainer_survives_does_not_detach(tmp_path: Path) -> None:
    class Careful(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            try:
                if self.state.global_step == 1:
                    raise KeyError
            except KeyError:
                return torch.tensor(0.0)
            return super().training_step(*args, **kwargs)

    stock = trainer_of(tmp_path, "bert", ad_drop(), max_steps=3, logging_steps=3)
    stock.__class__ = Careful
    stock.train()
    assert logs(stock) == [1.0]


def test_methods_of_one_callback_have_sites_of_their_own(tmp_path: Path) -> None:
    methods = [ad_drop(sites="encoder.self"), AttentionLayerDrop(p=1.0, sites="decoder.self")]
    callbacks = (AttnRegCallback(methods, rates_by_site=True),)
    trainer = trainer_of(tmp_path, "marian", callbacks=callbacks, max_steps=2, logging_steps=2)
    trainer.train()
    assert logs(trainer, "drop_decoder.self[0]") == [1.0] and 0 < logs(trainer, "drop_encoder.self[0]")[0] < 1
    assert not INTERCEPTED & set(vars(trainer))


@pytest.mark.parametrize(
    ("cross_tuning", "options"),
    [
        ("epoch", {"max_steps": -1, "num_train_epochs": 4, "logging_strategy": "epoch"}),
        ("update:2", {"max_steps": 8, "logging_steps": 2, "gradient_accumulation_steps": 3}),
    ],
)
def test_epochs_count_from_one_and_updates_are_the_optimizers(
    tmp_path: Path, cross_tuning: str, options: dict[str, Any]
) -> None:
    """Nothing is logged of plain epochs."""
    regularizer = ad_drop(cross_tuning=cross_tuning)
    trainer = trainer_of(tmp_path, "bert", regularizer, **options)
    trainer.train()
    assert logs(trainer) == [None, 1, None, 1] and regularizer.updates == trainer.state.global_step
    plain, ours = trainer.state.log_history[:2]
    assert {key for key in ours if key not in plain} == {
        f"attn_reg/{name}" for name in ("regularized", "drop_rate", "probe_fallbacks", "probe_share")
    }


def test_a_compiled_training(tmp_path: Path) -> None:
    """Trainer's `torch_compile`: the same masks and losses as without it."""
    found = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        model = build("bert", 0.1, num_hidden_layers=1)
        trainer = trainer_of(tmp_path, "bert", ad_drop(), model, max_steps=1, logging_steps=1, **options)
        trainer.train()
        found.append(trainer.state.log_history[0])
    torch.compiler.reset()
    assert found[0]["attn_reg/drop_rate"] > 0.1
    for name in ("loss", "grad_norm", "attn_reg/drop_rate"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4)


def test_gold_labels_are_known_where_label_smoothing_takes_them(tmp_path: Path) -> None:
    masks = []
    for smoothing in (0.0, 0.1):
        regularizer = ad_drop(labels="gold", q=1.0)
        kept = On("on_optimizer_step", lambda *_, **__: masks.append([s.keep for s in regularizer.attached_sites]))  # noqa: B023
        options = {"max_steps": 1, "label_smoothing_factor": smoothing}
        trainer_of(tmp_path, "bert", regularizer, dropout=0.0, callbacks=(kept,), **options).train()
    assert all(torch.equal(x, y) for x, y in zip(*masks, strict=True))


def test_a_mask_that_the_callback_reads_off_the_batch_need_not_fit(tmp_path: Path) -> None:
    """An audio model's counts raw samples."""
    seen: list[set[str]] = []
    regularizer = ADDrop(cross_tuning="off", objective=lambda outputs, inputs: seen.append({*inputs}) or outputs.loss)
    trainer_of(tmp_path, "bert", regularizer, max_steps=1).train()
    assert seen and all("token_mask" in names and "token_mask_supplied" not in names for names in seen)


def test_one_epoch_of_cross_tuning_is_said_to_be_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 64}
    trainer_of(tmp_path, "bert", ADDrop(p=0.3, q=0.3), **options).train()
    assert sum("this training has one epoch" in message for message in caplog.messages) == 1


#: (head, model type, class) of the oracle; a head that answers with real numbers; the number of sites
HEADS = {
    "tokens": ("token", "bert", "BertForTokenClassification", 2),
    "answers": ("answer", "bert", "BertForQuestionAnswering", 2),
    "choices": ("choice", "bert", "BertForMultipleChoice", 2),
    "masked": ("masked", "roberta", "RobertaForMaskedLM", 2),
    "several": ("sequence", "bert", "BertForSequenceClassification", 2),
    "numbers": ("sequence", "bert", "BertForSequenceClassification", 2),
    "shared layers": ("sequence", "albert", "AlbertForSequenceClassification", 2),
    "disentangled": ("sequence", "deberta-v2", "DebertaV2ForSequenceClassification", 2),
    "relative": ("sequence", "xlnet", "XLNetForSequenceClassification", 2),
    "biased": ("sequence", "t5", "T5ForSequenceClassification", 6),
    "encoder_decoder": ("sequence", "bart", "BartForSequenceClassification", 6),
    "causal": ("sequence", "gpt2", "GPT2ForSequenceClassification", 2),
    "images": ("image", "vit", "ViTForImageClassification", 2),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", [ad_drop(), AttendOut(steps=2, sites="*")], ids=lambda method: method.name)
def test_every_head_trains(tmp_path: Path, head: str, method: Any) -> None:
    kind, *pair, sites = HEADS[head]
    model = tiny(kind, *pair)
    inputs = batch(kind, model)
    if head in ("several", "numbers"):
        kinds = {"several": "multi_label_classification", "numbers": "regression"}
        model.config.problem_type, inputs["labels"] = kinds[head], torch.eye(3)
    rows = [{name: value[i] for name, value in inputs.items()} for i in range(3)] * 4
    own = {"train_dataset": rows, "eval_dataset": rows[:5], "data_collator": default_collate}
    quiet = {"max_steps": 2, "per_device_train_batch_size": 3, "logging_steps": 2, "remove_unused_columns": False}
    trainer = trainer_of(tmp_path, "bert", method, model, own=own, rates_by_site=True, **quiet)
    if head == "images" and isinstance(method, AttendOut):
        with pytest.raises(ValueError, match="no embedding found for the encoder of ViTForImageClassification"):
            trainer.train()
        return
    trainer.train()
    log = trainer.state.log_history[0]
    rates = [value for key, value in log.items() if key.startswith("attn_reg/drop_") and "[" in key]
    assert len(rates) == sites and all(0 < rate < 1 for rate in rates) and log["loss"] > 0
    assert ("attn_reg/attacker_won" in log) == isinstance(method, AttendOut)
