"""Rebuild the tables and plots of docs/evidence.md from the results under examples/evidence:

    python scripts/evidence.py

Every folder there with a results.json, as `attn-reg compare` and `finetune` write it, is an experiment. Its table goes
between the lines `<!-- table NAME -->` and `<!-- end -->` of the page, and its plot is docs/evidence_NAME.png.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.differences import Difference
from attn_reg_plugin.experiments.drop_rate_plot import load_matplotlib
from attn_reg_plugin.experiments.table import ENOUGH, Figure, difference_text
from attn_reg_plugin.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "evidence"
PAGE = ROOT / "docs" / "evidence.md"


@dataclass(frozen=True)
class Row:
    """A method's chief figure on the reported set."""

    method: str
    title: str
    score: Figure
    difference: Difference | None


@dataclass(frozen=True)
class Experiment:
    """What a results.json says.

    Attributes:
        name: that of its folder.
        metric: the chief one.
    """

    name: str
    metric: str
    rows: tuple[Row, ...]


def read_experiment(folder: Path) -> Experiment:
    """The experiment of a folder.

    Raises:
        FileNotFoundError, ValueError: it has no results.json, or that is no comparison's.
    """
    content = read_json(folder / "results.json")
    methods: Sequence[Mapping[str, Any]] = content["methods"]
    if "pair" in content:
        subset, metric = next(iter(methods[0]["bleu"])), "bleu"
        scores = [one["bleu"][subset] for one in methods]
    else:
        subset, metric = "valid", next(iter(methods[0]["scores"]))
        scores = [one["scores"][metric] for one in methods]
    rows = []
    for one, score in zip(methods, scores, strict=True):
        found = one["differences"].get(subset, {}).get(metric)
        difference = None if found is None else Difference(**found)
        rows.append(Row(one["method"], one["title"], Figure(**score), difference))
    return Experiment(folder.name, "BLEU" if metric == "bleu" else metric, tuple(rows))


def table(experiment: Experiment) -> str:
    """Markdown: methods by their mean, the best first."""
    rows = sorted(experiment.rows, key=lambda row: -row.score.mean)
    lines = [f"| | {experiment.metric} | − plain [95 %] | seeds |", "|---|---|---|---|"]
    for row in rows:
        difference = difference_text({"": {"": row.difference}} if row.difference else {}, "", "", 2)
        lines.append(f"| {row.title} | {row.score.text(2)} | {difference} | {row.score.seeds} |")
    return "\n".join(lines)


def plot(experiment: Experiment, path: Path) -> None:
    """A line for each method: its difference to plain and the 95 % interval."""
    rows = [row for row in sorted(experiment.rows, key=lambda row: row.score.mean) if row.difference]
    figure = load_matplotlib().figure.Figure(figsize=(7, 1.2 + 0.32 * len(rows)), layout="constrained")
    panel = figure.subplots()
    panel.axvline(0, color="0.3", linewidth=1)
    for height, row in enumerate(rows):
        difference = row.difference
        color = "black" if row.score.seeds >= ENOUGH else "0.6"
        if difference.low is not None:
            panel.plot([difference.low, difference.high], [height, height], color=color, linewidth=1.5)
        panel.plot([difference.mean], [height], "o", color=color, markersize=5)
    panel.set_yticks(range(len(rows)), [row.title for row in rows])
    panel.set_xlabel(f"{experiment.metric}, difference to plain training, 95 % interval")
    panel.grid(axis="x", color="0.9")
    panel.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def filled(page: str, tables: Mapping[str, str]) -> str:
    """The page with its tables in their places.

    Raises:
        ValueError: a place without a table, or a table without a place.
    """
    places = set(re.findall(r"<!-- table (\w+) -->", page))
    if places != set(tables):
        raise ValueError(f"docs/evidence.md has places for {sorted(places)}, but there are {sorted(tables)}")

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n\n{tables[match[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", fill, page, flags=re.DOTALL)


def experiments() -> Iterator[Experiment]:
    """All of them, by name."""
    for path in sorted(RESULTS.glob("*/results.json")):
        yield read_experiment(path.parent)


def main() -> None:
    """Rebuild."""
    found = list(experiments())
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8"), {one.name: table(one) for one in found}))
    for one in found:
        plot(one, PAGE.with_name(f"evidence_{one.name}.png"))


if __name__ == "__main__":
    main()
