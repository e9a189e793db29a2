"""The executor: several runs at a time, each a process whose log is followed, and a bar or lines that say so."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attn_reg_plugin.experiments.running.training_log import TrainingLog
from attn_reg_plugin.files import FolderInUse
from attn_reg_plugin.terminal import say

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.running.run import Run

#: seconds between two looks at a growing log, and at what another process works on
POLL, WAIT = 0.3, 1.0


class RunError(ValueError):
    """A run that cannot go on; `tail` holds the last lines of its log."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


def execute(
    command: Sequence[str],
    path: Path,
    what: str,
    lock: int,
    watch: Callable[[TrainingLog], None] = lambda log: None,
    stop: Event | None = None,
    threads: int | None = None,
    device: str | None = None,
) -> None:
    """Run a command with its output appended to the file `path`; a RunError says that it failed or was stopped.

    Args:
        what: it is, for messages.
        lock: of the run's folder, which the command inherits.
        watch: gets the log, with the json records that the command has written, whenever that has grown.
        stop: ends the command once it is set.
        threads, device: see `Run`.
    """
    own, stop = {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": device}, stop or Event()
    environment = os.environ | {"PYTHONUTF8": "1"} | {name: str(one) for name, one in own.items() if one is not None}
    # fairseq's own --log-file repeats every line once an epoch more, so its standard output is kept instead
    with path.open("ab") as output, path.open(encoding="utf-8", errors="replace") as follower:
        follower.seek(0, os.SEEK_END)
        how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "pass_fds": (lock,)}
        process = subprocess.Popen(command, env=environment, **how)
        try:
            _follow(process, follower, watch, stop)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode and stop.is_set():
        raise RunError(f"the {what} was stopped; the same command continues it")
    if process.returncode:
        raise RunError(f"the {what} ended with exit status {process.returncode}; its log is {path}", tail_of(path))


def _follow(process: Any, follower: IO[str], watch: Callable[[TrainingLog], None], stop: Event) -> None:
    log, rest, ended = TrainingLog(), "", False
    while not ended and not stop.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
            ended = True
        *lines, rest = (rest + follower.read()).split("\n")
        for line in lines:
            log.add(line)
        if lines:
            watch(log)


def tail_of(path: Path) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])


def at_a_time(tasks: Sequence[Callable[[Event], None]], jobs: int) -> None:
    """Call the tasks in their order, `jobs` of them at a time; each gets an event, and should end soon after it is set.

    The first exception of a task, or an interruption from the keyboard, starts no further task, tells those that run to
    stop, waits for them and is raised. A task waits for subprocesses of its own, so threads are enough.
    """
    stop, failures = Event(), []

    def work(task: Callable[[Event], None]) -> None:
        try:
            if not stop.is_set():
                task(stop)
        except BaseException as error:
            failures.append(error)  # the first; others may fail because they are told to stop
            stop.set()  # before this thread takes the next task

    with ThreadPoolExecutor(jobs) as pool:
        try:
            wait([pool.submit(work, task) for task in tasks])
        except BaseException:  # from the keyboard
            stop.set()
            if not failures:
                raise
    if failures:
        raise failures[0]


class Slots:
    """GPUs lent to runs: each has one of its own as long as there are enough, else they are shared evenly.

    Args:
        names: of the GPUs, as CUDA_VISIBLE_DEVICES has them; without any, or with one job, nothing is lent.
        jobs: runs at a time.
    """

    def __init__(self, names: Sequence[str], jobs: int) -> None:
        self._free: SimpleQueue[str | None] = SimpleQueue()
        for number in range(jobs):
            self._free.put(names[number % len(names)] if names and jobs > 1 else None)

    @contextlib.contextmanager
    def lent(self) -> Iterator[str | None]:
        """A name; None leaves a command all GPUs that there are."""
        name = self._free.get()
        try:
            yield name
        finally:
            self._free.put(name)


def visible_gpus() -> list[str]:
    """The names of the GPUs, as CUDA_VISIBLE_DEVICES has them; none without a GPU to train on."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    return [name.strip() for name in names.split(",") if name.strip()][: torch.cuda.device_count()]


def carry_out(
    runs: Sequence[Run],
    console: Console,
    epochs: int,
    summary: Callable[[Any], str],
    jobs: int = 1,
    gpus: Sequence[str] = (),
    go_on: bool = False,
) -> bool:
    """Do what is not done yet of some runs; False when interrupted from the keyboard.

    Runs that another process works on are left to it; if it ends before they are done, they are taken over.

    Args:
        runs: claimed, or trials, which know their settings when they begin.
        epochs: of a run, at most.
        summary: what is said of a finished run.
        jobs: runs at a time; with several each has one of the `gpus`.
        go_on: after a run that failed, with the others.

    Raises:
        ValueError: a run failed (`RunError`), or says that none can work.
    """
    slots, left = Slots(gpus, jobs), list(runs)

    def work(one: Run, stop: Event) -> None:
        """Do a run, or add it to those that are done elsewhere."""
        known = one.finished()
        progress = reporter.begin(one.name, epochs, quiet=known)
        try:
            with slots.lent() as gpu:
                (one if gpu is None else replace(one, device=gpu)).carry_out(progress.watch, stop)
        except FolderInUse as error:
            progress.set_aside(f"{str(error).partition(';')[0]}; left for the end")
            elsewhere.append(one)
            return
        except RunError as error:
            if error.tail:
                say(console, error.tail)
            if not go_on:
                raise
            progress.set_aside(f"failed: {error}")
            return
        progress.finish(summary(one) + (" (was done)" if known else ""))

    try:
        with Reporter(console, len(runs)) as reporter:
            if len(runs) > 1:
                say(console, "Ctrl-C or a kill loses at most an epoch: the same command goes on where it ended")
            while left:
                elsewhere: list[Run] = []
                at_a_time([partial(work, one) for one in left], jobs)
                left = [one for one in left if one in elsewhere]
                while left and all(one.in_use() for one in left):
                    time.sleep(WAIT)
    except KeyboardInterrupt:
        say(console, "interrupted; the same command goes on from the last checkpoint")
        return False
    return True


class Reporter(Progress):
    """Says lines, and on a terminal shows a bar over all `runs` below them."""

    def __init__(self, console: Console, runs: int) -> None:
        columns = (TextColumn("all runs"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self.runs, self.done, self.whole = runs, itertools.count(1), self.add_task("", total=runs)

    def begin(self, title: str, epochs: int, quiet: bool = False) -> RunProgress:
        """A run of `epochs` epochs begins; several may go on at a time, in threads."""
        if not quiet:
            say(self.console, f"{title}: training")
        return RunProgress(self, title, epochs)


@dataclass(eq=False)
class RunProgress:
    """How far a run is; `reached` goes from 0 to 1."""

    reporter: Reporter
    title: str
    epochs: int
    reached: float = 0.0
    seen: int = 0

    def _move(self, reached: float) -> None:
        self.reporter.advance(self.reporter.whole, reached - self.reached)
        self.reached = reached

    def watch(self, log: TrainingLog) -> None:
        """Show what the run's log says, which has grown."""
        self._move(min(log.position / self.epochs, 1.0))
        if len(log.validations) > self.seen:
            self.seen = len(log.validations)
            (epoch, _), figures = max(log.validations.items())
            loss = "nll_loss" if "nll_loss" in figures else "loss"
            text = f"epoch {epoch}/{self.epochs}, valid {loss} {figures.get(loss, math.nan):.3f}"
            say(self.reporter.console, f"{self.title}: {text}")

    def finish(self, summary: str) -> None:
        """The run is done."""
        self._move(1.0)
        count = f"[{next(self.reporter.done)} of {self.reporter.runs} runs]"
        say(self.reporter.console, f"{self.title}: {summary} {count}")

    def set_aside(self, reason: str) -> None:
        """The run is not done here and now."""
        self._move(0.0)
        say(self.reporter.console, f"{self.title}: {reason}")
