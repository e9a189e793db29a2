"""Several pieces of work at a time: each waits for subprocesses of its own, so threads are enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event


def at_a_time(tasks: Sequence[Callable[[Event], None]], jobs: int) -> None:
    """Call the tasks in their order, `jobs` of them at a time.

    The first exception of a task, or an interruption from the keyboard, starts no further task, tells those that run
    to stop, waits for them and is raised.

    Args:
        tasks: each gets an event, and should end soon after that is set.
        jobs: at least 1.

    Raises:
        ValueError: `jobs` is below 1.
    """
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}, it must be at least 1")
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
    """GPUs lent to pieces of work, one to each, its own as long as there are enough.

    Args:
        names: of the GPUs, as CUDA_VISIBLE_DEVICES has them; without any, or with one job, nothing is lent.
        jobs: pieces of work at a time; with more of these than GPUs, GPUs are shared evenly.
    """

    def __init__(self, names: Sequence[str], jobs: int) -> None:
        self._free: SimpleQueue[str | None] = SimpleQueue()
        for number in range(jobs):
            self._free.put(names[number % len(names)] if names and jobs > 1 else None)

    @contextmanager
    def lent(self) -> Iterator[str | None]:
        """One of them; None leaves a command all that there are."""
        name = self._free.get()
        try:
            yield name
        finally:
            self._free.put(name)


def visible_gpus() -> list[str]:
    """The names of the GPUs, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()][: torch.cuda.device_count()]
    return [str(number) for number in range(torch.cuda.device_count())]
