"""Several processes on one comparison: every run is done once, by one at a time, and what a killed one left is done."""

import contextlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from rich.console import Console

from attn_reg_plugin.experiments.running import checks, executor
from attn_reg_plugin.experiments.running.executor import RunError, Slots, visible_gpus
from attn_reg_plugin.experiments.running.run import Run
from attn_reg_plugin.experiments.translation import TranslationComparison
from attn_reg_plugin.files import FolderInUse, lock_folder, write_json

#: says in a file of its own when it begins and ends; the end may have to wait
WORK = """
import os, sys, time
def say(word):
    with open(sys.argv[1], "a") as file:
        file.write(f"{word} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
say("begin"); time.sleep(0.1)
while os.path.exists(sys.argv[1] + ".wait"):
    time.sleep(0.02)
say("end")
"""


class ShortRun(Run):
    """A run whose training does nothing but say so."""

    def work(self, lock: int, watch: Any, stop: Event | None = None) -> None:
        if not self.result():
            command = [sys.executable, "-S", "-c", WORK, str(self.folder / "trace")]
            self.execute(command, "train.log", "x", lock, stop, watch)
            write_json(self.folder / "result.json", {"done": True})

    def finished(self) -> bool:
        return bool(self.result())


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ShortRun]:
    monkeypatch.setattr(executor, "WAIT", 0.05)
    monkeypatch.setattr(executor, "POLL", 0.05)
    names = [(method, seed) for seed in (1, 2) for method in ("plain", "ad_drop")]
    return [
        ShortRun(tmp_path / f"{method}-seed{seed}", {"method": method, "seed": seed, "flags": {}})
        for method, seed in names
    ]


def carry_out(all: list[ShortRun], **how: Any) -> str:
    """Do the runs and return what is said meanwhile."""
    said = io.StringIO()
    for one in all:
        one.claim()
    assert executor.carry_out(all, Console(file=said, width=200), 1, lambda one: "well", **how)
    return said.getvalue()


def traces(all: list[ShortRun]) -> list[list[str]]:
    return [[line.split()[0] for line in (one.folder / "trace").read_text().splitlines()] for one in all]


def test_two_processes_share_the_runs(planned: list[ShortRun]) -> None:
    other = multiprocessing.get_context("fork").Process(target=carry_out, args=(planned,))
    other.start()
    said = carry_out(planned)
    other.join(30)
    assert other.exitcode == 0
    assert traces(planned) == [["begin", "end"]] * 4, "each once"
    assert "[4 of 4 runs]" in said


def test_a_run_of_another_process_comes_last(planned: list[ShortRun]) -> None:
    for one in planned:
        one.claim()
    with contextlib.ExitStack() as elsewhere:
        elsewhere.enter_context(lock_folder(planned[0].folder))
        threading.Timer(1.0, elsewhere.close).start()
        said = carry_out(planned).splitlines()
    assert "plain, seed 1: another process is still working in" in said[2]
    assert said[-1] == "plain, seed 1: well [4 of 4 runs]" and traces(planned) == [["begin", "end"]] * 4


def test_what_a_killed_process_left_is_done_after_its_command_has_ended(planned: list[ShortRun]) -> None:
    first, wait = planned[0].folder / "trace", planned[0].folder / "trace.wait"
    wait.parent.mkdir()
    wait.touch()
    other = multiprocessing.get_context("fork").Process(target=carry_out, args=(planned,))
    other.start()
    while not first.exists():
        time.sleep(0.05)
    os.kill(other.pid, signal.SIGKILL)
    other.join(30)
    threading.Timer(1.0, wait.unlink).start()
    carry_out(planned, jobs=2)
    found = traces(planned)
    assert found[0] == ["begin", "end"] * 2, "its command goes on without it, and nobody else begins until it ends"
    assert found[1:] == [["begin", "end"]] * 3
    carry_out(planned)
    assert traces(planned) == found, "a finished run was run again"


def test_what_another_process_trained_with_other_settings_is_not_taken(planned: list[ShortRun]) -> None:
    """It may claim a folder that is claimed, as long as nothing has begun there."""
    mine = planned[0]
    other = replace(mine, settings={**mine.settings, "flags": {"lr": 1}})
    for one in (mine, other):
        one.claim()
    other.carry_out(print)
    with pytest.raises(RunError, match="holds a run with other settings"):
        mine.carry_out(print)


def test_each_run_has_a_gpu_of_its_own(planned: list[ShortRun]) -> None:
    carry_out(planned, jobs=2, gpus=["3", "5"])
    used = {(one.folder / "trace").read_text().splitlines()[0].split()[1] for one in planned}
    assert used == {"3", "5"}


def test_gpus_are_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(["a", "b"], jobs=3)
    with slots.lent() as first, slots.lent() as second, slots.lent() as third:
        assert [first, second, third] == ["a", "b", "a"]
    with Slots([], jobs=2).lent() as none, Slots(["a", "b"], jobs=1).lent() as alone:
        assert none is None and alone is None, "one job has all there are"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-4, 7")
    assert visible_gpus() == ["GPU-4", "7"]
    for how, flags in (
        ({}, {}),
        ({"jobs": 2}, {"distributed-world-size": 1}),
        ({"jobs": 2, "cpu": True}, {"cpu": True, "num-workers": 0}),
    ):
        assert TranslationComparison(data=Path("d"), out=Path("o"), **how).device_flags(alone="jobs" in how) == flags


def test_a_terminal_has_a_bar_over_all_runs(planned: list[ShortRun]) -> None:
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=120)
    for one in planned:
        one.claim()
    assert executor.carry_out(planned, console, 1, lambda one: "well", 4)
    assert "all runs" in said.getvalue() and "4 of 4 runs" in said.getvalue()
    assert "plain, seed 1: well" in said.getvalue()


def test_a_folder_is_waited_for_and_what_ends_the_work_in_it_is_said(tmp_path: Path) -> None:
    with contextlib.ExitStack() as elsewhere:
        elsewhere.enter_context(lock_folder(tmp_path))
        threading.Timer(0.3, elsewhere.close).start()
        with pytest.raises(FolderInUse, match="one inside"), lock_folder(tmp_path, wait=True):
            raise FolderInUse("one inside")


def test_two_threads_that_try_commands_leave_everything_audible() -> None:
    """A thread begins while the other is silent, and would put back what that one has put in place."""
    before, silent = (sys.stdout, sys.stderr, logging.root.manager.disable), threading.Barrier(2)

    def work(late: float) -> None:
        silent.wait(5)
        time.sleep(late)
        with checks._silence(io.StringIO()):
            time.sleep(0.2)

    threads = [threading.Thread(target=work, args=(late,)) for late in (0.0, 0.1)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (sys.stdout, sys.stderr, logging.root.manager.disable) == before
    finally:
        sys.stdout, sys.stderr = before[:2]
        logging.disable(before[2])
