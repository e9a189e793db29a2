"""Trainings killed at random moments end in the weights of one that nobody disturbed, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.tasks.fairseq_runs import AD_DROP, Job, differing, train, train_arguments, trained_state

pytestmark = pytest.mark.slow

UPDATES, INTERVAL = 44, 4
#: 16 updates an epoch, a checkpoint within epochs too, only the newest kept; batches are made by a worker process
LONG = f"--max-tokens 60 --max-update {UPDATES} --save-interval-updates {INTERVAL} --keep-interval-updates 1".split()
LONG += ["--num-workers", "1"]
SCHEDULES = ["epoch", "update:5"]


@pytest.fixture(scope="module", params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> list[str]:
    return [*AD_DROP, "--attn-sites", "*", "--ad-drop-cross-tuning", request.param, *LONG]


@pytest.fixture(scope="module")
def undisturbed(schedule: list[str], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finished = train(corpus, folder, *schedule).check()
    assert len(finished.lines()) == UPDATES and finished.lines()[-1]["epoch"] == 3
    assert {line["regularized"] for line in finished.lines()} == {"0", "1"}
    return folder / "checkpoint_last.pt"


def updates_of(job: Job) -> int:
    """How many updates a training has made since it was started."""
    return job.output().count("| train_inner |")


def test_three_kills_change_nothing(schedule: list[str], undisturbed: Path, corpus: Path, tmp_path: Path) -> None:
    generator = random.Random(3)
    killed_within_an_epoch = 0
    for attempt in range(3):
        job = Job("train", train_arguments(corpus, tmp_path, *schedule), tmp_path / f"{attempt}.log")
        moment = generator.randint(3, 13)
        assert job.wait_until(lambda job=job, moment=moment: updates_of(job) >= moment), job.output()[-2000:]
        time.sleep(generator.random() * 0.03)
        job.kill()
        output = job.output()
        assert job.process.exitcode == -signal.SIGKILL and "done training" not in output
        killed_within_an_epoch += output.rfind("Start iterating") > output.rfind("end of epoch")
    assert killed_within_an_epoch
    finished = train(corpus, tmp_path, *schedule).check()
    assert len(finished.lines()) < UPDATES, "it went on rather than beginning anew"
    assert differing(trained_state(tmp_path / "checkpoint_last.pt"), trained_state(undisturbed)) == []


def die_while_saving(which: int) -> None:
    """In the training's process: the power goes when the `which`-th checkpoint is half written."""
    save, count = torch.save, [0]

    def save_half(state: object, file: object, *args: object, **kwargs: object) -> None:
        count[0] += 1
        if count[0] == which:
            file.write(b"half a checkpoint")
            file.flush()
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


@pytest.mark.parametrize("die", [die_while_saving, die_while_copying])
def test_a_kill_while_a_checkpoint_is_written(
    die: Callable[[int], None], schedule: list[str], undisturbed: Path, corpus: Path, tmp_path: Path
) -> None:
    arguments = train_arguments(corpus, tmp_path, *schedule)
    killed = Job("train", arguments, tmp_path / "killed.log", partial(die, 3)).wait()
    assert killed.status == -signal.SIGKILL and 2 * INTERVAL < len(killed.lines()) < UPDATES
    train(corpus, tmp_path, *schedule).check()
    assert differing(trained_state(tmp_path / "checkpoint_last.pt"), trained_state(undisturbed)) == []
