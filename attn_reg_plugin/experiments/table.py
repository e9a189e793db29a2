"""The table of a comparison: one row per method, means over seeds, for json, Markdown and the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from attn_reg_plugin.experiments.methods import Method


@dataclass(frozen=True)
class Figure:
    """A mean over seeds and the sample standard deviation; `std` is None for a single seed."""

    mean: float
    std: float | None

    def text(self, digits: int) -> str:
        """`27.31 ± 0.22`, or `27.31` for a single seed."""
        text = f"{self.mean:.{digits}f}"
        return text if self.std is None else f"{text} ± {self.std:.{digits}f}"


@dataclass(frozen=True)
class Row:
    """A method: BLEU and chrF by test subset, the rest over all its seeds; None where unknown."""

    method: str
    title: str
    seeds: int
    bleu: dict[str, Figure]
    chrf: dict[str, Figure]
    best_valid_loss: Figure
    seconds_per_epoch: Figure | None
    relative_time: float | None


def summarize(methods: Sequence[Method], results: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """One row a method from its results (as `Run.result` gives them), a list by method name.

    The relative time is the mean seconds per epoch over those of the method `plain`; None without it.
    """
    times = {name: times_of(entries) for name, entries in results.items()}
    plain = times.get("plain")
    rows = []
    for method in methods:
        entries, time = results[method.name], times[method.name]
        scores = [entry["translation"]["scores"] for entry in entries]
        rows.append(
            Row(
                method=method.name,
                title=method.title,
                seeds=len(entries),
                bleu={subset: figure_of([one[subset]["bleu"] for one in scores]) for subset in scores[0]},
                chrf={subset: figure_of([one[subset]["chrf"] for one in scores]) for subset in scores[0]},
                best_valid_loss=figure_of([entry["training"]["best_valid_loss"] for entry in entries]),
                seconds_per_epoch=time,
                relative_time=relative_time(time, plain),
            )
        )
    return rows


def cells(rows: Sequence[Row], loss: str) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts; `loss` names the validation loss."""
    subsets = list(rows[0].bleu)
    many = len(subsets) > 1
    header = ["method"]
    for subset in subsets:
        header += [f"BLEU {subset}", f"chrF {subset}"] if many else ["BLEU", "chrF"]
    header += [f"best valid {loss}", "s/epoch", "time × plain"]
    body = []
    for row in rows:
        line = [row.title]
        for subset in subsets:
            line += [row.bleu[subset].text(2), row.chrf[subset].text(2)]
        line.append(row.best_valid_loss.text(3))
        body.append([*line, *seconds_text(row.seconds_per_epoch, row.relative_time, digits=2)])
    return header, body


def markdown(header: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A Markdown table with a list of notes below."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(line)} |" for line in body]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def terminal_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    """The table for a terminal."""
    table = Table()
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for line in body:
        table.add_row(*line)
    return table


def figure_of(values: Sequence[float]) -> Figure:
    """Mean and standard deviation; of one value the deviation is None."""
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def relative_time(time: Figure | None, plain: Figure | None) -> float | None:
    """A method's time over plain training's; None where either is unknown."""
    return time.mean / plain.mean if time and plain and plain.mean > 0 else None


def seconds_text(time: Figure | None, relative: float | None, digits: int) -> list[str]:
    """The cells of the seconds per epoch and of their ratio to plain training's."""
    return ["–" if time is None else time.text(digits), "–" if relative is None else f"{relative:.2f}"]


def times_of(entries: Sequence[dict[str, Any]]) -> Figure | None:
    """The seconds per epoch of some runs' results, of those that know it."""
    known = [time for entry in entries if (time := entry["training"]["seconds_per_epoch"]) is not None]
    return figure_of(known) if known else None
