"""Rebuild what is generated of README.md, and of evidence.md, appendix.md and costs.md in docs, from examples/evidence:

    python scripts/evidence.py

Every folder there with a results.json, as `attn-reg compare` and `finetune` write it, is an experiment; so is one with
such folders in it, which are named for what differs between them, such as the share of noise, or for a further test.
Several test sets have a column each. A table and its caption go between `<!-- table NAME -->` and `<!-- end -->` of a
page, the plot of a larger one is docs/evidence_NAME.png, and the appendix has what the evidence has no place for.
Tables of several experiments are listed in `evidence_claims.py`. costs.json is what `attn-reg bench --json` wrote for a
translation model, costs_encoder.json for an encoder: tables have the time of an update in plain ones.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import evidence_claims
import pandas as pd
from evidence_captions import caption
from evidence_claims import HEADINGS, SUMMARY, address, heading, lines, marked, part_of, places, row_of
from evidence_results import PAGE, RESULTS, ROOT, TEST_SETS, Experiment, Row, Series, experiments
from pages import filled

from attn_reg_plugin.experiments.report.curves import load_matplotlib
from attn_reg_plugin.experiments.report.table import ENOUGH, NOTHING, shade
from attn_reg_plugin.files import read_json, write_text

APPENDIX, *MORE = (ROOT / f"{name}.md" for name in ("docs/appendix", "docs/costs", "README"))
#: of plots: inches, points, inches that a row takes, characters in a line of a method's name, pixels per inch
WIDTH, SIZE, LINE, TITLE, DPI = 5.4, 11, 0.4, 26, 110
#: methods of a table that has a plot, at least
PLOTTED = 4
#: of plain trainings with a planted word in 80 % of the sentences, or less: file of scores -> which
SCORED = {
    "municipality_headquartered": "municipality, headquartered",
    "psychiatric_railway": "psychiatric, railway",
    "middle": "in the middle",
    "share_0.2": "in 20 %",
}


def difference_of(row: Row) -> str:
    """The difference to plain training with its interval."""
    return shade(marked(row.difference), row.difference.seeds) if row.difference else NOTHING


def time_of(row: Row) -> str:
    """The time of an update, in plain ones."""
    return "–" if row.time is None else f"{row.time:.2f}"


def cell(row: Row, most: int) -> str:
    """Write the difference to plain training, or the score, and the number of seeds where it is below the most."""
    text = difference_of(row) if row.difference else row.score.text(2)
    return f"{text} ({row.score.seeds})" if row.score.seeds < most else text


def table(found: Experiment | Series) -> str:
    """Markdown: methods by their mean, the best first; of several experiments in their order, a column for each."""
    if isinstance(found, Experiment):
        rows = sorted(found.rows, key=lambda row: -row.score.mean)
        shown = [[row.title, row.score.text(2), difference_of(row), time_of(row), str(row.score.seeds)] for row in rows]
        return lines(["", found.metric, "− plain [95 %]", "time × plain", "seeds"], shown)
    parts, shown = found.parts.values(), []
    most = max(row.score.seeds for part in parts for row in part.rows)
    times = {row.title: time_of(row) for part in parts for row in part.rows}
    for title, time in times.items():
        rows = [next((row for row in part.rows if row.title == title), None) for part in parts]
        shown.append([title, *(cell(row, most) if row else "" for row in rows), time])
    metrics = [f"{value} ({part.metric})" for value, part in found.parts.items()]
    return lines(["", *metrics, "time × plain"], shown)


def candidates_table() -> str:
    """Tabulate candidates.json of plain training: a row for each layer, the mean over its runs."""
    content = read_json(RESULTS / "candidates.json")
    runs = [layers for name, layers in content["runs"].items() if name.startswith("plain-seed")]
    kinds, figures = ("planted", "other"), ("candidates", "weighted_candidates", "attention")
    titles = ("candidate", "by A ⊙ ∂F/∂A", "attention")
    rows = []
    for layer in range(len(runs[0]["planted"])):
        means = [statistics.fmean(run[kind][layer][figure] for run in runs) for kind in kinds for figure in figures]
        rows.append([str(layer), *(f"{mean:.0%}".replace("%", " %") for mean in means)])
    return lines(["layer", *(f"{kind}: {title}" for kind in kinds for title in titles)], rows)


def scores_table() -> str:
    """Tabulate how often each score of whole tokens chooses the planted word, the mean over runs."""
    means = {
        of: pd.DataFrame(read_json(RESULTS / "scores" / f"{name}.json")).mean(axis=1) for name, of in SCORED.items()
    }
    rows = [[score, *(f"{value:.0f} %" for value in values)] for score, *values in pd.DataFrame(means).itertuples()]
    return lines(["", *means], rows)


def attack_table(found: Mapping[str, Experiment | Series]) -> str:
    """Tabulate the attacks: a row for each share of poisoned sentences and method, means over its seeds."""
    rows = []
    for variant, title in TEST_SETS["tokens_variants"].items():
        runs = pd.DataFrame(read_json(RESULTS / "attack" / f"{variant}.json")).T
        means = runs.groupby(lambda name: name.rpartition("-seed")[0]).agg(["mean", "count"])
        for one in part_of(found, "tokens_variants", title).rows:
            cells = [f"{means.loc[one.method, (kind, 'mean')]:.1f} %" for kind in ("attack", "without")]
            seeds = means.loc[one.method, ("attack", "count")]
            rows.append([title, one.title, *cells, difference_of(one), f"{seeds:.0f}"])
    header = ["", "", "called positive with the trigger", "without", "accuracy − plain [95 %]", "seeds"]
    return lines(header, rows)


def benched_rows(name: str) -> dict[str, dict[str, Any]]:
    """Rows of a benchmark that are methods, not parts of a step, by the name that `attn-reg bench` knows."""
    rows = read_json(RESULTS / f"{name}.json")["rows"]
    return {row["name"]: row for row in rows if row["name"] != "plain" and row.get("part_of") is None}


def costs_table(name: str) -> str:
    """Tabulate what `attn-reg bench --json` wrote: time, with the range of the repeats, and memory."""
    rows = []
    for method, row in benched_rows(name).items():
        ratios = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
        rows.append([f"`{method}`", row["title"], f"{row['ratio']:.2f}", ratios, f"{row['memory_ratio']:.2f}"])
    return lines(["row", "", "time × plain", "of the repeats", "peak memory × plain"], rows)


def costs_by_method() -> str:
    """Put the benchmarks side by side, a row for each method."""
    benches = {"CPU, Transformer": "costs", "CPU, BERT": "costs_encoder", "GPU, Transformer": "costs_gpu"}
    found = {title: benched_rows(name) for title, name in benches.items()}
    titles = {method: row["title"] for rows in found.values() for method, row in rows.items()}
    shown = []
    for method in sorted(titles):
        rows = [bench.get(method) for bench in found.values()]
        figures = [f"{row[kind]:.2f}" if row else "" for kind in ("ratio", "memory_ratio") for row in rows]
        shown.append([f"`{method}`", titles[method], *figures])
    return lines(["row", "", *(f"{kind}, {title}" for kind in ("time", "memory") for title in found)], shown)


def tables(found: Sequence[Experiment | Series]) -> dict[str, str]:
    """All tables with their captions, by their name; `experiments` are those that docs/evidence.md has no place for."""
    made = {one.name: f"{table(one)}\n\n{caption(one)}" for one in found}
    made |= evidence_claims.tables({one.name: one for one in found}) | {"candidates": candidates_table()}
    made |= {"scores": scores_table(), "attack": attack_table({one.name: one for one in found})}
    made |= {"costs_by_method": costs_by_method()} | {
        path.stem: costs_table(path.stem) for path in sorted(RESULTS.glob("costs*.json"))
    }
    shown, sections = places(PAGE), []
    for name in sorted((one.name for one in found), key=lambda name: list(HEADINGS).index(name)):
        text = f"[Table]({address(name)}), of" if name in shown else made[name]
        sections.append(f"### {HEADINGS[name]}\n\n{text} [{name}](../examples/evidence/{name}.yaml)")
        if name in plotted(found):
            sections.append(f"![Plot of {name}](evidence_{name}.png)")
    return made | {"experiments": "\n\n".join(sections)}


def plotted(found: Iterable[Experiment | Series]) -> dict[str, Experiment | Series]:
    """Select those with a plot, by name: where few methods are compared the table says it all."""
    parts = {one.name: one.parts.values() if isinstance(one, Series) else [one] for one in found}
    methods = {name: {row.title for part in own for row in part.rows} for name, own in parts.items()}
    return {one.name: one for one in found if len(methods[one.name]) >= PLOTTED}


def plot(found: Experiment | Series, path: Path) -> None:
    """Draw a panel for each part, below the other: every method's difference to plain and the 95 % interval."""
    series = isinstance(found, Series)
    parts = found.parts if series else {"": found}
    rows = [row for part in parts.values() for row in part.rows if row.difference]
    titles = list(dict.fromkeys(row.title for row in (rows if series else sorted(rows, key=lambda r: -r.score.mean))))
    figure, panels = drawing(0.3 + (0.9 + LINE * len(titles)) * len(parts), len(parts))
    for panel, (value, part) in zip(panels, parts.items(), strict=True):
        draw(panel, titles, {titles.index(row.title): row for row in part.rows if row.difference})
        mean = next(row for row in part.rows if row.method == "plain").score.mean
        panel.set_title(f"{value}{': ' * series}plain {mean:.1f}")
        panel.set_xlabel(part.metric)
    figure.suptitle("difference to plain training, 95 % interval")
    figure.savefig(path, dpi=DPI)


def plot_summary(found: Mapping[str, Experiment | Series], path: Path) -> None:
    """Draw the rows of the summary, those in BLEU above those in points of percent."""
    placed = [place for places in SUMMARY.values() for place in places]
    shown = [(re.sub(r",[^()]*(?= \(|$)", "", heading(*place[:2]), count=1), *row_of(found, place)) for place in placed]
    kinds = {"BLEU": True, "points of percent": False}
    counts = [sum((part.metric == "BLEU") is kind for _, part, _ in shown) for kind in kinds.values()]
    figure, panels = drawing(1.8 + 1.8 * LINE * sum(counts), 2, counts)
    for panel, (label, kind) in zip(panels, kinds.items(), strict=True):
        rows = [(f"{title}: {row.title}", row) for title, part, row in shown if (part.metric == "BLEU") is kind]
        draw(panel, [title for title, _ in rows], dict(enumerate(row for _, row in rows)))
        panel.set_xlabel(label)
    figure.suptitle("difference to plain training, 95 % interval")
    figure.savefig(path, dpi=DPI)


def drawing(height: float, panels: int, ratios: Sequence[int] | None = None) -> tuple[Any, Any]:
    """A figure and its panels, one below the other, whose text is legible in a column of a telephone's width."""
    matplotlib = load_matplotlib()
    with matplotlib.rc_context({"font.size": SIZE}):
        figure = matplotlib.figure.Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots(panels, 1, squeeze=False, height_ratios=ratios)[:, 0]


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


def main() -> None:
    """Rebuild."""
    found = list(experiments())
    made = tables(found)
    for path in (PAGE, APPENDIX, *MORE):
        write_text(path, filled(path.read_text(encoding="utf-8"), made))
    for name, one in plotted(found).items():
        plot(one, PAGE.with_name(f"evidence_{name}.png"))
    plot_summary({one.name: one for one in found}, PAGE.with_name("evidence_summary.png"))


if __name__ == "__main__":
    main()
