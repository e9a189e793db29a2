"""Commands of runs, forked from the tests' server: at toy size a training takes less time than its imports."""

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests.processes import start


class Forked:
    """A command that was forked, with what a run needs of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout or 0.0)
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()


def start_forked(command: Sequence[str], stdout: IO[bytes], **how: Any) -> Forked:
    """Fork a command `python -m MODULE ...` whose output is appended to a file; it has the server's environment."""
    return Forked(start(_carry_out, list(command[2:]), stdout.name))


def task_of(run: Any) -> Any:
    """The task that fairseq-train sets up for a run."""
    from fairseq import tasks

    from attn_reg_plugin.experiments.running.dry_run import parse_command
    from attn_reg_plugin.tasks.fairseq_settings import FAIRSEQ_SETTINGS

    args = parse_command(run.train_command(), "training")
    vars(args).update({f"attn_{name}": None for name, _ in FAIRSEQ_SETTINGS})  # which fairseq fills in later
    return tasks.setup_task(args)


def _carry_out(words: list[str], log: str) -> None:
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1), os.dup2(target, 2)
    sys.modules.pop(words[0], None)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def quick_starts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        forking = SimpleNamespace(**{**vars(subprocess), "Popen": start_forked})
        patch.setattr("attn_reg_plugin.experiments.running.executor.subprocess", forking)
        yield


def empty_corpus(data: Path) -> Path:
    """A prepared folder as far as its files' names go."""
    names = (f"{split}.en-ro.{side}.idx" for split in ("train", "test", "test1") for side in ("en", "ro"))
    others = ("bin/dict.en.txt", "bin/dict.ro.txt", "raw/test.ro", "raw/test1.ro")
    for name in (*(f"bin/{name}" for name in names), *others):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(b"TNTIDX\0\0" if name.endswith("idx") else b"")  # of a format not looked into
    return data
