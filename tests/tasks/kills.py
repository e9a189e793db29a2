"""Trainings that are killed: at a random moment, or while a file is half written."""

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.tasks.fairseq_runs import Job, trained_state


def updates_of(job: Job) -> int:
    """How many updates a training has made since it was started."""
    return job.output().count("| train_inner |")


def kill_after(job: Job, updates: int, generator: random.Random) -> str:
    """Kill it somewhat later than that; what it had printed."""
    assert job.wait_until(lambda: updates_of(job) >= updates), job.output()[-2000:]
    time.sleep(generator.random() * 0.05)
    job.kill()
    assert job.process.exitcode == -signal.SIGKILL and "done training" not in job.output()
    return job.output()


def kill_while(how: Any, which: int, arguments: list[str], log: Path) -> None:
    """Run a training that dies by `how` at the `which`-th such file."""
    killed = Job("train", arguments, log, partial(how, which)).wait()
    assert killed.status == -signal.SIGKILL and killed.lines() and "done training" not in killed.output


def die_while_saving(which: int) -> None:
    """In the training's process: the power goes when the `which`-th file, state or checkpoint, is half written."""
    save, count = torch.save, [0]

    def save_half(state: object, file: Any, *args: object, **kwargs: object) -> None:
        count[0] += 1
        if count[0] == which:
            with open(file, "wb") if isinstance(file, Path) else file as stream:
                stream.write(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        save(state, file, *args, **kwargs)

    torch.save = save_half


def die_while_copying(which: int) -> None:
    """In the training's process: the power goes when the `which`-th checkpoint is half copied to the last one."""
    copy, count = shutil.copyfile, [0]

    def copy_half(source: str, target: str, **kwargs: object) -> object:
        count[0] += 1
        if count[0] == which:
            Path(target).write_bytes(Path(source).read_bytes()[:5000])
            os.kill(os.getpid(), signal.SIGKILL)
        return copy(source, target, **kwargs)

    shutil.copyfile = copy_half


def everything(folder: Path) -> dict[str, Any]:
    """Weights, optimizer and number of updates; the state of a method that keeps one beside the checkpoint."""
    state = trained_state(folder / "checkpoint_last.pt")
    beside = folder / f"attn_reg_state_{state['updates']}.pt"
    return {**state, "beside": torch.load(beside, weights_only=True) if beside.exists() else None}
