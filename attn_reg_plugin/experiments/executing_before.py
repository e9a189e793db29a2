"""A command of a run, followed to its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import IO, Any

from attn_reg_plugin.experiments import starting
from attn_reg_plugin.experiments.training_log import TrainingLog

#: seconds between two looks at a growing log
POLL = 0.3


class RunError(ValueError):
    """A run that cannot go on; `tail` holds the last lines of its log."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


def execute(
    command: list[str],
    path: Path,
    what: str,
    lock: int,
    watch: Callable[[TrainingLog], None] | None = None,
    stop: Event | None = None,
    threads: int | None = None,
    device: str | None = None,
) -> None:
    """Run a command with its output appended to the file `path`, following the json records in it.

    Args:
        threads, device: see `Run`.

    Raises RunError when it fails, or is ended because `stop` is set.
    """
    # fairseq's own --log-file repeats every line once an epoch more, so its standard output is kept instead
    environment = os.environ | {"PYTHONUTF8": "1"} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    environment |= {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    path.touch()
    with path.open(encoding="utf-8", errors="replace") as follower:
        follower.seek(0, os.SEEK_END)
        process = starting.start(command, path, environment, lock)
        try:
            _follow(process, follower, watch, stop)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode and stop is not None and stop.is_set():
        raise RunError(f"the {what} was stopped; the same command continues it")
    if process.returncode:
        raise RunError(f"the {what} ended with exit status {process.returncode}; its log is {path}", tail_of(path))


def _follow(
    process: Any,
    follower: IO[str],
    watch: Callable[[TrainingLog], None] | None,
    stop: Event | None,
) -> None:
    log, rest = TrainingLog(), ""
    while stop is None or not stop.is_set():
        try:
            process.wait(POLL)
        except subprocess.TimeoutExpired:
            ended = False
        else:
            ended = True
        *lines, rest = (rest + follower.read()).split("\n")
        for line in lines:
            log.add(line)
        if lines and watch is not None:
            watch(log)
        if ended:
            return


def tail_of(path: Path, count: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
