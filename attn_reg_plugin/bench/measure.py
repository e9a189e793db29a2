"""Measuring steps: seconds in interleaved repeats, and peak memory.

Peak memory is the most that is allocated at once, what stays between steps (parameters, optimizer
state, batch) included. On CUDA the allocator counts it. On CPU the profiler reports every allocation and release of
the allocator, and their running sum is exact and the same in every run, which resident set sizes are not.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from attn_reg_plugin.bench.families import Workload
from attn_reg_plugin.bench.naive_ad_drop import naive_forward
from attn_reg_plugin.bench.rows import Row
from attn_reg_plugin.bench.settings import Settings
from attn_reg_plugin.regularizers import build

#: elapsed time, or the process's own CPU time, which hardly depends on other load
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
#: updates of the training that a measured step is the beginning of, for schedules that stretch over it
_LONG = 1_000_000
#: seconds by repeat
Seconds = dict[int, float]
#: is told what is done next
Say = Callable[[str], object]
#: a step, ready to be run; attached to the model in a context
Step = Callable[[], object]


@contextmanager
def _training(row: Row, work: Workload, light: bool) -> Iterator[Step]:
    """Forward, loss, backward, Adam, as often as the row says; of AttendOut a round of both players and its end."""
    work.model.train()
    if row.method is None:
        yield lambda: [work.update(work.loss(work.model, work.batch).loss) for _ in range(row.updates)]
        return
    options = {**row.options, **(row.memory_options if light else {})}
    options |= {"problem": work, "optimizer": work.optimizer} if row.kind == "round" else {}
    regularizer = build(row.method, **options)
    with regularizer.attach(work.model):
        if row.kind == "round":
            regularizer.start(work.model)  # generator and defender are made before a step
        else:
            regularizer.bind(work)
        regularizer.begin_training(_LONG)
        regularizer.begin_epoch(row.epoch)

        def step() -> None:
            for _ in range(row.updates):
                work.update(regularizer.loss(lambda batch: work.loss(work.model, batch).loss, work.batch))
                regularizer.end_update()

        if row.primed or (light and row.kind == "round"):  # the generator's Adam is made at the first round's end
            step()
        yield step


@contextmanager
def _naive(row: Row, work: Workload, light: bool) -> Iterator[Step]:
    """A step of the paper's form of AD-DROP."""
    work.model.train()
    yield lambda: work.update(work.loss_of(naive_forward(work.model, work.inputs, work.objective)[0], work.targets))


#: kind of row -> a context in which a step of it can be run; whether it is light, for its memory
STEPS: dict[str, Callable[[Row, Workload, bool], AbstractContextManager[Step]]] = {
    "training": _training,
    "round": _training,
    "naive": _naive,
}

# -- seconds ----------------------------------------------------------------------------------------------------------


def measure_seconds(rows: Sequence[Row], work: Workload, settings: Settings, say: Say = print) -> dict[str, Seconds]:
    """Seconds per update of every row, by its name and the repeat; rows of kind `mean` have none.

    In each repeat each row is run once, rare ones in repeat 0 only and not to warm up; each repeat begins with another
    row. The model goes on learning.
    """
    measured = [row for row in rows if row.kind in STEPS]
    seconds: dict[str, Seconds] = {row.name: {} for row in measured}
    for repeat in range(-settings.warmup, settings.repeats):
        first = repeat % len(measured)
        for row in (*measured[first:], *measured[:first]):
            if row.rare and repeat != 0:
                continue
            said = f"repeat {repeat + 1} of {settings.repeats}" if repeat >= 0 else "warming up"
            say(f"{row.title.strip()}: {said}")
            took = _seconds_of_step(row, work, CLOCKS[settings.clock])
            if repeat >= 0:
                seconds[row.name][repeat] = took
    return seconds


def _seconds_of_step(row: Row, work: Workload, clock: Callable[[], float]) -> float:
    """Seconds of a step per update; attaching the regularizer is not counted, garbage is collected before."""
    with STEPS[row.kind](row, work, False) as step:
        gc.collect()
        _synchronize()
        start = clock()
        step()
        _synchronize()
        return (clock() - start) / row.updates


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- memory -----------------------------------------------------------------------------------------------------------


def measure_peaks(rows: Sequence[Row], work: Workload, say: Say = print) -> dict[str, int]:
    """The most bytes that are allocated at once, of every row, by its name; rows of kind `mean` have none.

    It is measured from before the method is attached, so that a copy of the model and its optimizer count.
    """
    peaks = {}
    for row in (row for row in rows if row.kind in STEPS):
        say(f"{row.title.strip()}: memory")
        gc.collect()
        peaks[row.name] = (_peak_on_gpu if work.targets.is_cuda else _peak)(row, work)
    return peaks


def _peak_on_gpu(row: Row, work: Workload) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with STEPS[row.kind](row, work, True) as step:
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def _peak(row: Row, work: Workload) -> int:
    before = work.resident_bytes()
    profiling = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr(), profiling as profiler, STEPS[row.kind](row, work, True) as step:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return before + max(itertools.accumulate(event.nbytes() for event in events))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler announces itself on the process's stderr, whatever its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
