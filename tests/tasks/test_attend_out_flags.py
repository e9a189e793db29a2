"""AttendOut under fairseq's optimizers, schedules and precisions: it trains, and its defender is a plain training."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.tasks.fairseq_runs import Job, differing, read_checkpoint, train, train_arguments

pytestmark = pytest.mark.slow
#: no dropout, for the attacker's masks draw random numbers that a plain training does not
STILL = shlex.split("--dropout 0 --attention-dropout 0 --save-interval-updates 4 --max-tokens 60")
GAME = shlex.split("--attn-reg attend_out --attend-out-steps 5 --attn-sites *")
#: starts at a scale that a tiny model does not overflow
SCALE = "--fp16-init-scale 4"
FLAGS = [
    "--update-freq 2 --clip-norm 0.5",
    "--optimizer sgd --momentum 0.9 --lr 0.5 --clip-norm 1",
    "--optimizer nag --momentum 0.9 --lr 0.05 --lr-scheduler inverse_sqrt --warmup-updates 3",
    "--optimizer adafactor --update-freq 2",
    "--lr-scheduler inverse_sqrt --warmup-updates 3 --weight-decay 0.1",
    "--amp --clip-norm 0.5",
    f"--memory-efficient-fp16 --clip-norm 0.5 {SCALE}",
    f"--fp16 --fp16-no-flatten-grads --update-freq 2 {SCALE}",
]


def plain_and_defender(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The weights of a plain training and of a game's defender after four updates; fairseq writes fp32."""
    plain = read_checkpoint(folder / "plain" / "checkpoint_last.pt")["model"]
    defender = torch.load(folder / "game" / "attn_reg_state_4.pt", weights_only=True)["defender"]["model"]
    return [{name: value.float() for name, value in model.items()} for model in (plain, defender)]


@pytest.mark.parametrize("flags", FLAGS)
def test_the_defender_is_a_plain_training_and_the_attacker_learns(flags: str, corpus: Path, tmp_path: Path) -> None:
    chosen = [*STILL, *shlex.split(flags)]
    options = {"without": ["--optimizer"] if "--optimizer" in flags else []}
    train(corpus, tmp_path / "plain", *chosen, "--max-update", "4", **options).check()
    finished = train(corpus, tmp_path / "game", *chosen, *GAME, "--max-update", "12", **options).check()
    attacker = read_checkpoint(tmp_path / "game" / "checkpoint_1_4.pt")["model"]
    plain, defender = plain_and_defender(tmp_path)
    assert differing(dict(attacker), plain), "the attacker has masks"
    assert differing(defender, plain) == []
    lines = finished.lines()
    assert len(lines) == 12 and sum(line.get("attacker_won") is not None for line in lines) == 2
    assert float(lines[-1]["loss"]) < float(lines[0]["loss"]) - 0.2


def stay_on_the_cpu() -> None:
    """In the training's process: fairseq's trainer moves a number to the GPU when there was an overflow."""
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor


def test_neither_makes_an_update_that_overflows(corpus: Path, tmp_path: Path) -> None:
    flags = [*STILL, *shlex.split("--memory-efficient-fp16 --fp16-init-scale 262144 --max-update 4")]
    for name, game in (("plain", []), ("game", GAME)):
        arguments = train_arguments(corpus, tmp_path / name, *flags, *game)
        finished = Job("train", arguments, tmp_path / f"{name}.log", stay_on_the_cpu).wait().check()
        assert finished.output.count("gradient overflow detected") >= 2 and len(finished.lines()) == 4
    plain, defender = plain_and_defender(tmp_path)
    assert differing(defender, plain) == []
    state = torch.load(tmp_path / "game" / "attn_reg_state_4.pt", weights_only=True)
    assert [batch["update"] for batch in state["cache"]] == [0, 1, 2, 3]


def test_the_generators_size_is_logged_once(corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, *GAME, "--max-update", "6").check()
    said = re.findall(r"attend_out: generator of ([\d,]+) parameters, ([\d.]+) % of the model's", finished.output)
    assert len(said) == 1
    state = read_checkpoint(tmp_path / "checkpoint_last.pt")
    sidecar = torch.load(tmp_path / "attn_reg_state_6.pt", weights_only=True)
    ours = {tensor.data_ptr(): tensor.numel() for tensor in sidecar["generator"].values()}
    theirs = {tensor.data_ptr(): tensor.numel() for name, tensor in state["model"].items() if "version" not in name}
    assert said[0] == (f"{sum(ours.values()):,}", f"{100 * sum(ours.values()) / sum(theirs.values()):.1f}")


def test_a_round_longer_than_the_reward_subset_is_refused(corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, *GAME, "--attend-out-steps", "21")
    assert finished.status != 0
    assert "each of the 21 updates of a round" in finished.output and "'valid' has 20" in finished.output
