"""The executor: several runs at a time, each a process with a log that is followed, and a bar or lines that say so."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.terminal import say

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.runs import Run

#: seconds between two looks at a growing log, and at what another process works on
POLL, WAIT = 0.3, 1.0


class RunError(ValueError):
    """A run that cannot go on; `tail` holds the last lines of its log."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


class RunInUse(RunError):
    """Another process works in the run's folder."""


# -- a command --------------------------------------------------------------------------------------------------------


def start(command: Sequence[str], log: Path, environment: dict[str, str], lock: int) -> Any:
    """Start a command whose output is appended to a file, and which inherits the file descriptor `lock`."""
    # fairseq's own --log-file repeats every line once an epoch more, so its standard output is kept instead
    with log.open("ab") as output:
        how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "pass_fds": (lock,)}
        return subprocess.Popen(command, env=environment, **how)


def execute(
    command: Sequence[str],
    path: Path,
    what: str,
    lock: int,
    watch: Callable[[TrainingLog], None] | None = None,
    stop: Event | None = None,
    threads: int | None = None,
    device: str | None = None,
) -> None:
    """Run a command with its output appended to the file `path`, and follow the json records in it.

    Args:
        what: it is, for messages.
        lock: of the run's folder, which the command inherits.
        watch: gets the log whenever it has grown.
        stop: ends the command once it is set.
        threads, device: see `Run`.

    Raises:
        RunError: the command fails, or is stopped.
    """
    environment = os.environ | {"PYTHONUTF8": "1"} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    environment |= {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    path.touch()
    with path.open(encoding="utf-8", errors="replace") as follower:
        follower.seek(0, os.SEEK_END)
        process = start(command, path, environment, lock)
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


def _follow(process: Any, follower: IO[str], watch: Callable[[TrainingLog], None] | None, stop: Event | None) -> None:
    log, rest, ended = TrainingLog(), "", False
    while not ended and (stop is None or not stop.is_set()):
        try:
            process.wait(POLL)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        *lines, rest = (rest + follower.read()).split("\n")
        for line in lines:
            log.add(line)
        if lines and watch is not None:
            watch(log)


def tail_of(path: Path, count: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


# -- several at a time ------------------------------------------------------------------------------------------------


def at_a_time(tasks: Sequence[Callable[[Event], None]], jobs: int) -> None:
    """Call the tasks in their order, `jobs` of them at a time.

    Each waits for subprocesses of its own, so threads are enough. The first exception of a task, or an interruption
    from the keyboard, starts no further task, tells those that run to stop, waits for them and is raised.

    Args:
        tasks: each gets an event, and should end soon after that is set.
        jobs: at least 1.
    """
    stop = Event()
    if jobs == 1:  # in this thread, which is the one that the keyboard interrupts
        for task in tasks:
            task(stop)
        return
    with ThreadPoolExecutor(jobs) as pool:
        started = [pool.submit(task, stop) for task in tasks]
        try:
            for one in as_completed(started):
                one.result()
        except BaseException:
            stop.set()
            for one in started:
                one.cancel()
            raise


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

    @contextmanager
    def lent(self) -> Iterator[str | None]:
        """A name; None leaves a command all GPUs that there are."""
        name = self._free.get()
        try:
            yield name
        finally:
            self._free.put(name)


def has_gpu() -> bool:
    """Whether there is a GPU to train on."""
    import torch

    return torch.cuda.is_available()


def visible_gpus() -> list[str]:
    """The names of the GPUs, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()][: torch.cuda.device_count()]
    return [str(number) for number in range(torch.cuda.device_count())]


def carry_out(
    runs: Sequence[Run],
    console: Console,
    epochs: int,
    summary: Callable[[Any], str],
    jobs: int = 1,
    gpus: Sequence[str] = (),
) -> bool:
    """Do what is not done yet of some runs; False when interrupted from the keyboard.

    Runs that another process works on are left to it; if it ends before they are done, they are taken over.

    Args:
        runs: the commands of all are tried and the folders of all claimed first, so that what cannot work is refused
            before anything is written, and other settings before anything is trained.
        console: where progress is shown.
        epochs: of a run, at most.
        summary: what is said of a finished run.
        jobs: runs at a time, at least 1.
        gpus: with several jobs each run has one of these.

    Raises:
        ValueError: a command cannot work, or a folder holds a run with other settings.
        RunError: a run failed; the end of its log is shown.
    """
    from attn_reg_plugin.experiments.checks import check_runs  # imports fairseq

    check_runs(runs)
    for one in runs:
        one.claim()
    slots, left = Slots(gpus, jobs), list(runs)
    try:
        with Reporter(console, len(runs)) as reporter:
            if len(runs) > 1:
                reporter.say("Ctrl-C or a kill loses at most an epoch: the same command goes on where it ended")
            while left:
                elsewhere: list[Run] = []
                at_a_time([_task(one, reporter, epochs, summary, slots, elsewhere) for one in left], jobs)
                left = [one for one in left if one in elsewhere]
                while left and all(one.in_use() for one in left):
                    time.sleep(WAIT)
    except KeyboardInterrupt:
        say(console, "interrupted; the same command goes on from the last checkpoint")
        return False
    return True


def _task(
    one: Run, reporter: Reporter, epochs: int, summary: Callable[[Any], str], slots: Slots, elsewhere: list[Run]
) -> Callable[[Event], None]:
    """A function that does a run, or adds it to `elsewhere`."""

    def work(stop: Event) -> None:
        known = one.finished()
        progress = reporter.start(one.name, epochs)
        try:
            with slots.lent() as gpu:
                (one if gpu is None else replace(one, device=gpu)).carry_out(progress.watch, stop)
        except RunInUse as error:
            progress.set_aside(f"{str(error).partition(';')[0]}; left for the end")
            elsewhere.append(one)
            return
        except RunError as error:
            if error.tail:
                say(reporter.console, error.tail)
            raise
        progress.finish(summary(one) + (" (was done)" if known else ""))

    return work


# -- progress ---------------------------------------------------------------------------------------------------------


class Reporter:
    """Context manager; a bar over all runs and a bar for each at work, or lines where there is no terminal.

    Args:
        runs: how many there are.
    """

    def __init__(self, console: Console, runs: int = 1) -> None:
        self.console = console
        self._runs, self._done, self._lock = runs, 0, Lock()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Reporter:
        self._all = self._bars.add_task("all runs", total=self._runs, detail=self._count())
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, title: str, epochs: int) -> RunProgress:
        """A run of `epochs` epochs begins; several may go on at a time, in threads."""
        return RunProgress(self, self._bars, title, epochs)

    def finished(self, text: str) -> None:
        """Count and say a finished run."""
        with self._lock:
            self._done += 1
            self._bars.update(self._all, completed=self._done, detail=self._count())
            self.say(f"{text} [{self._count()}]")

    def say(self, text: str) -> None:
        """Print a line; on a terminal above the bars."""
        say(self.console, text)

    def _count(self) -> str:
        return f"{self._done} of {self._runs} runs"


class RunProgress:
    """How far a run is."""

    def __init__(self, reporter: Reporter, bars: Progress, title: str, epochs: int) -> None:
        self._reporter, self._bars, self._title, self._epochs = reporter, bars, title, epochs
        self._seen = 0
        self._task = bars.add_task(title, total=epochs, detail="starting")
        self._line("training")

    def watch(self, log: TrainingLog) -> None:
        """Show what the run's log says, which has grown."""
        detail = f"epoch {min(int(log.position) + 1, self._epochs)}/{self._epochs}"
        if log.validations:
            (epoch, _), figures = max(log.validations.items())
            loss = "nll_loss" if "nll_loss" in figures else "loss"
            text = f"valid {loss} {figures.get(loss, float('nan')):.3f}"
            detail += f", {text}"
            if len(log.validations) > self._seen:
                self._seen = len(log.validations)
                self._line(f"epoch {epoch}/{self._epochs}, {text}")
        self._bars.update(self._task, completed=log.position, detail=detail)

    def finish(self, summary: str) -> None:
        """The run is done: its bar gives way to a line."""
        self._bars.remove_task(self._task)
        self._reporter.finished(f"{self._title}: {summary}")

    def set_aside(self, reason: str) -> None:
        """The run is not done here and now."""
        self._bars.remove_task(self._task)
        self._reporter.say(f"{self._title}: {reason}")

    def _line(self, text: str) -> None:
        if not self._reporter.console.is_terminal:
            self._reporter.say(f"{self._title}: {text}")
