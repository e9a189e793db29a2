"""Classifiers and taggers killed at a random moment end bit for bit where an undisturbed training does."""

from __future__ import annotations

import random
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hf_folders import TOYS, make_encoder
from tests.tasks.encoder_runs import encoder_arguments
from tests.tasks.fairseq_runs import Job, differing, trained_state
from tests.tasks.test_resume import updates_of

pytestmark = pytest.mark.slow

#: an epoch has 6 updates, a round of AttendOut 3, and a checkpoint is written every 4
UPDATES = 22
LONG = f"--max-update {UPDATES} --save-interval-updates 4 --keep-interval-updates 1 --num-workers 1".split()
METHODS = {
    "ad_drop": "--attn-reg ad_drop --ad-drop-p 0.4 --ad-drop-q 0.5 --ad-drop-cross-tuning epoch",
    "attend_out": "--attn-reg attend_out --attend-out-steps 3",
}


def everything(folder: Path) -> dict[str, Any]:
    """Weights and optimizer; of AttendOut the game too."""
    states = {path.name: torch.load(path, weights_only=True) for path in folder.glob(f"attn_reg_state_{UPDATES}.pt")}
    return {**trained_state(folder / "checkpoint_last.pt"), **states}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("row", ["rte", "wnut17"])
def test_a_kill_changes_nothing(row: str, method: str, tmp_path: Path) -> None:
    data, encoder = TOYS[row][0](tmp_path / "data"), make_encoder(tmp_path / "encoder")
    flags = [*shlex.split(METHODS[method]), *LONG]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    undisturbed = Job("train", encoder_arguments(row, data, encoder, whole, *flags), whole / "log").wait().check()
    assert len(undisturbed.lines()) == UPDATES and undisturbed.lines()[-1]["epoch"] == 4
    generator = random.Random(f"{row} {method}")
    job = Job("train", encoder_arguments(row, data, encoder, parts, *flags), parts / "killed.log")
    moment = generator.randint(7, 14)
    assert job.wait_until(lambda: updates_of(job) >= moment), job.output()[-2000:]
    time.sleep(generator.random() * 0.05)
    job.kill()
    assert job.process.exitcode == -signal.SIGKILL and "done training" not in job.output()
    finished = Job("train", encoder_arguments(row, data, encoder, parts, *flags), parts / "log").wait().check()
    assert len(finished.lines()) < UPDATES and "starts anew" not in finished.output
    assert len(everything(whole)) == (4 if method == "attend_out" else 3)
    assert differing(everything(parts), everything(whole)) == []


def test_patience_goes_on_waiting(tmp_path: Path) -> None:
    """Nothing gets better, so a training stops after the first validation and three more; its folder may be moved."""
    data, encoder = TOYS["rte"][0](tmp_path / "data"), make_encoder(tmp_path / "encoder")
    flags = shlex.split("--lr 1e-30 --weight-decay 0 --patience 3 --max-epoch 20")
    save = tmp_path / "save"
    job = Job("train", encoder_arguments("rte", data, encoder, save, *flags), save / "killed.log")
    assert job.wait_until(lambda: updates_of(job) >= 14), job.output()[-2000:]
    job.kill()
    save = save.rename(tmp_path / "moved")
    finished = Job("train", encoder_arguments("rte", data, encoder, save, *flags), save / "log").wait().check()
    assert "hasn't improved for last 3 runs" in finished.output
    assert trained_state(save / "checkpoint_last.pt")["updates"] == 4 * 6
    other = tmp_path / "other"
    start = ["--restore-file", str(save / "checkpoint_best.pt"), "--reset-optimizer", "--reset-dataloader"]
    start += ["--reset-lr-scheduler", "--reset-meters"]
    anew = Job("train", encoder_arguments("rte", data, encoder, other, *flags, *start), other / "log").wait().check()
    assert len(anew.lines("valid")) == 4, "a training that starts from another's weights waits anew"
