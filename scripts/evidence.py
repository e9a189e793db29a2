"""Rebuild the tables and plots of docs/evidence.md, and those in README.md, from the results in examples/evidence:

    python scripts/evidence.py

Every folder there with a results.json, as `attn-reg compare` and `finetune` write it, is an experiment; so is one with
such folders in it, which are named for what differs between them, such as the share of noise. A table goes between the
lines `<!-- table NAME -->` and `<!-- end -->` of the pages, and its plot is docs/evidence_NAME.png. costs.json is what
`attn-reg bench --json` wrote for a translation model, costs_encoder.json for an encoder: the tables have the time of an
update in plain ones, and docs/evidence_costs.png the gains of noisy_phrasebook beside it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.differences import Difference
from attn_reg_plugin.experiments.drop_rate_plot import load_matplotlib
from attn_reg_plugin.experiments.report_logs import flags_of
from attn_reg_plugin.experiments.table import ENOUGH, Figure, difference_text
from attn_reg_plugin.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "evidence"
#: the page of all tables, and the others
PAGE, *MORE = ROOT / "docs" / "evidence.md", ROOT / "README.md"
#: how the probe attributes -> its row in the bench
ATTRIBUTIONS = {"gradient": "ad_drop", "random": "random", "attention": "attention"}
#: rows of the bench that act on the encoder -> those on all attention
ON_ALL = {
    **{"ad_drop": "all_sites", "ad_drop_cross_tuned": "all_sites_cross_tuned", "attend_out": "attend_out_all"},
    **{"kept": "kept_all", "kept_use": "kept_all_use", "attention_layer_drop": "attention_layer_drop_all"},
}
#: rows of drop_rates, and how their lines look, in grey too
RATED = {
    "ad_drop": ("AD-DROP, highest attributions", {"color": "#440154", "linestyle": "-", "marker": "o"}),
    "ad_drop_rd": ("AD-DROP, random candidates", {"color": "#6c8ebf", "linestyle": "-.", "marker": "^"}),
    "attention_dropout": ("attention dropout", {"color": "#2a9d6f", "linestyle": "--", "marker": "s"}),
}
#: methods that lose more are not drawn beside the others
LOWEST_GAIN = -3.0


@dataclass(frozen=True)
class Row:
    """A method's chief figure on the reported set.

    Attributes:
        time: of an update, in plain ones; None where it wasn't measured.
    """

    method: str
    title: str
    score: Figure
    difference: Difference | None
    time: float | None


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
    measured = costs(translation="pair" in content)
    rows = []
    for one, score in zip(methods, scores, strict=True):
        found = one["differences"].get(subset, {}).get(metric)
        difference = None if found is None else Difference(**found)
        flags = next(run["flags"] for name, run in content["runs"].items() if name.startswith(f"{one['method']}-seed"))
        time = measured.get(benched(flags_of(flags)))
        rows.append(Row(one["method"], one["title"], Figure(**score), difference, time))
    return Experiment(folder.name, "BLEU" if metric == "bleu" else metric, tuple(rows))


def costs(translation: bool) -> dict[str, float]:
    """The time of an update by the bench's rows, in plain ones."""
    path = RESULTS / ("costs.json" if translation else "costs_encoder.json")
    return {row["name"]: row["ratio"] for row in read_json(path)["rows"]}


def benched(flags: Mapping[str, str]) -> str:
    """The bench's row of a training with these flags; all rows of encoders are on all their attention."""
    name = flags.get("--attn-reg", "plain")
    if name == "ad_drop":
        every = flags.get("--ad-drop-cross-tuning") == "off"
        if flags.get("--ad-drop-probe") == "kept":
            name = "kept_use" if every else "kept"
        else:
            name = ATTRIBUTIONS[flags.get("--ad-drop-attribution", "gradient")] + ("" if every else "_cross_tuned")
    return ON_ALL.get(name, name) if flags.get("--attn-sites") == "*" else name


@dataclass(frozen=True)
class Series:
    """Experiments that differ in one value.

    Attributes:
        name: of the folder of their folders.
        parts: by value, the lowest first.
    """

    name: str
    parts: Mapping[str, Experiment]


def read_folder(folder: Path) -> Experiment | Series:
    """The experiment of a folder, or those in it.

    Raises:
        FileNotFoundError, ValueError: see `read_experiment`; or both are there.
    """
    values = [path.parent.name for path in folder.glob("*/results.json")]
    if (folder / "results.json").is_file():
        if values:
            raise ValueError(f"{folder} has results of its own and of {', '.join(values)}")
        return read_experiment(folder)
    values.sort(key=float if all(re.fullmatch(r"[\d.]+", value) for value in values) else str)
    return Series(folder.name, {value: read_experiment(folder / value) for value in values})


def difference_of(row: Row) -> str:
    """The difference to plain training with its interval."""
    return difference_text({"": {"": row.difference}} if row.difference else {}, "", "", 2)


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
        cells = []
        for part in parts:
            row = next((row for row in part.rows if row.title == title), None)
            shown = "" if row is None else difference_of(row) if row.difference else row.score.text(2)
            cells.append(shown)
        lines.append(f"| {title} | {' | '.join([*cells, time])} |")
    return "\n".join(lines)


def candidates_table() -> str:
    """What candidates.json says of plain training: a row for each layer, the mean over its runs."""
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
    """A panel for each value: every method's difference to plain and the 95 % interval."""
    figure = load_matplotlib().figure.Figure(figsize=(2 + 2.3 * len(series.parts), 2.8), layout="constrained")
    titles = list(dict.fromkeys(row.title for part in series.parts.values() for row in part.rows if row.difference))
    panels = figure.subplots(1, len(series.parts), sharey=True, squeeze=False)[0]
    for panel, (value, part) in zip(panels, series.parts.items(), strict=True):
        draw(panel, {titles.index(row.title): row for row in part.rows if row.difference})
        panel.set_title(f"{value}: plain {plain_of(part).score.mean:.1f}", fontsize=9)
        panel.set_xlabel(part.metric)
    panels[0].set_yticks(range(len(titles)), titles)
    panels[0].set_ylim(len(titles) - 0.4, -0.6)  # the first above
    figure.suptitle("difference to plain training, 95 % interval", fontsize=9)
    figure.savefig(path, dpi=150)


def plain_of(experiment: Experiment) -> Row:
    """The row of plain training."""
    return next(row for row in experiment.rows if row.method == "plain")


def draw(panel: Any, rows: Mapping[int, Row]) -> None:
    """The differences of rows, by height."""
    panel.axvline(0, color="0.3", linewidth=1)
    for height, row in rows.items():
        difference = row.difference
        color = "black" if row.score.seeds >= ENOUGH else "0.6"
        if difference.low is not None:
            panel.plot([difference.low, difference.high], [height, height], color=color, linewidth=1.5)
        panel.plot([difference.mean], [height], "o", color=color, markersize=5)
    panel.grid(axis="x", color="0.9")
    panel.set_axisbelow(True)


def plot(experiment: Experiment, path: Path) -> None:
    """A line for each method: its difference to plain and the 95 % interval."""
    rows = [row for row in sorted(experiment.rows, key=lambda row: row.score.mean) if row.difference]
    figure = load_matplotlib().figure.Figure(figsize=(7, 1.2 + 0.32 * len(rows)), layout="constrained")
    panel = figure.subplots()
    draw(panel, dict(enumerate(rows)))
    panel.set_yticks(range(len(rows)), [row.title for row in rows])
    panel.set_ylim(-0.6, len(rows) - 0.4)
    panel.set_xlabel(f"{experiment.metric}, difference to plain training, 95 % interval")
    figure.savefig(path, dpi=150)


def plot_costs(experiment: Experiment, path: Path) -> None:
    """Gain against cost."""
    figure = load_matplotlib().figure.Figure(figsize=(7, 4.2), layout="constrained")
    panel = figure.subplots()
    panel.axhline(0, color="0.3", linewidth=1)
    shown = [row for row in experiment.rows if row.difference and row.time and row.difference.mean >= LOWEST_GAIN]
    for number, row in enumerate(sorted(shown, key=lambda row: row.difference.mean)):
        difference, x = row.difference, row.time
        beside = {"xytext": (-5, 3), "ha": "right"} if x < 1 else {"xytext": (5, 3 if number % 2 else -9)}
        panel.plot([x, x], [difference.low, difference.high], color="0.6", linewidth=1)
        panel.plot([x], [difference.mean], "o", color="black", markersize=5)
        panel.annotate(row.title, (x, difference.mean), textcoords="offset points", fontsize=8, **beside)
    panel.margins(x=0.3)
    panel.set_xlabel("time of an update, in plain ones")
    panel.set_ylabel(f"{experiment.metric}, difference to plain training")
    panel.grid(color="0.9")
    panel.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def plot_rates(experiment: Experiment, path: Path) -> None:
    """Gain against the drop rate, a line for each of `RATED`, whose rows end with the rate in percent."""
    figure = load_matplotlib().figure.Figure(figsize=(7, 3.6), layout="constrained")
    panel = figure.subplots()
    panel.axhline(0, color="0.3", linewidth=1)
    for shift, (method, (title, look)) in enumerate(RATED.items()):
        rows = {int(row.method[-2:]): row for row in experiment.rows if re.fullmatch(rf"{method}_\d\d", row.method)}
        rates = sorted(rows)
        found = [rows[rate].difference for rate in rates]
        means, places = [one.mean for one in found], [rate + 0.25 * (shift - 1) for rate in rates]
        ends = [[one.mean - one.low for one in found], [one.high - one.mean for one in found]]
        panel.errorbar(places, means, ends, label=title, capsize=2, elinewidth=0.8, **look)
    panel.set_xlabel("drop rate, % of the positions")
    panel.set_ylabel(f"{experiment.metric}, difference to plain training")
    panel.legend(frameon=False)
    panel.grid(color="0.9")
    panel.set_axisbelow(True)
    figure.savefig(path, dpi=150)


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


def experiments() -> Iterator[Experiment | Series]:
    """All of them, by name."""
    folders = {path.parent for path in RESULTS.glob("*/results.json")}
    folders |= {path.parent.parent for path in RESULTS.glob("*/*/results.json")}
    for folder in sorted(folders):
        yield read_folder(folder)


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
