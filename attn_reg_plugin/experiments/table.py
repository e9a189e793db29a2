"""The table of a comparison: one row per method, means over seeds, for json, Markdown and the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from attn_reg_plugin.experiments.differences import PLAIN, Difference
from attn_reg_plugin.experiments.methods import Method

#: seeds below which a figure is shown in grey
ENOUGH = 3
#: of a method to plain training, by subset and metric
Differences = Mapping[str, Mapping[str, Difference]]


class Grey(str):
    """The text of a figure that too few seeds stand behind: dim in a terminal, in italics in Markdown."""

    __slots__ = ()


@dataclass(frozen=True)
class Figure:
    """A mean over seeds and the sample standard deviation; `std` is None for a single seed."""

    mean: float
    std: float | None
    seeds: int = 1

    def text(self, digits: int) -> str:
        """`27.31 ± 0.22`, or `27.31` for a single seed; grey below `ENOUGH` seeds."""
        text = f"{self.mean:.{digits}f}"
        return shade(text if self.std is None else f"{text} ± {self.std:.{digits}f}", self.seeds)


def shade(text: str, seeds: int) -> str:
    """The text of a figure, grey unless enough seeds stand behind it."""
    return text if seeds >= ENOUGH else Grey(text)


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
    differences: Differences = field(default_factory=dict)


def summarize(
    methods: Sequence[Method],
    results: dict[str, list[dict[str, Any]]],
    differences: Mapping[str, Differences] | None = None,
) -> list[Row]:
    """One row a method from its results (as `Run.result` gives them), a list by method name.

    The relative time is the mean seconds per epoch over those of the method `plain`; None without it.

    Args:
        differences: to plain training, by method name, see `differences.py`.
    """
    times = {name: times_of(entries) for name, entries in results.items()}
    plain = times.get(PLAIN)
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
                differences=(differences or {}).get(method.name, {}),
            )
        )
    return rows


def cells(rows: Sequence[Row], loss: str) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts; `loss` names the validation loss."""
    subsets = list(rows[0].bleu)
    many, compared = len(subsets) > 1, any(row.differences for row in rows)
    header = ["method"]
    for subset in subsets:
        bleu, chrf = (f"{name} {subset}" if many else name for name in ("BLEU", "chrF"))
        header += [bleu, *([DIFFERENCE.format(bleu)] if compared else []), chrf]
    header += [f"best valid {loss}", "s/epoch", TIMES, "seeds"]
    body = []
    for row in rows:
        line = [row.title]
        for subset in subsets:
            line.append(row.bleu[subset].text(2))
            line += [difference_text(row.differences, subset, "bleu", 2)] if compared else []
            line.append(row.chrf[subset].text(2))
        line.append(row.best_valid_loss.text(3))
        line += seconds_text(row.seconds_per_epoch, row.relative_time, digits=2)
        body.append([*line, str(row.seeds)])
    return header, body


#: heads of columns
DIFFERENCE, TIMES = "{} − plain", "time × plain"


def difference_text(found: Differences, subset: str, metric: str, digits: int) -> str:
    """The cell of a difference to plain training; a dash where there is none."""
    difference = found.get(subset, {}).get(metric)
    return "–" if difference is None else shade(difference.text(digits), difference.seeds)


def statistics_notes(rows: Iterable[Any]) -> list[str]:
    """What the figures of a table are: how they vary, what the differences are, and which are grey.

    Args:
        rows: each with `seeds` and `differences`.
    """
    rows = list(rows)
    notes = ["± standard deviation over seeds"] if any(row.seeds > 1 for row in rows) else []
    found = [one for row in rows for by_metric in row.differences.values() for one in by_metric.values()]
    drawn = sorted({one.drawn for one in found if one.low is not None}, key=len, reverse=True)
    if found:
        how = f" [95 % interval: bootstrap over {', of some figures over '.join(drawn)}]" if drawn else ""
        notes.append(f"− {PLAIN}: mean difference to the run of the same seed{how}; of all figures in results.json")
    few = any(row.seeds < ENOUGH for row in rows)
    return notes + ([f"in italics, in a terminal grey: fewer than {ENOUGH} seeds"] if few else [])


def markdown(header: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A Markdown table with a list of notes below."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for line in body:
        shown = [f"*{cell}*" if isinstance(cell, Grey) else cell for cell in line]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def terminal_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    """The table for a terminal."""
    table = Table()
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for line in body:
        table.add_row(*(Text(cell, style="dim") if isinstance(cell, Grey) else cell for cell in line))
    return table


def figure_of(values: Sequence[float]) -> Figure:
    """Mean and standard deviation; of one value the deviation is None."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Figure(statistics.fmean(values), deviation, len(values))


def relative_time(time: Figure | None, plain: Figure | None) -> float | None:
    """A method's time over plain training's; None where either is unknown."""
    return time.mean / plain.mean if time and plain and plain.mean > 0 else None


def seconds_text(time: Figure | None, relative: float | None, digits: int) -> list[str]:
    """The cells of the seconds per epoch and of their ratio to plain training's."""
    if time is None:
        return ["–", "–"]
    return [time.text(digits), "–" if relative is None else shade(f"{relative:.2f}", time.seeds)]


def times_of(entries: Sequence[dict[str, Any]]) -> Figure | None:
    """The seconds per epoch of some runs' results, of those that know it."""
    known = [time for entry in entries if (time := entry["training"]["seconds_per_epoch"]) is not None]
    return figure_of(known) if known else None
