"""A training that was killed and resumed ends in the weights of one that was not; alone and in two processes."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from attn_reg_plugin.regularizers import (
    AttendOut,
    AttentionLayerDrop,
    Combination,
    Regularizer,
    ScheduledDropout,
    build,
)
from tests.huggingface.processes import check, kill_oneself, run_in_processes
from tests.huggingface.trainers import ad_drop, trainer_of, weights

METHODS = {
    "ad_drop": lambda: ad_drop(cross_tuning="update:3"),
    "ad_drop_epoch": lambda: ad_drop(cross_tuning="epoch"),
    "ad_drop_kept": lambda: ad_drop(cross_tuning="epoch", probe="kept"),
    "ad_drop_kept_in_files": lambda: ad_drop(probe="kept", store_gb=1e-9),
    "attend_out": lambda: AttendOut(steps=4, sites="*", generator_lr=0.05),
    "attention_layer_drop": lambda: AttentionLayerDrop(p=0.5, sites="*"),
    "scheduled_dropout": lambda: ScheduledDropout(schedule="drop *: 0:0.7 12:0", sites="*"),
    "attention_dropout": lambda: build("attention_dropout", p=0.4, p_by_site="decoder: 0.2", sites="*"),
    "head_drop": lambda: build("head_drop", p=0.5, turn=0.3, end=1, unit="progress", sites="*"),
    "layer_drop": lambda: build("layer_drop", p=0.5, sites="*"),
    "mixout+child_tuning+r_drop": lambda: build("mixout+child_tuning+r_drop"),
    "on the same sites": lambda: build(
        "ad_drop+head_drop+layer_drop+attention_dropout+r_drop",
        ad_drop={"probe": "kept"},
        head_drop={"p": 0.5, "turn": 3, "end": 10},
    ),
    "driven+hidden_cut": lambda: build("child_tuning+hidden_cut", child_tuning={"mode": "driven"}),
}
#: an epoch is 6 updates (of one process), a round 4
OPTIONS: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "logging_steps": 3}


class Stopped(Exception):
    """Instead of a kill."""


class Stop(TrainerCallback):
    """Ends the training at an update."""

    def __init__(self, update: int, how: Any) -> None:
        self.update, self.how = update, how

    def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        if state.global_step == self.update:
            self.how()


def stop() -> None:
    raise Stopped


def run(folder: Path, method: str, save: int, stopped: int = 0, how: Any = stop, **options: Any) -> tuple[Any, ...]:
    """Train, or continue what is in `folder`; the weights, the random state, and the method's state."""
    regularizer: Regularizer = METHODS[method]()
    callbacks = (Stop(stopped, how),) if stopped else ()
    options = {"name": "marian", "save_steps": save, **OPTIONS, **options}
    trainer = trainer_of(folder, options.pop("name"), regularizer, callbacks=callbacks, **options)
    resumed = any(folder.glob("checkpoint-*")) and not stopped
    try:
        trainer.train(resume_from_checkpoint=resumed or None)
    except Stopped:
        return ()
    return weights(trainer.model), torch.get_rng_state(), regularizer.state_dict()


def same(first: Any, second: Any) -> bool:
    """Equal, down to the bits of tensors."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return set(first) == set(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


CASES = [(method, 5, 8) for method in METHODS] + [(method, 6, 7) for method in ("ad_drop_epoch", "attend_out")]


@pytest.mark.parametrize(("method", "save", "stopped"), CASES)
def test_stopped_and_resumed(tmp_path: Path, method: str, save: int, stopped: int) -> None:
    """In an epoch, and between two."""
    undisturbed = run(tmp_path / "whole", method, save)
    assert run(tmp_path / "parts", method, save, stopped) == ()
    assert (tmp_path / "parts" / f"checkpoint-{save}" / f"attn_reg_{METHODS[method]().name}.pt").exists()
    assert same(run(tmp_path / "parts", method, save), undisturbed)


def test_checkpoints_of_fairseq_are_still_read_afterwards(tmp_path: Path) -> None:
    """Trainer allows numpy's types while it continues, and then forgets that they were allowed before."""
    run(tmp_path / "parts", "ad_drop", 5, 8)
    run(tmp_path / "parts", "ad_drop", 5)
    torch.save({"args": argparse.Namespace(lr=0.1), "meters": np.arange(3.0)}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["args"].lr == 0.1


def test_accumulated_and_smoothed(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "bf16": True}
    undisturbed = run(tmp_path / "whole", "attend_out", 5, **options)
    run(tmp_path / "parts", "attend_out", 5, 8, **options)
    assert same(run(tmp_path / "parts", "attend_out", 5, **options), undisturbed)


def test_another_folder_and_a_missing_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "first", "attend_out", 5, 8)
    game = METHODS["attend_out"]()
    trainer = trainer_of(tmp_path / "second", "marian", game, **OPTIONS)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-5"))
    assert game.state_dict()["rounds"] == 3 and "starts anew" not in caplog.text
    (tmp_path / "first" / "checkpoint-5" / "attn_reg_attend_out.pt").unlink()
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-5"))
    assert "attend_out starts anew from the checkpoint's weights" in caplog.text
    assert game.state_dict()["rounds"] == 1 and game.updates == 12


def test_a_state_that_is_no_tensors_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "ad_drop", 5, 8)
    torch.save({"epoch": Path("x")}, tmp_path / "checkpoint-5" / "attn_reg_ad_drop.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        run(tmp_path, "ad_drop", 5)


def killed(folder: Path, method: str, save: int, update: int) -> None:
    run(folder, method, save, update, kill_oneself)


def resumed(folder: Path, method: str, save: int) -> None:
    torch.save(run(folder, method, save), folder / "end.pt")


@pytest.mark.parametrize("method", ["ad_drop", "attend_out"])
def test_killed_and_resumed(tmp_path: Path, method: str) -> None:
    assert run_in_processes(tmp_path, killed, tmp_path / "parts", method, 5, 8) == [-signal.SIGKILL]
    check(tmp_path, run_in_processes(tmp_path, resumed, tmp_path / "parts", method, 5))
    undisturbed = run(tmp_path / "whole", method, 5)
    assert same(torch.load(tmp_path / "parts" / "end.pt"), undisturbed)


# -- two processes --------------------------------------------------------------------------------------------------

TWO: dict[str, Any] = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}


def in_parts(folder: Path, method: str) -> None:
    """One of two processes: the whole training, then the same one stopped and resumed."""
    options = {**TWO, "ddp_find_unused_parameters": METHODS[method]().leaves_unused() or None}
    ends = [run(folder / "whole", method, 5, **options)]
    run(folder / "parts", method, 5, 7, **options)
    ends.append(run(folder / "parts", method, 5, **options))
    torch.save(ends, folder / f"ends_{torch.distributed.get_rank()}.pt")


@pytest.mark.parametrize("method", ["ad_drop", "ad_drop_kept", "attend_out", "layer_drop"])
def test_two_processes_agree_and_resume(tmp_path: Path, method: str) -> None:
    check(tmp_path, run_in_processes(tmp_path, in_parts, tmp_path, method, processes=2))
    ends = [torch.load(tmp_path / f"ends_{rank}.pt") for rank in range(2)]
    assert torch.equal(ends[0][0][0], ends[1][0][0]), "both processes have the same model"
    for rank in range(2):
        assert same(ends[rank][0][:2], ends[rank][1][:2]), f"process {rank} continued exactly"
    if method == "attend_out":
        players = [end[0][2] for end in ends]
        assert players[0]["rounds"] == 3
        assert same(players[0]["defender"]["model"], players[1]["defender"]["model"])
        assert same(players[0]["generator"], players[1]["generator"])
        assert same(ends[0][0][2], ends[0][1][2])


def whole_batches(folder: Path, size: int) -> None:
    """Every candidate dropped and no dropout: nothing is left to chance, but for masks that all processes share."""
    shared = build("mixout+child_tuning", mixout={"weights": "all"})
    regularizer = Combination([*shared.parts, ad_drop(q=1.0, p=0.4)])
    options = {"max_steps": 4, "per_device_train_batch_size": size, "logging_steps": 2, "learning_rate": 0.05}
    # Trainer multiplies the losses of models like BERT by the processes, unless it is told not to count tokens
    options |= {"optim": "sgd", "max_grad_norm": 0.0, "average_tokens_across_devices": False}
    trainer = trainer_of(folder, "bert", regularizer, dropout=0.0, **options)
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save((weights(trainer.model), trainer.state.log_history), folder / f"batches_of_{size}.pt")


def test_two_halves_are_one_whole(tmp_path: Path) -> None:
    check(tmp_path, run_in_processes(tmp_path, whole_batches, tmp_path, 2, processes=2))
    check(tmp_path, run_in_processes(tmp_path, whole_batches, tmp_path, 4))
    (halves, log), (whole, expected) = (torch.load(tmp_path / f"batches_of_{size}.pt") for size in (2, 4))
    torch.testing.assert_close(halves, whole, rtol=1e-5, atol=1e-6)
    assert log[0]["loss"] == pytest.approx(expected[0]["loss"], abs=1e-5)
    for key in ("drop_encoder.self[0]", "drop_encoder.self[1]"):  # rows of padding count, and a half is padded less
        assert log[0][key] == pytest.approx(expected[0][key], abs=0.01)


def defended(folder: Path) -> None:
    """A lone trainer's model, and the defender beside an attacker, in one of two processes."""
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, **TWO}
    game = AttendOut(steps=8, sites="*")
    trained = []
    for regularizer in (None, game):
        trainer = trainer_of(folder, "marian", regularizer, dropout=0.0, **options)
        trainer.train()
        trained.append(trainer.model.state_dict())
    torch.save((trained[0], game.state_dict()["defender"]["model"]), folder / f"{torch.distributed.get_rank()}.pt")


def test_the_defender_in_two_processes_is_a_lone_trainers(tmp_path: Path) -> None:
    check(tmp_path, run_in_processes(tmp_path, defended, tmp_path, processes=2))
    for rank in range(2):
        torch.testing.assert_close(*torch.load(tmp_path / f"{rank}.pt"), rtol=1e-5, atol=1e-6)
