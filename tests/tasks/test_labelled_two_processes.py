"""A classifier and a tagger in two processes, under AD-DROP and AttendOut."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hf_folders import TOYS, make_encoder
from tests.processes import free_port
from tests.tasks.encoder_runs import encoder_arguments
from tests.tasks.fairseq_runs import Finished, Job, differing, read_checkpoint
from tests.tasks.test_two_processes import GLOO, assert_alike

pytestmark = pytest.mark.slow

#: nothing is drawn: no dropout, and every candidate is dropped; plain SGD, so that a step is the gradient
STILL = shlex.split("--dropout 0 --attention-dropout 0 --classifier-dropout 0 --optimizer sgd --lr 0.05 --clip-norm 0")
AD_DROP = shlex.split("--attn-reg ad_drop --ad-drop-p 0.4 --ad-drop-q 1 --ad-drop-cross-tuning off")


def processes(row: str, folder: Path, name: str, ranks: int, *flags: str) -> Finished:
    """A training by one or two processes; the first one's end."""
    data, encoder = folder / "data", folder / "encoder"
    if not data.exists():
        TOYS[row][0](data)
        make_encoder(encoder)
    port, jobs = f"tcp://127.0.0.1:{free_port()}", []
    for rank in range(ranks):
        several = [*GLOO, "--distributed-init-method", port, "--distributed-rank", str(rank)] if ranks > 1 else []
        arguments = encoder_arguments(row, data, encoder, folder / name, *flags, *several)
        jobs.append(Job("train", arguments, folder / f"{name}-{rank}.log"))
    first, *_ = [job.wait().check() for job in jobs]
    return first


def weights(folder: Path) -> dict[str, Any]:
    return dict(read_checkpoint(folder / "checkpoint_last.pt")["model"])


@pytest.mark.parametrize("row", ["rte", "wnut17"])
def test_two_processes_are_one_with_twice_the_batch(row: str, tmp_path: Path) -> None:
    """Words are counted over both, and so is the metric of the validation set, whose last batch is one's alone."""
    flags = [*STILL, *AD_DROP, "--max-epoch", "2"]
    two = processes(row, tmp_path, "two", 2, *flags)
    one = processes(row, tmp_path, "one", 1, *flags, "--update-freq", "2")
    assert len(two.lines()) == len(one.lines()) == 6
    for ours, theirs in zip(two.lines(), one.lines(), strict=True):
        assert ours["regularized"] == theirs["regularized"] == "1"
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), abs=2e-4)
    assert_alike(weights(tmp_path / "two"), weights(tmp_path / "one"))
    metric = f"valid_{TOYS[row][3]}"
    assert [line[metric] for line in two.lines("valid")] == [line[metric] for line in one.lines("valid")]


@pytest.mark.parametrize("row", ["rte", "wnut17"])
def test_attend_out_in_two_processes(row: str, tmp_path: Path) -> None:
    """Until the round ends the defender is a plain training of two processes; then both go on from the winner."""
    flags = ["--dropout", "0", "--attention-dropout", "0", "--classifier-dropout", "0", "--max-update", "5"]
    processes(row, tmp_path, "plain", 2, *flags, "--attn-reg", "none")
    game = ["--attn-reg", "attend_out", "--attend-out-steps"]
    processes(row, tmp_path, "game", 2, *flags, *game, "6")
    state = torch.load(tmp_path / "game" / "attn_reg_state_5.pt", weights_only=True)
    assert differing(dict(state["defender"]["model"]), weights(tmp_path / "plain")) == []
    assert differing(weights(tmp_path / "game"), weights(tmp_path / "plain")), "the attacker is another"
    finished = processes(row, tmp_path, "rounds", 2, *flags, *game, "2", "--max-update", "6")
    rounds = [line for line in finished.lines() if line.get("attacker_won") is not None]
    assert [line["num_updates"] for line in rounds] == ["2", "4", "6"]
    assert {float(line["attacker_won"]) for line in rounds} <= {0.0, 1.0}
    state = torch.load(tmp_path / "rounds" / "attn_reg_state_6.pt", weights_only=True)
    assert differing(dict(state["defender"]["model"]), weights(tmp_path / "rounds")) == []
