"""Measuring steps: seconds in interleaved repeats, peak memory, and the ratios of both.

Peak memory is the most that was allocated at once during a step, what stays between steps (parameters, optimizer
state, batch) included. On CUDA the allocator counts it. On CPU the profiler reports every allocation and release of
the allocator, and their running sum is exact and the same in every run, which resident set sizes are not.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from attn_reg_plugin.bench.families import Workload
from attn_reg_plugin.bench.naive_ad_drop import naive_forward
from attn_reg_plugin.bench.rounds import BenchTraining, playing
from attn_reg_plugin.bench.rows import Row
from attn_reg_plugin.regularizers.base import Regularizer, build

#: what seconds are: elapsed time, or the process's own CPU time, which hardly depends on other load
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

#: updates of the training that a measured step is the beginning of, for schedules that stretch over it
_LONG = 1_000_000
#: seconds by repeat
Seconds = dict[int, float]
#: runs a step, and gives the seconds per update of its parts if it times them
Step = Callable[[], Mapping[str, float] | None]
#: called before a step is measured, with the row and which repeat it is (None: warm-up or memory)
Progress = Callable[[Row, int | None], None]


@contextmanager
def quick_collection() -> Iterator[None]:
    """While open, collecting garbage skips what is there now: the imported modules, a fifth of a second each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _attached(row: Row, work: Workload, light: bool) -> Iterator[Regularizer | None]:
    """The row's regularizer on the model; None for a row without one."""
    if row.method is None:
        yield None
        return
    regularizer = build(row.method, **{**row.options, **(row.memory_options if light else {})})
    with regularizer.attach(work.model):
        regularizer.supply(**work.supplied)
        regularizer.bind(BenchTraining(work))
        regularizer.begin_training(_LONG)
        if row.primed is not None:
            regularizer.begin_epoch(row.primed)
            work.model.train()
            work.update(work.model(**work.inputs))
            regularizer.end_update()
        regularizer.begin_epoch(row.epoch)
        yield regularizer


@contextmanager
def _training(row: Row, work: Workload, light: bool, clock: Callable[[], float]) -> Iterator[Step]:
    """Forward, loss, backward, Adam; as often as the row says."""
    with _attached(row, work, light) as regularizer:
        work.model.train()

        def step() -> None:
            for _ in range(row.updates):
                if regularizer is None:
                    work.update(work.model(**work.inputs))
                    continue
                work.step(regularizer.loss(work.loss_of, {**work.inputs, "targets": work.targets}))
                regularizer.end_update()

        yield step


@contextmanager
def _naive(row: Row, work: Workload, light: bool, clock: Callable[[], float]) -> Iterator[Step]:
    """The same, with the paper's form of AD-DROP."""
    work.model.train()
    yield lambda: work.update(naive_forward(work.model, work.inputs, work.objective))


@contextmanager
def _generation(row: Row, work: Workload, light: bool, clock: Callable[[], float]) -> Iterator[Step]:
    """Translating a few sentences in evaluation mode."""
    with _attached(row, work, light), torch.no_grad():
        work.model.eval()

        def step() -> None:
            work.generate()

        yield step
        work.model.train()


#: kind of row -> a context in which a step of it can be run; whether it is light, and the clock for its parts
STEPS: dict[str, Callable[[Row, Workload, bool, Callable[[], float]], AbstractContextManager[Step]]] = {
    "training": _training,
    "round": playing,
    "naive": _naive,
    "generation": _generation,
}


def rotated(rows: Sequence[Row], repeat: int) -> list[Row]:
    """The rows in the order of a repeat: each repeat starts with another one, so that none is always last."""
    start = repeat % len(rows)
    return [*rows[start:], *rows[:start]]


def measure_seconds(
    rows: Sequence[Row],
    work: Workload,
    *,
    repeats: int,
    warmup: int,
    clock: str = "wall",
    progress: Progress = lambda row, repeat: None,
) -> dict[str, Seconds]:
    """Seconds per update of every row, by its name and the repeat; rows of kind `mean` have none.

    Parts that a step times are rows of their own, `ROW_PART`.

    Args:
        rows: in each repeat all of them are run once, in rotating order; rare ones in repeat 0 only.
        work: what is trained; it goes on learning.
        repeats: at least 1.
        warmup: rounds before, not counted and without the rare rows, at least 0.
        clock: a key of CLOCKS.
        progress: told what comes next.
    """
    measured = [row for row in rows if row.kind in STEPS]
    seconds: dict[str, Seconds] = {row.name: {} for row in measured}
    for repeat in range(-warmup, repeats):
        for row in rotated(measured, repeat):
            if row.rare and repeat != 0:
                continue
            progress(row, repeat if repeat >= 0 else None)
            took = _seconds_of_step(row, work, CLOCKS[clock])
            for name, value in took.items() if repeat >= 0 else ():
                seconds.setdefault(name, {})[repeat] = value
    return seconds


def _seconds_of_step(row: Row, work: Workload, clock: Callable[[], float]) -> dict[str, float]:
    """One step and its parts; building and attaching the regularizer is not counted, garbage is collected before."""

    def now() -> float:
        _synchronize()
        return clock()

    with STEPS[row.kind](row, work, False, now) as step:
        gc.collect()
        start = now()
        parts = step() or {}
        took = {row.name: (now() - start) / row.updates}
    return took | {f"{row.name}_{part}": seconds for part, seconds in parts.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Peak:
    """Bytes: `total` is the most allocated at once, `step` what of it was allocated during the step."""

    total: int
    step: int


def measure_peaks(
    rows: Sequence[Row], work: Workload, progress: Progress = lambda row, repeat: None
) -> dict[str, Peak]:
    """Peak memory of a step of every row, by its name; rows of kind `mean` and `part` have none."""
    peaks = {}
    for row in rows:
        if row.kind not in STEPS:
            continue
        progress(row, None)
        with ExitStack() as stack:
            step = stack.enter_context(STEPS[row.kind](row, work, True, time.perf_counter))
            gc.collect()
            on_cuda = next(work.model.parameters()).is_cuda
            peaks[row.name] = _peak_on_cuda(step) if on_cuda else _peak_on_cpu(step, work)
    return peaks


def _peak_on_cuda(step: Step) -> Peak:
    _synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    _synchronize()
    total = torch.cuda.max_memory_allocated()
    return Peak(total, total - before)


def _peak_on_cpu(step: Step, work: Workload) -> Peak:
    resident = work.resident_bytes()
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Peak(resident + peak, peak)


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


@dataclass(frozen=True)
class Result:
    """A row of the table.

    Attributes:
        row: what was measured.
        seconds: per update, by repeat.
        ratios: of the time to the reference's of the same repeat.
        peak, reference_peak: bytes, of this row and of the one it is relative to; a part of a step has none.
    """

    row: Row
    seconds: Seconds
    ratios: list[float]
    peak: Peak | None = None
    reference_peak: Peak | None = None

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory over the reference's."""
        return self.peak.total / self.reference_peak.total if self.peak and self.reference_peak else None

    @property
    def step_memory_ratio(self) -> float | None:
        """The same without what stays between steps."""
        return self.peak.step / self.reference_peak.step if self.peak and self.reference_peak else None

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds.values())

    @property
    def ratio(self) -> float:
        """Median of the ratios of time."""
        return statistics.median(self.ratios)

    @property
    def within_budget(self) -> bool | None:
        """Whether time is within its budget; None where there is none."""
        return None if self.row.budget is None else self.ratio <= self.row.budget

    @property
    def within_memory_budget(self) -> bool | None:
        """Whether peak memory is."""
        if self.row.memory_budget is None or self.memory_ratio is None:
            return None
        return self.memory_ratio <= self.row.memory_budget


def ratios(seconds: Seconds, reference: Seconds) -> list[float]:
    """Time over the reference's of the same repeat, for the repeats that both have.

    Raises:
        ValueError: they have none in common.
    """
    common = [repeat for repeat in seconds if repeat in reference]
    if not common:
        raise ValueError("a row and its reference have no repeat in common")
    return [seconds[repeat] / reference[repeat] for repeat in common]


def mean_of(one: Seconds, other: Seconds) -> Seconds:
    """Mean time of two rows, repeat by repeat: what alternating steps or epochs cost on average."""
    return {repeat: (one[repeat] + other[repeat]) / 2 for repeat in one if repeat in other}


def results(rows: Sequence[Row], seconds: Mapping[str, Seconds], peaks: Mapping[str, Peak]) -> list[Result]:
    """The table's rows from what was measured; a mean takes the larger of the two peaks."""
    times, highest = dict(seconds), dict(peaks)
    for row in rows:
        if row.pair:
            times[row.name] = mean_of(*(times[name] for name in row.pair))
            highest[row.name] = max((highest[name] for name in row.pair), key=lambda peak: peak.total)
    return [
        Result(
            row=row,
            seconds=times[row.name],
            ratios=ratios(times[row.name], times[row.reference]),
            peak=highest.get(row.name),
            reference_peak=highest.get(row.reference),
        )
        for row in rows
    ]
