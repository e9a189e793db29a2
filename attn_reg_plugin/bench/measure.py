"""Measuring steps: seconds in interleaved repeats, and peak memory.

Peak memory is the most that was allocated at once during a step, what stays between steps (parameters, optimizer
state, batch) included. On CUDA the allocator counts it. On CPU the profiler reports every allocation and release of
the allocator, and their running sum is exact and the same in every run, which resident set sizes are not.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from attn_reg_plugin.bench.families import PADDING, Workload
from attn_reg_plugin.bench.naive_ad_drop import naive_forward
from attn_reg_plugin.bench.rows import Row
from attn_reg_plugin.regularizers import Outcome, Tokens
from attn_reg_plugin.regularizers.base import Regularizer, build

#: elapsed time, or the process's own CPU time, which hardly depends on other load
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
#: updates of the training that a measured step is the beginning of, for schedules that stretch over it
_LONG = 1_000_000
#: seconds by repeat
Seconds = dict[int, float]
#: what is done next is said by it
Say = Callable[[str], object]
#: a step, ready to be run; attached to the model in a context
Step = Callable[[], None]


class BenchTraining:
    """The bench's training, on one batch, as much of a method's `Training` and `Problem` as a step needs."""

    clip_norm, folder, vocabulary = 0.0, None, ""

    def __init__(self, work: Workload) -> None:
        self.work, self.optimizer = work, work.optimizer

    def problem(self, subset: str) -> tuple[BenchTraining, int]:
        """See `Training`."""
        return self, self.work.targets.size(0)

    def loss(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Outcome:
        """The loss of an update, or in evaluation of each example."""
        outputs = model(**{name: inputs[name] for name in self.work.inputs})
        if model.training:
            return Outcome(self.work.loss(outputs))
        return Outcome(self.work.example_losses(outputs, inputs["targets"]))

    def tokens(self, inputs: Mapping[str, Tensor]) -> dict[str, Tokens]:
        """Token ids and padding of each stack."""
        found = {stack: inputs[name] for stack, name in self.work.stacks.items()}
        return {stack: Tokens(ids, ids.ne(PADDING)) for stack, ids in found.items()}

    def validation(self, n: int) -> Iterable[dict[str, Tensor]]:
        """n examples of the batch, drawn at random, as one batch."""
        chosen = torch.randint(self.work.targets.size(0), (n,), device=self.work.targets.device)
        yield {name: tensor[chosen] for name, tensor in {**self.work.inputs, "targets": self.work.targets}.items()}


# -- steps ------------------------------------------------------------------------------------------------------------


@contextmanager
def _attached(row: Row, work: Workload, light: bool) -> Iterator[Regularizer | None]:
    """The row's regularizer on the model; None for a row without one."""
    if row.method is None:
        yield None
        return
    regularizer = build(row.method, **{**row.options, **(row.memory_options if light else {})})
    with regularizer.attach(work.model):
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
def _training(row: Row, work: Workload, light: bool) -> Iterator[Step]:
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
def _round(row: Row, work: Workload, light: bool) -> Iterator[Step]:
    """A round of AttendOut: updates of both players, and its end; generator and defender are made before."""
    training = BenchTraining(work)
    options = {**row.options, **(row.memory_options if light else {})}
    regularizer = build(row.method, **options, problem=training, optimizer=work.optimizer)
    with regularizer.attach(work.model):
        work.model.train()
        game = regularizer.start(work.model)
        players = (game.defender.model, game.defender.optimizer), (game.generator, game.generator_optimizer)
        work.players += players

        def step() -> None:
            for _ in range(regularizer.steps):
                work.update(work.model(**work.inputs))
                regularizer.end_update()

        try:
            if light:  # the generator's optimizer state is made at the first round's end
                step()
            yield step
        finally:
            del work.players[-len(players) :]


@contextmanager
def _naive(row: Row, work: Workload, light: bool) -> Iterator[Step]:
    """A step of the paper's form of AD-DROP."""
    work.model.train()
    yield lambda: work.update(naive_forward(work.model, work.inputs, work.objective))


@contextmanager
def _generation(row: Row, work: Workload, light: bool) -> Iterator[Step]:
    """Translating a few sentences in evaluation mode."""
    with _attached(row, work, light), torch.no_grad():
        work.model.eval()
        yield work.generate
        work.model.train()


#: kind of row -> a context in which a step of it can be run; whether it is light, for its memory
STEPS: dict[str, Callable[[Row, Workload, bool], AbstractContextManager[Step]]] = {
    "training": _training,
    "round": _round,
    "naive": _naive,
    "generation": _generation,
}

# -- seconds ----------------------------------------------------------------------------------------------------------


def measure_seconds(
    rows: Sequence[Row], work: Workload, *, repeats: int, warmup: int, clock: str = "wall", say: Say = print
) -> dict[str, Seconds]:
    """Seconds per update of every row, by its name and the repeat; rows of kind `mean` have none.

    Args:
        rows: in each repeat each is run once, rare ones in repeat 0 only; each repeat begins with another row.
        work: what is trained; it goes on learning.
        repeats: at least 1.
        warmup: repeats before, not counted and without the rare rows, at least 0.
        clock: a key of CLOCKS.
        say: told what comes next.
    """
    measured = [row for row in rows if row.kind in STEPS]
    seconds: dict[str, Seconds] = {row.name: {} for row in measured}
    for repeat in range(-warmup, repeats):
        first = repeat % len(measured)
        for row in (*measured[first:], *measured[:first]):
            if row.rare and repeat != 0:
                continue
            say(f"{row.title.strip()}: {f'repeat {repeat + 1} of {repeats}' if repeat >= 0 else 'warming up'}")
            took = _seconds_of_step(row, work, CLOCKS[clock])
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


class Peak(NamedTuple):
    """Bytes: `total` is the most allocated at once, `step` what of it was allocated during the step."""

    total: int
    step: int


def measure_peaks(rows: Sequence[Row], work: Workload, say: Say = print) -> dict[str, Peak]:
    """Peak memory of a step of every row, by its name; rows of kind `mean` have none."""
    peaks = {}
    for row in (row for row in rows if row.kind in STEPS):
        say(f"{row.title.strip()}: memory")
        with STEPS[row.kind](row, work, True) as step:
            gc.collect()
            peaks[row.name] = _peak(step, work)
    return peaks


def _peak(step: Step, work: Workload) -> Peak:
    if next(work.model.parameters()).is_cuda:
        _synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        _synchronize()
        total = torch.cuda.max_memory_allocated()
        return Peak(total, total - before)
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
