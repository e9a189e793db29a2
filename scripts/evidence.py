"""Rebuild the tables and plots of docs/evidence.md, and those in README.md, from the results in examples/evidence:

    python scripts/evidence.py

Every folder there with a results.json, as `attn-reg compare` and `finetune` write it, is an experiment; so is one with
such folders in it, which are named for what differs between them, such as the share of noise, or for the test of which
`attn-reg evaluate` wrote it. Several test sets have a column each. A table goes between the lines `<!-- table NAME -->`
and `<!-- end -->` of the pages, and its plot is docs/evidence_NAME.png. costs.json is what `attn-reg bench --json`
wrote for a translation model, costs_encoder.json for an encoder: the tables have the time of an update in plain ones,
and docs/evidence_costs.png the gains of noisy_phrasebook beside it.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence_results import RESULTS, Experiment, Row, Series, experiments

from attn_reg_plugin.experiments.report.table import ENOUGH, NOTHING, shade
from attn_reg_plugin.files import read_json, write_text
from attn_reg_plugin.pictures import load_matplotlib, save

ROOT = Path(__file__).resolve().parents[1]
#: the page of all tables, and the others
PAGE, *MORE = ROOT / "docs" / "evidence.md", ROOT / "README.md"
#: rows of drop_rates, and how their lines look, in grey too
RATED = {
    "ad_drop": ("AD-DROP, highest attributions", {"color": "#440154", "linestyle": "-", "marker": "o"}),
    "ad_drop_rd": ("AD-DROP, random candidates", {"color": "#6c8ebf", "linestyle": "-.", "marker": "^"}),
    "attention_dropout": ("attention dropout", {"color": "#2a9d6f", "linestyle": "--", "marker": "s"}),
}
#: of plots: inches, points, inches that a row takes, characters in a line of a method's name, pixels per inch
WIDTH, SIZE, LINE, TITLE, DPI = 5.4, 11, 0.4, 26, 110


def difference_of(row: Row) -> str:
    """The difference to plain training with its interval."""
    return shade(row.difference.text(2), row.difference.seeds) if row.difference else NOTHING


def time_of(row: Row) -> str:
    """The time of an update, in plain ones."""
    return "–" if row.time is None else f"{row.time:.2f}"


def table(found: Experiment | Series) -> str:
    """Markdown: methods by their mean, the best first; of several experiments in their order, a column for each."""
    if isinstance(found, Experiment):
        lines = [f"| | {found.metric} | − plain [95 %] | time × plain | seeds |", "|---|---|---|---|---|"]
        for row in sorted(found.rows, key=lambda row: -row.score.mean):
            shown = row.title, row.score.text(2), difference_of(row), time_of(row), str(row.score.seeds)
            lines.append(f"| {' | '.join(shown)} |")
        return "\n".join(lines)
    parts = found.parts.values()
    metrics = [f"{value} ({part.metric})" for value, part in found.parts.items()]
    lines = ["| | " + " | ".join([*metrics, "time × plain"]) + " |", "|---" * (2 + len(metrics)) + "|"]
    times = {row.title: time_of(row) for part in parts for row in part.rows}
    for title, time in times.items():
        rows = [next((row for row in part.rows if row.title == title), None) for part in parts]
        cells = [(row and (difference_of(row) if row.difference else row.score.text(2))) or "" for row in rows]
        lines.append(f"| {title} | {' | '.join([*cells, time])} |")
    return "\n".join(lines)


def candidates_table() -> str:
    """Tabulate candidates.json of plain training: a row for each layer, the mean over its runs."""
    content = read_json(RESULTS / "candidates.json")
    runs = [layers for name, layers in content["runs"].items() if name.startswith("plain-seed")]
    heads = [
        f"{kind}: {figure}" for kind in ("planted", "other") for figure in ("candidate", "by A ⊙ ∂F/∂A", "attention")
    ]
    lines = ["| layer | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for layer in range(len(runs[0]["planted"])):
        cells = [
            f"{statistics.fmean(run[kind][layer][figure] for run in runs):.0%}".replace("%", " %")
            for kind in ("planted", "other")
            for figure in ("candidates", "weighted_candidates", "attention")
        ]
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(found: Iterable[Experiment | Series]) -> dict[str, str]:
    """All tables of the page, by their name."""
    return {**{one.name: table(one) for one in found}, "candidates": candidates_table()}


def plot_series(series: Series, path: Path) -> None:
    """A panel for each value, below the other: every method's difference to plain and the 95 % interval."""
    titles = list(dict.fromkeys(row.title for part in series.parts.values() for row in part.rows if row.difference))
    height = 0.9 + LINE * len(titles)
    figure, panels = drawing(0.3 + height * len(series.parts), len(series.parts))
    for panel, (value, part) in zip(panels, series.parts.items(), strict=True):
        draw(panel, titles, {titles.index(row.title): row for row in part.rows if row.difference})
        panel.set_title(f"{value}: plain {plain_of(part).score.mean:.1f}")
        panel.set_xlabel(part.metric)
    figure.suptitle("difference to plain training, 95 % interval")
    save(figure, path, DPI)


def drawing(height: float, panels: int = 1) -> tuple[Any, Any]:
    """A figure and its panels, one below the other, whose text is legible in a column of a telephone's width."""
    matplotlib = load_matplotlib("a plot")
    with matplotlib.rc_context({"font.size": SIZE, "axes.titlesize": SIZE, "figure.titlesize": SIZE}):
        figure = matplotlib.figure.Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots(panels, 1, squeeze=False)[:, 0]


def plain_of(experiment: Experiment) -> Row:
    """The row of plain training."""
    return next(row for row in experiment.rows if row.method == "plain")


def draw(panel: Any, titles: Sequence[str], rows: Mapping[int, Row]) -> None:
    """The differences of rows, by their place among the titles, the first above; hollow where seeds are few."""
    panel.axvline(0, color="0.3", linewidth=1)
    for height, row in rows.items():
        difference = row.difference
        if difference.low is not None:
            panel.plot([difference.low, difference.high], [height, height], color="black", linewidth=1.5)
        fill = "black" if row.score.seeds >= ENOUGH else "white"
        panel.plot([difference.mean], [height], "o", color="black", markerfacecolor=fill, markersize=6)
    panel.grid(axis="x", color="0.9")
    panel.set_axisbelow(True)
    panel.set_yticks(range(len(titles)), [textwrap.fill(title, TITLE) for title in titles])
    panel.set_ylim(len(titles) - 0.4, -0.6)


def plot(experiment: Experiment, path: Path) -> None:
    """A line for each method: its difference to plain and the 95 % interval."""
    rows = [row for row in sorted(experiment.rows, key=lambda row: -row.score.mean) if row.difference]
    figure, (panel,) = drawing(1.2 + LINE * len(rows))
    draw(panel, [row.title for row in rows], dict(enumerate(rows)))
    panel.set_xlabel(f"{experiment.metric}, difference to plain training,\n95 % interval")
    save(figure, path, DPI)


def upwards(experiment: Experiment, height: float) -> tuple[Any, Any]:
    """A figure and its panel for differences to plain training, upwards."""
    figure, (panel,) = drawing(height)
    panel.axhline(0, color="0.3", linewidth=1)
    panel.set_ylabel(f"{experiment.metric}, difference to plain training")
    panel.grid(color="0.9")
    panel.set_axisbelow(True)
    return figure, panel


def plot_costs(experiment: Experiment, path: Path) -> None:
    """Gain against cost."""
    figure, panel = upwards(experiment, 6.5)
    shown = [row for row in experiment.rows if row.difference and row.time]
    for row in shown:
        panel.plot([row.time] * 2, [row.difference.low, row.difference.high], color="0.6", linewidth=1)
        panel.plot([row.time], [row.difference.mean], "o", color="black", markersize=5)
    for right, members in columns(shown):
        height = float("inf")
        for row in members:
            title = textwrap.fill(row.title, TITLE * 2 // 3)
            height = min(row.difference.mean, height - 0.5 * (1 + title.count("\n")))
            line = {"arrowstyle": "-", "color": "0.4", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
            at, text = (row.time, row.difference.mean), (right + 0.06, height)
            panel.annotate(title, at, text, fontsize=SIZE - 2, va="center", linespacing=0.9, arrowprops=line)
            height -= 0.25 * title.count("\n")
    panel.set_xlim(0.8, 2.9)
    panel.set_xlabel("time of an update, in plain ones")
    save(figure, path, DPI)


def columns(rows: Iterable[Row]) -> list[tuple[float, list[Row]]]:
    """Rows whose times lie together: the longest time of each, and its rows from the highest gain down."""
    found: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.time):
        if found and row.time - found[-1][-1].time < 0.3:
            found[-1].append(row)
        else:
            found.append([row])
    return [(part[-1].time, sorted(part, key=lambda row: -row.difference.mean)) for part in found]


def plot_rates(experiment: Experiment, path: Path) -> None:
    """Gain against the drop rate, a line for each of `RATED`, whose rows end with the rate in percent."""
    figure, panel = upwards(experiment, 3.6)
    for shift, (method, (title, look)) in enumerate(RATED.items()):
        rows = {int(row.method[-2:]): row for row in experiment.rows if re.fullmatch(rf"{method}_\d\d", row.method)}
        rates = sorted(rows)
        found = [rows[rate].difference for rate in rates]
        means, places = [one.mean for one in found], [rate + 0.25 * (shift - 1) for rate in rates]
        ends = [[one.mean - one.low for one in found], [one.high - one.mean for one in found]]
        panel.errorbar(places, means, ends, label=title, capsize=2, elinewidth=0.8, **look)
    panel.set_xlabel("drop rate, % of the positions")
    panel.legend(frameon=False)
    save(figure, path, DPI)


def filled(path: Path, tables: Mapping[str, str]) -> str:
    """The text of a page with its tables in their places; docs/evidence.md has all of them.

    Raises:
        ValueError: a place without a table, or there a table without a place.
    """
    page = path.read_text(encoding="utf-8")
    places = set(re.findall(r"<!-- table (\w+) -->", page))
    if not places <= set(tables) or (path == PAGE and places != set(tables)):
        raise ValueError(f"{path.name} has places for {sorted(places)}, but there are {sorted(tables)}")

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n\n{tables[match[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", fill, page, flags=re.DOTALL)


#: experiment -> a further plot of it
FURTHER = {"noisy_phrasebook": ("costs", plot_costs), "drop_rates": ("rates", plot_rates)}


def main() -> None:
    """Rebuild."""
    found = list(experiments())
    made = tables(found)
    for path in (PAGE, *MORE):
        write_text(path, filled(path, made))
    for one in found:
        path = PAGE.with_name(f"evidence_{one.name}.png")
        plot_series(one, path) if isinstance(one, Series) else plot(one, path)
        if one.name in FURTHER:
            name, further = FURTHER[one.name]
            further(one, PAGE.with_name(f"evidence_{name}.png"))


if __name__ == "__main__":
    main()
