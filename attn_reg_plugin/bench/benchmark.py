"""The benchmark: time and peak memory of a training step, method by method, beside plain training.

A step is forward, loss, backward and Adam; AttendOut's is a whole round, and its time is divided by its updates. In
every repeat each method runs one step, in rotating order, so that a slow moment of the machine meets all of them; times
are medians, ratios are medians of the ratios within a repeat.
"""

import gc
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch.utils.benchmark.utils.common import set_torch_threads

from attn_reg_plugin.bench.families import build_workload
from attn_reg_plugin.bench.measure import measure_peaks, measure_seconds
from attn_reg_plugin.bench.rows import Row, select_rows
from attn_reg_plugin.bench.settings import Settings
from attn_reg_plugin.files import write_json

NOTES = (
    "× plain: median over the repeats of the ratio to plain in the same repeat.",
    "cross-tuned: the mean of the plain and the regularized step of the same repeat, as half of the epochs are plain; "
    "its memory is the larger of the two.",
    "the paper's form: attention maps kept in the graph, one backward per layer, a full sort of every row.",
    "AttendOut: a whole round over its updates, every update of both with loss, backward and Adam as in plain.",
    "peak: the most memory allocated at once, with what stays between steps (weights, Adam).",
)
HEADER = ["method", "n", "seconds", "× plain", "peak MiB", "× plain"]


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
    print("\n".join([render(figures), "", *lines, *NOTES]))
    if settings.json is not None:
        write_json(settings.json, {**about, "rows": figures})


def benchmark(rows: Sequence[Row], settings: Settings) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure the rows: memory first, which also warms up and makes Adam's state.

    Returns:
        The figures of every row, see `results`, and what the machine is.
    """
    threads = set_torch_threads(settings.threads or torch.get_num_threads())
    with threads, Console(stderr=True).status("building") as status:
        gc.freeze()  # collecting garbage before each step need not look at the imported modules
        work = build_workload(settings)
        work.update(work.loss(work.model, work.batch).loss)
        peaks = measure_peaks(rows, work, status.update)
        seconds = measure_seconds(rows, work, settings, status.update)
        gc.unfreeze()
        return results(rows, seconds, peaks), describe_machine(settings.device)


def describe_machine(device: str) -> dict[str, Any]:
    """The processor, its cores, threads, the GPU and torch: what the times depend on."""
    path = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", path.read_text(encoding="utf-8")) if path.exists() else None
    described = {"CPU": name[1] if name else platform.processor(), "cores": os.cpu_count()}
    gpu = {"GPU": torch.cuda.get_device_name()} if device == "cuda" else {}
    return {**described, "threads": torch.get_num_threads(), **gpu, "torch": torch.__version__}


def results(rows: Sequence[Row], seconds: pd.DataFrame, peaks: Mapping[str, int]) -> list[dict[str, Any]]:
    """The figures of every row, as they are written to a file.

    A ratio of time is taken within each repeat that the row and plain training both have. A row that is a mean has the
    mean of the times of a row and of plain training in the same repeat, and the larger of their peaks.
    """
    times, highest = seconds.copy(), dict(peaks)
    for row in rows:
        if row.of is not None:
            times[row.name] = times[[row.of, "plain"]].mean(axis="columns", skipna=False)
            highest[row.name] = max(highest[row.of], highest["plain"])
    ratios, found = times.div(times["plain"], axis="index"), []
    for row in rows:
        peak, own, by = highest[row.name], times[row.name].dropna(), ratios[row.name].dropna()
        measured = {"seconds": own.tolist(), "median_seconds": own.median(), "ratios": by.tolist()}
        measured |= {"ratio": by.median(), "peak_bytes": peak, "memory_ratio": peak / highest["plain"]}
        found.append({**vars(row), **measured})
    return found


def render(figures: Sequence[Mapping[str, Any]]) -> str:
    """The figures as a Markdown table."""
    found = pd.DataFrame(figures).assign(
        n=lambda rows: rows["seconds"].map(len), peak=lambda rows: rows["peak_bytes"] / 2**20
    )
    shown = found[["title", "n", "median_seconds", "ratio", "peak", "memory_ratio"]]
    return shown.to_markdown(index=False, headers=HEADER, floatfmt=("", "", ".3f", ".3f", ".1f", ".3f"))
