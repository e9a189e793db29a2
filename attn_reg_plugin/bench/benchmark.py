"""The benchmark: time and peak memory of a training step, method by method, beside plain training.

A step is forward, loss, backward and Adam; AttendOut's is a whole round, and its time is divided by its updates. In
every repeat each method runs one step, in rotating order, so that a slow moment of the machine meets all of them; times
are medians, ratios are medians of the ratios within a repeat.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_reg_plugin.bench.families import build_workload
from attn_reg_plugin.bench.measure import Seconds, measure_peaks, measure_seconds
from attn_reg_plugin.bench.rows import Row, select_rows
from attn_reg_plugin.bench.settings import Settings
from attn_reg_plugin.files import write_json
from attn_reg_plugin.terminal import show

NOTES = (
    "× plain: median over the repeats of the ratio to plain in the same repeat.",
    "cross-tuned: the mean of the plain and the regularized step of the same repeat, as half of the epochs are plain; "
    "its memory is the larger of the two.",
    "the paper's form: attention maps kept in the graph, one backward per layer, a full sort of every row.",
    "AttendOut: a whole round over its updates, every update of both with loss, backward and Adam as in plain.",
    "peak: the most memory allocated at once, with what stays between steps (weights, Adam).",
)
HEADER = ("method", "n", "seconds", "× plain", "budget", "published", "peak MiB", "× plain", "budget")


def publish(settings: Settings) -> None:
    """Measure the methods of the settings, print the table, and write the file that is asked for.

    Raises:
        ValueError: an unknown method, or a device that is not there.
    """
    rows = select_rows(settings.methods, settings.family, settings.dtype)
    figures, machine = benchmark(rows, settings)
    described = {name: value for name, value in vars(settings).items() if name not in ("methods", "json", "threads")}
    about = {"machine": machine, "settings": described}
    lines = [f"{what}: " + ", ".join(f"{key} {value}" for key, value in one.items()) for what, one in about.items()]
    show(Console(), render(rows, figures), [*lines, *NOTES])
    if settings.json is not None:
        write_json(settings.json, {**about, "rows": figures})


def benchmark(rows: Sequence[Row], settings: Settings) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure the rows: memory first, which also warms up and makes Adam's state.

    Returns:
        The figures of every row, see `results`, and what the machine is.
    """
    with _prepared(settings.threads), Console(stderr=True).status("building") as status:
        work = build_workload(settings)
        work.update(work.loss(work.model, work.batch).loss)
        peaks = measure_peaks(rows, work, status.update)
        seconds = measure_seconds(rows, work, settings, status.update)
        return results(rows, seconds, peaks), describe_machine(settings.device)


@contextmanager
def _prepared(threads: int | None) -> Iterator[None]:
    """Set PyTorch's threads, and keep methods from announcing themselves each time they are attached.

    Collecting garbage skips what is there now, the imported modules, which take a fifth of a second each time.
    """
    logger, before = logging.getLogger("attn_reg_plugin"), torch.get_num_threads()
    level = logger.level
    torch.set_num_threads(threads or before)
    logger.setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)
        logger.setLevel(level)


def describe_machine(device: str) -> dict[str, Any]:
    """The processor, its cores, threads, the GPU and torch: what the times depend on."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    described = {"CPU": (names or [platform.processor()])[0], "cores": os.cpu_count()}
    gpu = {"GPU": torch.cuda.get_device_name()} if device == "cuda" else {}
    return {**described, "threads": torch.get_num_threads(), **gpu, "torch": torch.__version__}


# -- the table --------------------------------------------------------------------------------------------------------


def results(rows: Sequence[Row], seconds: Mapping[str, Seconds], peaks: Mapping[str, int]) -> list[dict[str, Any]]:
    """The figures of every row, as they are written to a file.

    A ratio of time is taken within each repeat that the row and plain training both have. A row of kind `mean` has the
    mean of the times of a row and of plain training in the same repeat, and the larger of their peaks.
    """
    times, highest = dict(seconds), dict(peaks)
    plain, plain_peak = times["plain"], highest["plain"]
    found = []
    for row in rows:
        if row.kind == "mean":
            one = times[row.of]
            times[row.name] = {repeat: (one[repeat] + plain[repeat]) / 2 for repeat in one if repeat in plain}
            highest[row.name] = max(highest[row.of], plain_peak)
        own, peak = times[row.name], highest[row.name]
        ratios = [own[repeat] / plain[repeat] for repeat in own if repeat in plain]
        about = {name: getattr(row, name) for name in ("name", "method", "updates", "budget", "memory_budget")}
        about |= {"title": row.title.strip(), "options": dict(row.options), "published": row.published or None}
        about |= {"mean_of": [row.of, "plain"] if row.kind == "mean" else None}
        measured = {"seconds": list(own.values()), "median_seconds": statistics.median(own.values()), "ratios": ratios}
        measured |= {"ratio": statistics.median(ratios), "peak_bytes": peak, "memory_ratio": peak / plain_peak}
        found.append({**about, **measured})
    return found


def render(rows: Sequence[Row], figures: Sequence[Mapping[str, Any]]) -> Table:
    """The table for a terminal; figures over their budget are red, those within it green."""
    shown = Table()
    for number, name in enumerate(HEADER):
        shown.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for row, found in zip(rows, figures, strict=True):
        time = [f"{found['median_seconds']:.3f}", *_judged(found["ratio"], row.budget), row.published]
        memory = [f"{found['peak_bytes'] / 2**20:.1f}", *_judged(found["memory_ratio"], row.memory_budget)]
        shown.add_row(row.title, str(len(found["seconds"])), *time, *memory)
    return shown


def _judged(ratio: float, budget: float | None) -> tuple[str, str]:
    """A ratio and its budget as texts."""
    if budget is None:
        return f"{ratio:.3f}", ""
    return f"[green]{ratio:.3f}[/]" if ratio <= budget else f"[red]{ratio:.3f} ![/]", f"≤ {budget:g}"
