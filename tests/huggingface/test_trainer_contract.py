"""Contract of the callback, method by method: nothing to do, acting, resuming, evaluation, two processes, detaching."""

import argparse
import copy
import json
import math
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from attn_reg_plugin.attention.selection import find_sites
from attn_reg_plugin.callbacks import special_ids_of
from attn_reg_plugin.regularizers import AttendOut, build
from attn_reg_plugin.regularizers.ad_drop.ad_drop import ADDrop
from attn_reg_plugin.regularizers.base.context import Supplied
from tests.backends.huggingface_models import build as build_model
from tests.comparing import differing
from tests.huggingface.trainers import On, ad_drop, examples, lone_and_game, print_of, trainer_of, weights
from tests.processes import check, kill_oneself, run_in_processes
from tests.regularizers import registered

#: alone and together
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    **registered.METHODS,
    "ad_drop+head_drop+layer_drop+attention_dropout+r_drop": (
        {"ad_drop": {"unit": "token", "cross_tuning": "epoch"}, "head_drop": {"p": 0.5, "turn": 3, "end": 10}},
        None,
    ),
}
IDLE = {name: idle for name, (_, idle) in METHODS.items() if idle is not None}


def history(trainer: Trainer) -> list[dict[str, Any]]:
    """The log without times and without what the callback added."""
    left_out = ("attn_reg/", "train_runtime", "eval_runtime")
    return [
        {key: value for key, value in entry.items() if not key.startswith(left_out) and not key.endswith("per_second")}
        for entry in trainer.state.log_history
    ]


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Unknown words are not special; Marian's language codes are, though its tokenizer does not say so."""
    told: list[Any] = []
    codes = {"supported_language_codes": [">>fra<<", ">>x<<"], "convert_tokens_to_ids": lambda names: [7, 3]}
    trainer = trainer_of(tmp_path, "marian", method := ad_drop(unit="token"), max_steps=1)
    trainer.processing_class = argparse.Namespace(all_special_ids=[0, 1, 3], unk_token_id=3, **codes)
    trainer.model.register_forward_pre_hook(lambda *_: told.append(method.supplied.special_ids))
    trainer.train()
    assert told and set(told) == {frozenset({0, 1, 7})}
    assert special_ids_of(argparse.Namespace(all_special_ids=[2, 1], unk_token_id=2, bos_token_id=2)) == {1, 2}, "OPT"
    processor = argparse.Namespace(tokenizer=trainer.processing_class)
    assert special_ids_of(processor) == special_ids_of(trainer.processing_class), "as vision-language models have it"


@pytest.mark.parametrize(
    ("method", "name", "options"),
    [(method, "bert", {}) for method in IDLE if method != "ad_drop"]
    + [("ad_drop", name, {}) for name in ("bert", "marian", "llama", "deberta_v3")]
    + [("ad_drop", "marian", {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1})],
)
def test_with_nothing_to_do_it_is_the_stock_trainer(
    tmp_path: Path, method: str, name: str, options: dict[str, Any]
) -> None:
    """Weights, log, random numbers and the optimizer's state, bit for bit."""
    runs = []
    for regularizer in (None, build(method, **IDLE[method])):
        trainer = trainer_of(tmp_path, name, regularizer, max_steps=8, **options)
        before = weights(trainer.model)
        trainer.train()
        state = [value for values in trainer.optimizer.state_dict()["state"].values() for value in values.values()]
        runs.append((weights(trainer.model), history(trainer), torch.get_rng_state(), state))
        assert not torch.equal(before, runs[-1][0])
    (stock, log, random, state), (ours, our_log, our_random, our_state) = runs
    assert torch.equal(stock, ours) and log == our_log and torch.equal(random, our_random)
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(state, our_state, strict=True))


def accuracy(predicted: Any) -> dict[str, float]:
    """Share of right classes, or of right first tokens of a generated translation."""
    guesses = predicted.predictions
    if guesses.dtype.kind == "f":
        return {"accuracy": float((guesses.argmax(-1) == predicted.label_ids).mean())}
    return {"first": float((guesses[:, 1] == predicted.label_ids[:, 0]).mean()), "ids": float(np.sum(guesses))}


#: of a Marian, whose translations are evaluated
GENERATING = {"predict_with_generate": True, "generation_max_length": 6, "generation_num_beams": 2}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "more"), [("bert", {}), ("marian", {"bf16": True, **GENERATING})])
def test_every_method_trains_says_what_it_did_and_evaluates_as_stock(
    tmp_path: Path, name: str, method: str, more: dict[str, Any]
) -> None:
    regularizer, own, states = build(method, **METHODS[method][0]), {"compute_metrics": accuracy}, []
    seen = On("on_evaluate", lambda *_, model, **__: states.append(copy.deepcopy(model.state_dict())))
    options = {"max_steps": 8, "logging_steps": 8, "eval_strategy": "steps", "eval_steps": 4, **more}
    trainer = trainer_of(tmp_path, name, regularizer, rates_by_site=True, callbacks=(seen,), own=own, **options)
    before, sites = weights(trainer.model), find_sites(trainer.model, "*")
    trainer.train()
    assert weights(trainer.model).isfinite().all() and not torch.equal(before, weights(trainer.model))

    (log,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    ours = {key.removeprefix("attn_reg/"): value for key, value in log.items() if key.startswith("attn_reg/")}
    assert 0 < ours["regularized"] <= 1 and all(math.isfinite(value) for value in log.values())
    rates = [ours[key] for key in (f"drop_{site.name}" for site in sites) if key in ours]
    assert all(0 <= rate <= 1 for rate in rates) and (not rates or 0 < ours["drop_rate"] < 0.9)
    assert not rates or ours["drop_rate"] == pytest.approx(sum(rates) / len(rates))
    assert len(rates) == len(sites) or METHODS[method][0].get("sites") != "*"
    if method == "ad_drop":
        assert 0 < ours["probe_share"] < 1 and ours["probe_fallbacks"] == 0
    if method == "attend_out":
        assert regularizer.state_dict()["rounds"] == 2
        assert 0 <= ours["attacker_won"] <= 1 and ours["attacker_score"] < 0

    evaluated = [entry for entry in history(trainer) if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [4, 8]
    for entry, state in zip(evaluated, states, strict=True):
        stock = trainer_of(tmp_path, name, None, own=own, **options)
        stock.model.load_state_dict(state)
        metrics, measured = stock.evaluate(), {key for key in entry if key.startswith("eval_")}
        assert len(measured) >= 2 and {key: entry[key] for key in measured} == {key: metrics[key] for key in measured}
    assert print_of(trainer.model) == print_of(stock.model), "nothing is left"


def test_what_is_saved_is_a_stock_model(tmp_path: Path) -> None:
    configs = []
    for regularizer in (None, ad_drop()):
        folder = tmp_path / str(regularizer is None)
        trainer = trainer_of(folder, "bert", regularizer, max_steps=2, save_strategy="steps", save_steps=2)
        trainer.train()
        trainer.model.save_pretrained(folder / "end")
        assert trainer.model.config._attn_implementation == "sdpa"
        saved = [json.loads((folder / part / "config.json").read_text()) for part in ("checkpoint-2", "end")]
        files = {path.name for path in (folder / "checkpoint-2").iterdir()} - {"attn_reg_ad_drop.pt"}
        configs.append((saved, files))
    assert configs[0] == configs[1]


def test_a_trainer_that_saves_in_a_way_of_its_own_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda *_: (tmp_path / "checkpoint-1").mkdir())
    regularizer = ad_drop()
    trainer_of(tmp_path, "bert", regularizer, max_steps=1, save_strategy="steps", save_steps=1).train()
    kept = torch.load(tmp_path / "checkpoint-1" / "attn_reg_ad_drop.pt", weights_only=True)
    assert kept == regularizer.state_dict()


def test_a_configuration_that_names_its_attention_is_saved(tmp_path: Path) -> None:
    """With `output_attentions` a configuration is only saved if its attention is called eager."""
    model = build_model("bert", attention="eager")
    model.config.output_attentions = True
    trainer = trainer_of(tmp_path, "bert", ad_drop(), model, max_steps=2, save_strategy="steps", save_steps=1)
    names = []
    trainer.add_callback(On("on_step_end", lambda *_, **__: names.append(model.config._attn_implementation)))
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "config.json").exists()
    assert names == ["attn_reg_eager"] * 2, "and training went on with ours"


class Broken(Exception):
    """Raised in the middle of things."""


def fail(*args: Any, **kwargs: Any) -> None:
    """Stand for any mistake."""
    raise Broken


def failing(event: str, update: int = 1, how: Any = fail) -> On:
    """Ends the training in an event, after so many updates or later."""
    return On(event, lambda args, state, *_, **__: how() if state.global_step >= update else None)


class Interrupted(ADDrop):
    """Stopped while the masks of the second update are made."""

    def before_forward(self, forward: Any) -> None:
        super().before_forward(forward)
        if self.updates:
            raise KeyboardInterrupt


class FailingData(list):
    """Cannot give its last examples."""

    def __getitem__(self, i: int) -> Any:
        return fail() if i >= 20 else super().__getitem__(i)


#: with short rounds
GAME = partial(AttendOut, steps=2, sites="*")
#: what makes a trainer fail
ENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "train_begin": (ad_drop, {"callbacks": (failing("on_train_begin", 0),)}),
    "mask": (lambda: Interrupted(p=0.5, q=0.5, cross_tuning="off"), {}),
    "step_end": (ad_drop, {"callbacks": (failing("on_step_end"),)}),
    "epoch_begin": (ad_drop, {"callbacks": (failing("on_epoch_begin"),)}),
    "before_optimizer": (GAME, {"callbacks": (failing("on_pre_optimizer_step"),)}),
    "data": (GAME, {"own": {"train_dataset": FailingData(examples("bert", 24))}}),
    "metrics": (ad_drop, {"own": {"compute_metrics": fail}, "eval_strategy": "steps", "eval_steps": 2}),
    "start": (ad_drop, {"own": {"compute_metrics": fail}, "eval_on_start": True}),
}


@pytest.mark.parametrize("end", ENDS)
def test_whatever_ends_a_training_leaves_nothing_behind(tmp_path: Path, end: str) -> None:
    make, options = ENDS[end]
    regularizer = make()
    trainer = trainer_of(tmp_path, "bert", regularizer, **options)
    before = print_of(trainer.model)
    own = [set(vars(owner)) for owner in (trainer, trainer.callback_handler)]
    with pytest.raises((Broken, KeyboardInterrupt)):
        trainer.train()
    assert print_of(trainer.model) == before
    assert not regularizer.attached_sites and regularizer.supplied == Supplied()
    for owner, names in zip((trainer, trainer.callback_handler), own, strict=True):
        assert not [name for name in set(vars(owner)) - names if callable(vars(owner)[name])]
    if isinstance(regularizer, AttendOut):
        assert regularizer.problem is None and regularizer.optimizer is None
        assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks
    with regularizer.attach(trainer.model):
        assert regularizer.attached_sites


#: an epoch is 6 updates (of one process), a round 4
OPTIONS: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "logging_steps": 3}
TWO: dict[str, Any] = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}


def run(folder: Path, method: str, save: int, stopped: int = 0, how: Any = fail, **options: Any) -> tuple[Any, ...]:
    """Train, or continue what is in `folder`; the weights, the random state, and the method's state."""
    regularizer = build(method, **{**METHODS[method][0], **options.pop("with", {})})
    callbacks = (failing("on_step_end", stopped, how),) if stopped else ()
    trainer = trainer_of(
        folder, "marian", regularizer, callbacks=callbacks, **{"save_steps": save, **OPTIONS, **options}
    )
    resumed = any(folder.glob("checkpoint-*")) and not stopped
    try:
        trainer.train(resume_from_checkpoint=resumed or None)
    except Broken:
        return ()
    return weights(trainer.model), torch.get_rng_state(), regularizer.state_dict()


BY_EPOCH = {"with": {"cross_tuning": "epoch"}}
SMOOTHED = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "bf16": True}
#: method, update that is saved, update that is stopped at, options: in an epoch, and between two
CASES = [(method, 5, 8, {}) for method in METHODS]
CASES += [("ad_drop", 5, 8, BY_EPOCH), ("ad_drop", 6, 7, BY_EPOCH)]
CASES += [("attend_out", 6, 7, {}), ("attend_out", 5, 8, SMOOTHED)]


@pytest.mark.parametrize(("method", "save", "stopped", "options"), CASES)
def test_stopped_and_resumed(tmp_path: Path, method: str, save: int, stopped: int, options: dict[str, Any]) -> None:
    undisturbed = run(tmp_path / "whole", method, save, **copy.deepcopy(options))
    assert run(tmp_path / "parts", method, save, stopped, **copy.deepcopy(options)) == ()
    assert (tmp_path / "parts" / f"checkpoint-{save}" / f"attn_reg_{method}.pt").exists()
    assert differing(run(tmp_path / "parts", method, save, **copy.deepcopy(options)), undisturbed) == []


def test_checkpoints_of_fairseq_are_still_read_afterwards(tmp_path: Path) -> None:
    """Trainer allows numpy's types while it continues, and then forgets that they were allowed before."""
    run(tmp_path / "parts", "ad_drop", 5, 8)
    run(tmp_path / "parts", "ad_drop", 5)
    torch.save({"args": argparse.Namespace(lr=0.1), "meters": np.arange(3.0)}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["args"].lr == 0.1


def test_another_folder_and_a_missing_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "first", "attend_out", 5, 8)
    regularizer = build("attend_out", **METHODS["attend_out"][0])
    trainer = trainer_of(tmp_path / "second", "marian", regularizer, **OPTIONS)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-5"))
    assert regularizer.state_dict()["rounds"] == 3 and "starts anew" not in caplog.text
    (tmp_path / "first" / "checkpoint-5" / "attn_reg_attend_out.pt").unlink()
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-5"))
    assert "attend_out starts anew from the checkpoint's weights" in caplog.text
    assert regularizer.state_dict()["rounds"] == 1 and regularizer.updates == 12


#: how a state is spoilt, and what is said of it; a game goes on at the first forward, when there are players
SPOILT: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "a list": ("ad_drop", lambda state: [1], "holds a list .*; move it away, and the method starts anew"),
    "other sites": (
        "attend_out",
        lambda state: {**state, "generator": {f"other.{key}": value for key, value in state["generator"].items()}},
        "the state of the method does not fit attend_out on this model",
    ),
    "a game without its baseline": (
        "attend_out",
        lambda state: {key: value for key, value in state.items() if key != "moving_baseline"},
        "does not fit attend_out on this model .*lacks 'moving_baseline'",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_state_that_cannot_be_continued_is_named(case: str, tmp_path: Path) -> None:
    method, spoil, said = SPOILT[case]
    run(tmp_path, method, 5, 8)
    path = tmp_path / "checkpoint-5" / f"attn_reg_{method}.pt"
    torch.save(spoil(torch.load(path, weights_only=True)), path)
    trainer = trainer_of(tmp_path, "marian", regularizer := build(method, **METHODS[method][0]), max_steps=6)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}.*{said}"):
        trainer.train(resume_from_checkpoint=True)
    assert not regularizer.attached_sites, "the model is given back"


def killed(folder: Path, method: str, save: int, update: int) -> None:
    """A training that ends as by `kill -9`."""
    run(folder, method, save, update, kill_oneself)


@pytest.mark.parametrize("method", ["ad_drop", "attend_out"])
def test_killed_and_resumed(tmp_path: Path, method: str) -> None:
    assert run_in_processes(tmp_path, killed, tmp_path / "parts", method, 5, 8) == [-signal.SIGKILL]
    continued = run(tmp_path / "parts", method, 5)
    assert differing(continued, run(tmp_path / "whole", method, 5)) == []


def in_parts(folder: Path, method: str) -> None:
    """Run as a process of two: the whole training, then the same training stopped and resumed."""
    options = {**TWO, "ddp_find_unused_parameters": build(method, **METHODS[method][0]).leaves_unused() or None}
    ends = [run(folder / "whole", method, 5, **options)]
    run(folder / "parts", method, 5, 7, **options)
    ends.append(run(folder / "parts", method, 5, **options))
    torch.save(ends, folder / f"ends_{torch.distributed.get_rank()}.pt")


@pytest.mark.parametrize("method", ["ad_drop", "attend_out", "layer_drop"])
def test_two_processes_agree_and_resume(tmp_path: Path, method: str) -> None:
    check(tmp_path, run_in_processes(tmp_path, in_parts, tmp_path, method, processes=2))
    ends = [torch.load(tmp_path / f"ends_{rank}.pt") for rank in range(2)]
    assert torch.equal(ends[0][0][0], ends[1][0][0]), "both processes have the same model"
    for rank in range(2):
        assert differing(ends[rank][0][:2], ends[rank][1][:2]) == [], f"process {rank} continued exactly"
    if method == "attend_out":
        players = [end[0][2] for end in ends]
        assert players[0]["rounds"] == 3
        assert differing(players[0]["defender"]["model"], players[1]["defender"]["model"]) == []
        assert differing(players[0]["generator"], players[1]["generator"]) == []
        assert differing(ends[0][0][2], ends[0][1][2]) == []


def whole_batches(folder: Path, size: int) -> None:
    """Every candidate dropped and no dropout: nothing is left to chance."""
    options = {"max_steps": 4, "per_device_train_batch_size": size, "logging_steps": 2, "learning_rate": 0.05}
    # Trainer multiplies the losses of models like BERT by the processes, unless it is told not to count tokens
    options |= {"optim": "sgd", "max_grad_norm": 0.0, "average_tokens_across_devices": False}
    trainer = trainer_of(folder, "bert", ad_drop(q=1.0, p=0.4), dropout=0.0, rates_by_site=True, **options)
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save((weights(trainer.model), trainer.state.log_history), folder / f"batches_of_{size}.pt")


def test_two_halves_are_one_whole(tmp_path: Path) -> None:
    check(tmp_path, run_in_processes(tmp_path, whole_batches, tmp_path, 2, processes=2))
    whole_batches(tmp_path, 4)
    (halves, log), (whole, expected) = (torch.load(tmp_path / f"batches_of_{size}.pt") for size in (2, 4))
    torch.testing.assert_close(halves, whole, rtol=1e-5, atol=1e-6)
    assert log[0]["loss"] == pytest.approx(expected[0]["loss"], abs=1e-5)
    # rows of padding count, and a half is padded less
    for key in (f"attn_reg/drop_encoder.self[{layer}]" for layer in range(2)):
        assert log[0][key] == pytest.approx(expected[0][key], abs=0.01)


def defended(folder: Path) -> None:
    """A lone trainer's model, and the defender beside an attacker, in one of two processes."""
    lone, _, defender = lone_and_game(folder, "marian", max_steps=4, gradient_accumulation_steps=2, **TWO)
    torch.save((lone.model.state_dict(), defender["model"]), folder / f"{torch.distributed.get_rank()}.pt")


def test_the_defender_in_two_processes_is_a_lone_trainers(tmp_path: Path) -> None:
    check(tmp_path, run_in_processes(tmp_path, defended, tmp_path, processes=2))
    for rank in range(2):
        torch.testing.assert_close(*torch.load(tmp_path / f"{rank}.pt"), rtol=1e-5, atol=1e-6)


def test_epochs_are_the_trainers_after_another_batch_size(tmp_path: Path) -> None:
    for size, epochs, resumed in ((8, 1, None), (2, 3, True)):
        method, told = ad_drop(), {}
        each = On("on_step_begin", lambda _, at, *__, of=method, to=told, **___: to.update({at.global_step: of.epoch}))
        how = {"max_steps": -1, "num_train_epochs": epochs, "per_device_train_batch_size": size}
        trainer = trainer_of(tmp_path, "bert", method, callbacks=(each,), save_strategy="epoch", **how)
        trainer.train(resume_from_checkpoint=resumed)
    assert told and told == {update: update // (trainer.state.max_steps // 3) + 1 for update in told}
