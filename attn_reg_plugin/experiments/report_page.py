"""A report: one HTML page with the table, the pictures and the configuration of every experiment.

The page has no script and loads nothing. Pictures are SVG inside it; wide tables scroll in a box of their own.
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from attn_reg_plugin.experiments import report_plots
from attn_reg_plugin.experiments.report_logs import HELD_OUT, TRAIN, VALID
from attn_reg_plugin.experiments.report_plots import difference_text, spread_text
from attn_reg_plugin.experiments.report_runs import Experiment, Group, compared
from attn_reg_plugin.experiments.table import ENOUGH

#: validation curves that are drawn, at most: of some tasks a dozen figures are validated
MOST_CURVES = 4
NOTHING = "–"

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5c5c5c; --few: #8a8a8a; --line: #cfcfcf; --paper: #fff;
  --band: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --soft: #b0b0b0; --few: #8f8f8f; --line: #4a4a4a;
  --paper: #181818; --band: #242424; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; } p { margin: .4rem 0; } nav a { margin-right: 1rem; }
.note, figcaption, caption { color: var(--soft); font-size: .875rem; } caption { text-align: left; padding: .2rem 0; }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; text-align: right; white-space: nowrap; overflow-wrap: normal; }
thead th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, .flags td, .flags th { text-align: left; }
thead th { border-bottom: 1px solid var(--line); } tbody tr:nth-child(even) { background: var(--band); }
.few { color: var(--few); font-style: italic; } .best { font-weight: 700; }
.flags td:last-child { white-space: normal; overflow-wrap: anywhere; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; max-width: 35rem; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: .4rem; }
code { font: .85em/1.5 ui-monospace, monospace; } summary { cursor: pointer; padding: .3rem 0; }
@media print { body { max-width: none; color: #000; background: #fff; } nav { display: none; }
  .box { overflow: visible; border: none; } th, td { white-space: normal; padding: .2rem .4rem; } }
"""


def page(experiments: Sequence[Experiment], title: str) -> str:
    """The page; the same for the same runs.

    Raises:
        ValueError: matplotlib is missing.
    """
    body = [f"<h1>{escape(title)}</h1>"]
    if len(experiments) > 1:
        links = "".join(f'<a href="#e{i}">{escape(one.title)}</a>' for i, one in enumerate(experiments))
        body.append(f"<nav>{links}</nav>")
    for number, experiment in enumerate(experiments):
        body += [f'<section id="e{number}">', *_section(experiment), "</section>"]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _section(experiment: Experiment) -> Iterator[str]:
    yield f"<h2>{escape(experiment.title)}</h2>"
    yield _table(experiment)
    yield from (f'<p class="note">{note}</p>' for note in _notes(experiment))
    for heading, pictures in (
        ("Scores", _scores(experiment)),
        ("Convergence by epoch", _convergence(experiment)),
        ("Drop rate per layer over training", _drop_rates(experiment)),
        ("Cost", _costs(experiment)),
    ):
        shown = list(pictures)
        if shown:
            yield f'<h3>{heading}</h3><div class="pictures">'
            yield from shown
            yield "</div>"
    yield from _configuration(experiment)


def _picture(svg: str, alt: str, caption: str) -> str:
    """A figure with the picture as a data URI."""
    uri = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    return f'<figure><img src="{uri}" alt="{escape(alt)}"><figcaption>{escape(caption)}</figcaption></figure>'


# -- the table ------------------------------------------------------------------------------------------------------


def _table(experiment: Experiment) -> str:
    """A row a method: mean ± standard deviation, the difference to the baseline, time; grey for few seeds."""
    base, scores = experiment.baseline, experiment.scores
    header = ["method", "runs"]
    for score in scores:
        header += [score, f"Δ {base.title}"] if base else [score]
    header += ["epochs", "s/epoch", *([f"time × {base.title}"] if base else [])]
    rows = [_row(experiment, group, scores) for group in experiment.groups]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    return f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(experiment: Experiment, group: Group, scores: Sequence[str]) -> str:
    base = experiment.baseline
    cells = [f"<td>{_count(group)}</td>"]
    for score in scores:
        values, digits = list(group.values(score).values()), report_plots.digits_in(experiment, score)
        cells.append(_cell(values, digits, best=_is_best(experiment, group, score)))
        if base is not None:
            cells.append(_difference(experiment, group, score, digits))
    epochs = [run.figures.epochs for run in group.counted if run.figures.epochs is not None]
    cells.append(f"<td>{statistics.fmean(epochs):.3g}</td>" if epochs else f"<td>{NOTHING}</td>")
    cells.append(_cell(group.seconds, 2))
    if base is not None:
        timed = group.seconds and base.seconds  # a row that doesn't train has no seconds
        ratio = f"{statistics.fmean(group.seconds) / statistics.fmean(base.seconds):.2f}" if timed else NOTHING
        cells.append(f"<td>{ratio}</td>")
    return f'<tr><th scope="row">{escape(group.title)}</th>{"".join(cells)}</tr>'


def _count(group: Group) -> str:
    """How many runs a row has: `3`, `2 + 1 unfinished`, `1 unfinished`."""
    finished = sum(run.finished for run in group.runs)
    parts = [(finished, ""), (len(group.runs) - finished, " unfinished")]
    return " + ".join(f"{number}{what}" for number, what in parts if number)


def _difference(experiment: Experiment, group: Group, score: str, digits: int) -> str:
    """The cell of the difference to the baseline."""
    found = compared(experiment, group, score)
    if found is None:
        return f"<td>{NOTHING}</td>"
    look = ' class="few"' if len(found.values) < ENOUGH else ""
    return f"<td{look}>{difference_text(found, digits)}</td>"


def _cell(values: Sequence[float], digits: int, best: bool = False) -> str:
    if not values:
        return f"<td>{NOTHING}</td>"
    look = "few" if len(values) < ENOUGH else "best" if best else ""
    text = spread_text(values, digits=digits)
    return f'<td class="{look}">{text}</td>' if look else f"<td>{text}</td>"


def _is_best(experiment: Experiment, group: Group, score: str) -> bool:
    means = {
        id(other): statistics.fmean(values)
        for other in experiment.groups
        if len(values := list(other.values(score).values())) >= ENOUGH
    }
    if id(group) not in means or len(means) < 2:
        return False
    choose = min if report_plots.lower_is_better(score) else max
    return means[id(group)] == choose(means.values())


def _notes(experiment: Experiment) -> Iterator[str]:
    """What the numbers are; HTML."""
    yield (
        "Mean ± standard deviation over runs that differ in the seed alone. Grey and in italics: fewer than "
        f"{ENOUGH} runs. Bold: the best mean of the others."
    )
    if experiment.baseline is not None:
        yield (
            f"Δ {escape(experiment.baseline.title)}: the mean difference of runs with the same seed, with its 95 % "
            f"interval {_how_drawn(experiment)}. s/epoch: with fairseq the seconds in updates, without validation and "
            "saving; with Trainer all of the training's."
        )
    if any(len(group.counted) < len(group.runs) for group in experiment.groups):
        yield "Unfinished runs: left out where a method has finished ones."
    for name, signature in dict(experiment.published.get("signatures") or {}).items():
        yield f"{escape(str(name))}: {escape(str(signature))}"


def _how_drawn(experiment: Experiment) -> str:
    """What the bootstraps of the page drew."""
    drawn = {one.drawn for scores in experiment.differences.values() for one in scores.values() if one.interval}
    most = max(drawn, key=len, default="seeds")
    fewer = " (of seeds alone where a score isn't one of examples, or these are gone)"
    return f"in brackets: percentile bootstrap of {most}{fewer if len(drawn) > 1 else ''}; of one seed without it none"


# -- pictures -------------------------------------------------------------------------------------------------------


def _scores(experiment: Experiment) -> Iterator[str]:
    for score in experiment.scores:
        caption = f"{score}: mean, ± one standard deviation, and a point a run. Pale and hatched: under three runs."
        yield _picture(report_plots.bars(experiment, score), f"{score} of each method", caption)
        different = report_plots.differences(experiment, score)
        if different is not None:
            caption = (
                f"{score}: runs against the same seed of {experiment.baseline.title}; the line is the 95 % interval "
                "of the mean, given in brackets."
            )
            yield _picture(different, f"{score}: difference to {experiment.baseline.title}", caption)


def _convergence(experiment: Experiment) -> Iterator[str]:
    names = experiment.curves
    chosen = [name for name in names if name.startswith((VALID, HELD_OUT))][:MOST_CURVES]
    for name in [*chosen, *(name for name in names if name.startswith(TRAIN))]:
        if not any(len(run) > 1 for group in experiment.groups for run in group.curves(name)):
            continue
        svg, left_out = report_plots.convergence(experiment, name)
        caption = f"{name}: mean and one standard deviation over seeds, at the epochs that all have; mark: the best."
        caption += f" The {report_plots.MOST_LINES} best methods; the table has {left_out} more." if left_out else ""
        yield _picture(svg, f"{name} by epoch", caption)


def _drop_rates(experiment: Experiment) -> Iterator[str]:
    for group in [one for one in experiment.groups if one.rates][: report_plots.MOST_LINES]:
        run, rates = group.rates  # type: ignore[misc]
        seed = "" if run.seed is None else f", seed {run.seed}"
        caption = f"{group.title}{seed}: the share of valid positions that were dropped, where the method acted."
        yield _picture(report_plots.drop_rates(rates), f"drop rates of {group.title} over training", caption)


def _costs(experiment: Experiment) -> Iterator[str]:
    svg = report_plots.costs(experiment)
    if svg is not None:
        yield _picture(svg, "time of an epoch of each method", "Seconds of an epoch; dashed: the baseline's mean.")


# -- configuration --------------------------------------------------------------------------------------------------


def _configuration(experiment: Experiment) -> Iterator[str]:
    """The settings that all methods share, what each has of its own, and where the runs are."""
    settings = [group.settings for group in experiment.groups]
    first = settings[0]
    shared = {name: value for name, value in first.items() if all(one.get(name) == value for one in settings)}
    yield "<h3>Configuration</h3>"
    rows = []
    for group in experiment.groups:
        own = {name: value for name, value in group.settings.items() if name not in shared}
        seeds = ", ".join(str(run.seed) for run in group.runs if run.seed is not None) or NOTHING
        rows.append([group.title, seeds, _flags(own)])
    if any(settings):
        yield _plain_table(["method", "seeds", "its own settings"], rows)
    if shared:
        yield f"<details open><summary>Settings that all share ({len(shared)})</summary>"
        yield _plain_table(["setting", "value"], [[name, escape(value)] for name, value in sorted(shared.items())])
        yield "</details>"
    folders = [[group.title, str(run.seed or NOTHING), run.folder] for group in experiment.groups for run in group.runs]
    yield f"<details><summary>Folders of the {len(folders)} runs</summary>"
    yield _plain_table(["method", "seed", "folder"], [[a, b, f"<code>{escape(str(c))}</code>"] for a, b, c in folders])
    yield "</details>"


def _flags(settings: Mapping[str, str]) -> str:
    words = [name if value == "given" else f"{name} {value}" for name, value in settings.items()]
    return " ".join(f"<code>{escape(word)}</code>" for word in words) or NOTHING


def _plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; the last column is HTML."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row[:-1]) + f"<td>{row[-1]}</td>" for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="box"><table class="flags"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
