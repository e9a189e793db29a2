"""Measuring steps: seconds in interleaved repeats, and peak memory.

Peak memory is the most that is allocated at once, what stays between steps (parameters, optimizer
state, batch) included. On CUDA the allocator counts it. On CPU the profiler reports every allocation and release of
the allocator, and their running sum is exact and the same in every run, which resident set sizes are not.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import timer

from attn_reg_plugin.bench.families import Workload
from attn_reg_plugin.bench.rows import Row
from attn_reg_plugin.bench.settings import Settings
from attn_reg_plugin.regularizers import AttendOut, build

#: elapsed time once the device is done, or the process's own CPU time, which hardly depends on other load
CLOCKS: dict[str, Callable[[], float]] = {"wall": timer, "cpu": time.process_time}
#: updates of the training that a measured step is the beginning of, for schedules that stretch over it
_LONG = 1_000_000
#: is told what is done next
Say = Callable[[str], object]


@contextmanager
def step_of(row: Row, work: Workload) -> Iterator[Callable[[], object]]:
    """Attach the row's method, and yield a step: forward, loss, backward and Adam, as often as the row has updates.

    A round of AttendOut ends with its last update; generator and defender are made before it begins.
    """
    work.model.train()
    if row.method is None:
        forward = work.naive_forward if row.naive else work.model
        yield lambda: [work.update(work.loss_of(forward(**work.inputs), work.targets)) for _ in range(row.updates)]
        return
    regularizer = build(row.method, **row.options)
    with regularizer.attach(work.model):
        regularizer.bind(work)
        regularizer.begin_training(_LONG)
        regularizer.begin_epoch(row.epoch)
        if isinstance(regularizer, AttendOut):
            regularizer.start(work.model)

        def step() -> None:
            for _ in range(row.updates):
                work.update(regularizer.loss(lambda batch: work.loss(work.model, batch).loss, work.batch))
                regularizer.end_update()

        yield step


def measure_seconds(rows: Sequence[Row], work: Workload, settings: Settings, say: Say = print) -> pd.DataFrame:
    """Seconds per update: a line a repeat, a column for every row that is no mean.

    In each repeat each row is run once, rare ones in repeat 0 only and not to warm up; each repeat begins with another
    row. The model goes on learning. Attaching a method is not counted, nor is a plain epoch's first step, in which the
    probe is tried; garbage is collected before.
    """
    measured, clock = [row for row in rows if row.of is None], CLOCKS[settings.clock]
    repeats = range(-settings.warmup, settings.repeats)
    seconds = pd.DataFrame(index=repeats, columns=[row.name for row in measured], dtype=float)
    for repeat in repeats:
        first = repeat % len(measured)
        for row in (*measured[first:], *measured[:first]):
            if row.rare and repeat != 0:
                continue
            say(f"{row.title}: " + (f"repeat {repeat + 1} of {settings.repeats}" if repeat >= 0 else "warming up"))
            with step_of(row, work) as step:
                if row.epoch == 1:
                    step()
                gc.collect()
                start = clock()
                step()
                seconds.loc[repeat, row.name] = (clock() - start) / row.updates
    return seconds.loc[0:]


def measure_peaks(rows: Sequence[Row], work: Workload, say: Say = print) -> dict[str, int]:
    """The most bytes that are allocated at once, of every row, by its name; rows that are a mean have none.

    It is measured over two steps, since some state is made at the end of the first, and from before the method is
    attached, so that a copy of the model and its optimizer count.
    """
    peaks = {}
    for row in (row for row in rows if row.of is None):
        say(f"{row.title}: memory")
        gc.collect()
        peaks[row.name] = (_peak_on_gpu if work.targets.is_cuda else _peak)(row.light, work)
    return peaks


def _peak_on_gpu(row: Row, work: Workload) -> int:
    torch.cuda.reset_peak_memory_stats()
    _two_steps(row, work)
    return torch.cuda.max_memory_allocated()


def _peak(row: Row, work: Workload) -> int:
    work.optimizer.state.clear()  # made anew inside: the profiler doesn't tell of what goes if it didn't see it come
    before = work.resident_bytes()
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _two_steps(row, work)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return before + max(itertools.accumulate(event.nbytes() for event in events))


def _two_steps(row: Row, work: Workload) -> None:
    with step_of(row, work) as step:
        step()
        step()


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler announces itself on the process's stderr, whatever its log level."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
