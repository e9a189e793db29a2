"""The benchmark: time and peak memory of a training step, method by method, beside plain training.

A step is forward, loss, backward and Adam; AttendOut's is a whole round, and its time is divided by its updates. In
every repeat each method runs one step, in rotating order, so that a slow moment of the machine meets all of them; times
are medians, ratios are medians of the ratios within a repeat.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_reg_plugin.bench.families import Settings, build_workload
from attn_reg_plugin.bench.measure import (
    Result,
    measure_peaks,
    measure_seconds,
    quick_collection,
    results,
)
from attn_reg_plugin.bench.rows import Row

NOTES = (
    "× plain: median over the repeats of the ratio to plain (beam search: to plain beam search) in the same repeat.",
    "cross-tuned: the mean of the plain and the regularized step of the same repeat, as half of the epochs are plain; "
    "its memory is the larger of the two.",
    "the paper's form: attention maps kept in the graph, one backward per layer, a full sort of every row.",
    "AttendOut: a whole round over its updates, every update of both with loss, backward and Adam as in plain; the "
    "lines below are its parts and add up to it; what the attacker's is above 1 is what masked attention costs.",
    "peak: the most memory allocated at once; step ×: its ratio without what stays between steps (weights, Adam).",
)


def benchmark(
    rows: Sequence[Row], settings: Settings, threads: int | None, repeats: int, warmup: int, clock: str
) -> tuple[list[Result], dict[str, Any]]:
    """Measure the rows: memory first, which also warms up and makes Adam's state.

    Args:
        threads: of PyTorch; None leaves them.

    Returns:
        What was measured, and what the machine is.
    """
    with _threads(threads), _without_announcements():
        return _measure(rows, settings, repeats, warmup, clock), describe_machine(settings.device)


def _measure(rows: Sequence[Row], settings: Settings, repeats: int, warmup: int, clock: str) -> list[Result]:
    work = build_workload(settings)
    with quick_collection(), Console(stderr=True).status("building") as status:

        def progress(row: Row, repeat: int | None) -> None:
            at = "warming up or measuring memory" if repeat is None else f"repeat {repeat + 1} of {repeats}"
            status.update(f"{at}: {row.title.strip()}")

        work.update(work.model(**work.inputs))
        peaks = measure_peaks(rows, work, progress)
        seconds = measure_seconds(rows, work, repeats=repeats, warmup=warmup, clock=clock, progress=progress)
    return results(rows, seconds, peaks)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """PyTorch with that many threads; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_announcements() -> Iterator[None]:
    """Methods are attached again and again, and would announce themselves each time."""
    logger = logging.getLogger("attn_reg_plugin")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def describe_machine(device: str) -> dict[str, Any]:
    """What the times depend on."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    described = {"CPU": processor, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device == "cuda":
        described["GPU"] = torch.cuda.get_device_name()
    return {**described, "torch": torch.__version__}


HEADER = ("method", "n", "seconds", "× plain", "budget", "published", "peak MiB", "× plain", "budget", "step ×")


def render(table: Sequence[Result]) -> Table:
    """The table for a terminal; figures over their budget are red, those within it green."""
    shown = Table()
    for number, name in enumerate(HEADER):
        shown.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for result in table:
        row = result.row
        shown.add_row(
            row.title,
            str(len(result.seconds)),
            f"{result.median:.3f}",
            _judged(result.ratio, result.within_budget),
            _limit(row.budget),
            row.published,
            "" if result.peak is None else f"{result.peak.total / 2**20:.1f}",
            _judged(result.memory_ratio, result.within_memory_budget),
            _limit(row.memory_budget),
            _judged(result.step_memory_ratio, None),
        )
    return shown


def _judged(ratio: float | None, within: bool | None) -> str:
    text = "" if ratio is None else f"{ratio:.3f}"
    return text if within is None else f"[green]{text}[/]" if within else f"[red]{text} ![/]"


def _limit(budget: float | None) -> str:
    return "" if budget is None else f"≤ {budget:g}"


def as_json(table: Sequence[Result]) -> list[dict[str, Any]]:
    """Everything measured, one dictionary per row."""
    return [
        {
            "name": result.row.name,
            "title": result.row.title.strip(),
            "reference": result.row.reference,
            "mean_of": result.row.pair and list(result.row.pair),
            "part_of": result.row.of if result.row.kind == "part" else None,
            "updates": result.row.updates,
            "method": result.row.method,
            "options": dict(result.row.options),
            "seconds": list(result.seconds.values()),
            "median_seconds": result.median,
            "ratios": result.ratios,
            "ratio": result.ratio,
            "budget": result.row.budget,
            "within_budget": result.within_budget,
            "published": result.row.published or None,
            "peak_bytes": result.peak and result.peak.total,
            "step_peak_bytes": result.peak and result.peak.step,
            "memory_ratio": result.memory_ratio,
            "step_memory_ratio": result.step_memory_ratio,
            "memory_budget": result.row.memory_budget,
            "within_memory_budget": result.within_memory_budget,
        }
        for result in table
    ]
