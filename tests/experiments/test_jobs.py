"""Several runs at a time: order, the first failure, interruption, and what a stopped command does."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from threading import Event

import pytest

from attn_reg_plugin.experiments import runs_before as runs
from attn_reg_plugin.experiments.jobs import at_a_time


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_task_is_called_and_no_more_than_jobs_at_a_time(jobs: int) -> None:
    running, most, done = [], [], []

    def work(number: int) -> None:
        running.append(number)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(number)
        done.append(number)

    at_a_time([lambda stop, number=number: work(number) for number in range(4)], jobs)
    assert sorted(done) == [0, 1, 2, 3] and max(most) == min(jobs, 4)


def test_the_first_failure_stops_the_others_and_is_raised() -> None:
    stopped, late = [], []

    def fail(stop: Event) -> None:
        raise ValueError("the reason")

    def wait(stop: Event) -> None:
        stopped.append(stop.wait(10))
        raise RuntimeError("stopped")

    with pytest.raises(ValueError, match="the reason"):
        at_a_time([wait, fail, lambda stop: late.append(stop.wait(0.2))], 2)
    assert stopped == [True] and late in ([], [True])


def test_no_job_is_refused() -> None:
    with pytest.raises(ValueError, match="--jobs is 0, it must be at least 1"):
        at_a_time([], 0)


def test_a_stopped_command_ends_and_has_its_threads(tmp_path: Path) -> None:
    stop, code = Event(), "import os, time; print(os.environ['OMP_NUM_THREADS'], flush=True); time.sleep(60)"
    threading.Timer(1.0, stop.set).start()
    with runs.lock_folder(tmp_path) as lock, pytest.raises(runs.RunError, match="the training of x was stopped"):
        runs.execute([sys.executable, "-c", code], tmp_path / "log", "training of x", lock, stop=stop, threads=3)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "3\n"
    with runs.lock_folder(tmp_path):
        pass  # the command holds the lock no longer
