"""Several pieces of work at a time: each waits for subprocesses of its own, so threads are enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
