"""A report: one HTML page with the table, the intervals, the curves and the cost of every experiment.

The page has no script and loads nothing. Pictures are SVG inside it; wide tables scroll in a box of their own.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.report.curves import (
    Estimate,
    draw_curves,
    draw_estimates,
    svg,
)
from attn_reg_plugin.experiments.report.differences import PLAIN
from attn_reg_plugin.experiments.report.results import TRAIN, RunResult, lower_is_better, read_results
from attn_reg_plugin.experiments.report.table import (
    Few,
    Row,
    cells,
    column,
    names_of_subsets,
    notes_of,
    summarize,
)
from attn_reg_plugin.experiments.running.flags import completed
from attn_reg_plugin.files import read_json

#: curves that are drawn, at most: of some tasks a dozen figures are validated
MOST_CURVES = 5

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5c5c5c; --line: #cfcfcf; --paper: #fff; --band: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --soft: #b0b0b0; --line: #4a4a4a; --paper: #181818;
  --band: #242424; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
ul, figcaption { color: var(--soft); font-size: .875rem; padding-left: 1.2rem; } figcaption { padding: .2rem 0; }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; text-align: right; white-space: nowrap; overflow-wrap: normal; }
th { white-space: normal; vertical-align: bottom; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
tbody tr:nth-child(even) { background: var(--band); }
.settings td, .settings th { text-align: left; white-space: normal; }
.settings span { display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; max-width: 36rem; break-inside: avoid; }
img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line); }
summary { cursor: pointer; padding: .3rem 0; }
@media print { body { max-width: none; color: #000; background: #fff; } .box { overflow: visible; border: none; } }
"""


@dataclass(frozen=True)
class Experiment:
    """A folder of runs and the method that the others are compared with.

    Attributes:
        title: above its section.
        runs: finished or not, method by method.
        baseline: a method's name.
        signatures: of the scores.
    """

    title: str
    runs: Sequence[RunResult]
    baseline: str
    signatures: Sequence[str]

    @property
    def finished(self) -> list[RunResult]:
        """The runs that count."""
        return [run for run in self.runs if run.finished]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of its table."""
        return summarize(self.finished, self.baseline)


def read_experiment(folder: Path, baseline: str = PLAIN) -> Experiment:
    """The experiment of a folder; those of one method are averaged.

    Raises:
        FileNotFoundError, ValueError: see `read_results`; or none of the runs is finished.
    """
    runs, published = read_results(folder), folder / "results.json"
    content = read_json(published) if published.is_file() else {}
    order = [str(row.get("method")) for row in content.get("methods", ())]
    runs.sort(key=lambda run: (order.index(run.method) if run.method in order else len(order), run.method, run.seed))
    shared = ("task", "data", "references")
    kinds = {tuple(run.settings.get(name) for name in shared): run.folder.name for run in runs if run.finished}
    if len(kinds) > 1:
        said = f"{' and '.join([*kinds.values()][:2])} are of other tasks or data than each other"
        raise ValueError(f"{folder} cannot be reported as one experiment: {said}")
    if not any(run.finished for run in runs):
        raise ValueError(f"{folder} has {len(runs)} runs, but none of them is finished and has a score")
    title = " ".join(filter(None, [str(runs[0].settings.get("task", "")), f"({folder})"]))
    return Experiment(title, runs, baseline, content.get("signatures") or [])


def page(experiments: Sequence[Experiment], title: str) -> str:
    """The page; the same for the same runs."""
    body = [f"<h1>{escape(title)}</h1>", *(line for one in experiments for line in _section(one))]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _section(experiment: Experiment) -> Iterator[str]:
    rows, baseline = experiment.rows, experiment.baseline
    header, body = cells(rows, names_of_subsets(experiment.finished), baseline)
    yield f"<h2>{escape(experiment.title)}</h2>"
    yield _table(header, body)
    notes = notes_of(rows, baseline)
    if left_out := [f"{run.title} (seed {run.seed})" for run in experiment.runs if not run.finished]:
        notes.append(f"not finished, so left out: {', '.join(left_out)}")
    yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
    parts = {"Differences": _differences, "Curves": _curves, "Cost": _cost}
    for heading, draw in parts.items():
        if pictures := [_picture(figure, caption) for figure, caption in draw(experiment)]:
            yield f'<h3>{heading}</h3><div class="pictures">{"".join(pictures)}</div>'
    yield from _configuration(experiment)


def _table(header: Sequence[str], body: Sequence[Sequence[str]], look: str = "") -> str:
    """A table in a box; figures of few seeds are in italics, and lines break between what two spaces divide."""
    import pandas as pd

    def shown_as(cell: str) -> str:
        if isinstance(cell, Few):
            return f"<i>{escape(cell)}</i>"
        return " ".join(f"<span>{part}</span>" for part in escape(cell).split("  "))

    shown = [[shown_as(cell) for cell in line] for line in body]
    frame = pd.DataFrame(shown, columns=[escape(name) for name in header])
    with pd.option_context("display.max_colwidth", None):
        table = frame.to_html(index=False, escape=False, border=0, classes=look, justify="unset")
    return f'<div class="box">{table}</div>'


def _picture(figure: Any, caption: str) -> str:
    """A figure of HTML with the picture as a data URI."""
    uri = "data:image/svg+xml;base64," + base64.b64encode(svg(figure).encode()).decode()
    said = escape(caption)
    return f'<figure><img src="{uri}" alt="{said}"><figcaption>{said}</figcaption></figure>'


def _differences(experiment: Experiment) -> Iterator[tuple[Any, str]]:
    """A plot for each score: the differences to the baseline and their intervals."""
    names, rows = names_of_subsets(experiment.finished), experiment.rows
    for subset, metric in dict.fromkeys((s, m) for row in rows for s, found in row.differences.items() for m in found):
        lower, estimates = lower_is_better(metric), []
        for row in rows:
            if one := row.differences.get(subset, {}).get(metric):
                ends = (one.mean, one.mean) if one.low is None else (one.low, one.high)
                estimates.append(Estimate(row.title, one.mean, *ends, one.seeds, one.text(3 if lower else 2)))
        title = column(subset, metric, names)
        across = f"{title} − {experiment.baseline}\n({'lower' if lower else 'higher'} is better)"
        said = f"{title}: mean difference to the run of the same seed, 95 % interval"
        yield draw_estimates(estimates, across, 0.0), said


def _curves(experiment: Experiment) -> Iterator[tuple[Any, str]]:
    """A plot for each figure that is validated, and the training loss, by epoch."""
    names = dict.fromkeys(name for run in experiment.finished for name in run.curves)
    chosen = sorted(names, key=lambda name: name.startswith(TRAIN))
    for name in chosen[: MOST_CURVES - 1] + chosen[MOST_CURVES - 1 :][-1:]:
        if any(len(run.curves.get(name, ())) > 1 for run in experiment.finished):
            yield (
                draw_curves(experiment.finished, name),
                f"{name}: mean and one standard deviation over seeds; mark: the best epoch",
            )


def _cost(experiment: Experiment) -> Iterator[tuple[Any, str]]:
    """A plot of the seconds of an epoch over the baseline's."""
    estimates = []
    for row in experiment.rows:
        time, ratio = row.seconds_per_epoch, row.relative_time
        if time and ratio:
            ends = (ratio * (time.mean + sign * (time.std or 0.0)) / time.mean for sign in (-1, 1))
            text = f"{ratio:.2f} ×, {time.mean:.3g} s"
            estimates.append(Estimate(row.title, ratio, *ends, time.seeds, text))
    if len(estimates) > 1:
        across = f"elapsed time of an epoch, × {experiment.baseline}"
        yield draw_estimates(estimates, across, 1.0), "Elapsed seconds of an epoch in updates, ± standard deviation"


def _configuration(experiment: Experiment) -> Iterator[str]:
    """The flags of each method, those that all share, and the scores' signatures."""
    first = {run.method: run for run in reversed(experiment.runs)}
    flags = {method: completed(run.settings.get("flags", {})) for method, run in first.items()}
    one, *others = flags.values()
    shared = {name: value for name, value in one.items() if all(own.get(name) == value for own in others)}
    rows = [
        [run.title, "  ".join(f"--{name} {value}" for name, value in flags[method].items() if name not in shared)]
        for method, run in reversed(first.items())
    ]
    yield f"<h3>Configuration</h3>{_table(['method', 'own flags'], rows, 'settings')}"
    for summary, header, body in (
        ("Flags that all share", ["flag", "value"], [[f"--{name}", value] for name, value in sorted(shared.items())]),
        ("Signatures of the scores", ["signature"], [[text] for text in experiment.signatures]),
    ):
        if body:
            yield f"<details><summary>{summary} ({len(body)})</summary>{_table(header, body, 'settings')}</details>"
