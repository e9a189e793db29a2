"""The table of an experiment: a row a method, means over seeds; for json, Markdown, the terminal and HTML."""

import json
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attn_reg_plugin.experiments.report.differences import PLAIN, Difference, differences
from attn_reg_plugin.experiments.report.results import RunResult, lower_is_better, result_of
from attn_reg_plugin.experiments.running.run import HELD_OUT, Run
from attn_reg_plugin.files import write_text
from attn_reg_plugin.labelled import TASKS
from attn_reg_plugin.terminal import show

#: seeds below which a figure is in italics, in a terminal dim
ENOUGH = 3
#: mark of a figure of runs with one output for every example
CONSTANT = "†"
NOTHING = "–"
#: metric -> its name in a header, where it has another
TITLES = {"bleu": "BLEU", "chrf": "chrF"}


class Few(str):
    """The text of a figure that too few seeds stand behind."""

    __slots__ = ()


@dataclass(frozen=True)
class Figure:
    """A mean over seeds and the sample standard deviation; `std` is None for a single seed."""

    mean: float
    std: float | None
    seeds: int = 1

    def text(self, digits: int) -> str:
        """`27.31 ± 0.22`, or `27.31` for a single seed; see `Few`."""
        text = f"{self.mean:.{digits}f}"
        return shade(text if self.std is None else f"{text} ± {self.std:.{digits}f}", self.seeds)


def shade(text: str, seeds: int) -> str:
    """The text of a figure, in italics unless enough seeds stand behind it."""
    return text if seeds >= ENOUGH else Few(text)


def figure_of(values: Iterable[float]) -> Figure:
    """Mean and sample standard deviation."""
    values = list(values)
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Row:
    """A method.

    Attributes:
        seeds: how many runs.
        figures: by subset and metric, the chief one first.
        seconds_per_epoch: elapsed; None where it is unknown, as of a method that doesn't train.
        relative_time: that over the baseline's.
        differences: to the baseline, by subset and metric.
        constant: seeds of the runs that predict one class, or translate into one sentence.
        rising: seeds of the runs that were best in the last epoch.
        idle: seeds of the runs in which the method did not act.
        warming: seeds of the runs that ended while the learning rate rose.
    """

    method: str
    title: str
    seeds: int
    figures: dict[str, dict[str, Figure]]
    epochs: Figure | None = None
    seconds_per_epoch: Figure | None = None
    relative_time: float | None = None
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)
    constant: list[int] = field(default_factory=list)
    rising: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    warming: list[int] = field(default_factory=list)


def summarize(runs: Sequence[RunResult], baseline: str = PLAIN) -> list[Row]:
    """A row a method, in the order of the runs.

    Args:
        runs: finished ones.
        baseline: the method that the others are compared with.
    """
    by_method: dict[str, list[RunResult]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)

    def mean_of(own: Sequence[RunResult], name: str) -> Figure | None:
        known = [value for run in own if (value := getattr(run, name)) is not None]
        return figure_of(known) if known else None

    plain, compared = mean_of(by_method.get(baseline, []), "seconds"), differences(runs, baseline)
    rows = []
    for method, own in by_method.items():
        figures: dict[str, dict[str, Figure]] = {}
        for key in dict.fromkeys(key for run in own for key in run.scores):
            values = [run.scores[key] for run in own if key in run.scores]
            figures.setdefault(key[0], {})[key[1]] = figure_of(values)
        time = mean_of(own, "seconds")
        relative = time.mean / plain.mean if time and plain and plain.mean > 0 else None
        odd = [[run.seed for run in own if getattr(run, what)] for what in ("constant", "rising", "idle", "warming")]
        about = mean_of(own, "epochs"), time, relative, compared.get(method, {}), *odd
        rows.append(Row(method, own[0].title, len(own), figures, *about))
    return rows


def names_of_subsets(runs: Sequence[RunResult]) -> dict[str, str]:
    """The names of subsets beside their metrics in a table; the only test set, or the validation set, has none."""
    tests = {subset for run in runs for subset, metric in run.scores if metric in TITLES}
    task = TASKS.get(str(runs[0].settings.get("task")))
    more = task.more_valid if task else {}
    return {HELD_OUT: "held out", **more, **({test: test for test in tests} if len(tests) > 1 else {})}


def cells(
    rows: Sequence[Row], subsets: Mapping[str, str] | None = None, baseline: str = PLAIN
) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts; the chief metric of each subset has a column of its difference.

    Args:
        subsets: what subsets are called beside the metric; the others have no name.
    """
    keys = list(dict.fromkeys((s, metric) for row in rows for s, metrics in row.figures.items() for metric in metrics))
    chief = next(metric for subset, metric in keys if subset != HELD_OUT)
    compared = [key for key in keys if key[1] == chief and any(row.differences for row in rows)]
    epochs = _differ_in_epochs(rows)
    header = ["method"]
    for subset, metric in keys:
        title = column(subset, metric, subsets or {})
        header += [title, *([f"{title} − {baseline}"] if (subset, metric) in compared else [])]
    header += ["epochs"] * epochs + ["elapsed s/epoch", f"elapsed × {baseline}", "seeds"]
    body = []
    for row in rows:
        line, time = [row.title], row.seconds_per_epoch
        for subset, metric in keys:
            figure, found = row.figures.get(subset, {}).get(metric), row.differences.get(subset, {}).get(metric)
            digits = 3 if lower_is_better(metric) else 2
            mark = f" {CONSTANT}" if row.constant and not metric.endswith("loss") else ""
            line.append(shade(figure.text(digits) + mark, figure.seeds) if figure else NOTHING)
            if (subset, metric) in compared:
                line.append(shade(found.text(digits) + mark, found.seeds) if found else NOTHING)
        line += [shade(f"{row.epochs.mean:.3g}", row.epochs.seeds) if row.epochs else NOTHING] * epochs
        line.append(shade(time.text(2), time.seeds) if time else NOTHING)
        line.append(shade(f"{row.relative_time:.2f}", time.seeds) if time and row.relative_time else NOTHING)
        body.append([*line, str(row.seeds)])
    return header, body


def column(subset: str, metric: str, subsets: Mapping[str, str]) -> str:
    """The head of a score's column."""
    name = TITLES.get(metric, f"best valid {metric}" if metric.endswith("loss") else metric)
    return " ".join(filter(None, [name, subsets.get(subset, "")]))


def _differ_in_epochs(rows: Sequence[Row]) -> bool:
    """Whether patience ended some earlier, or some were not trained."""
    return len({row.epochs.mean if row.epochs else None for row in rows}) > 1


def notes_of(rows: Sequence[Row], baseline: str = PLAIN) -> list[str]:
    """Explain the figures of a table: how they vary, how the differences are drawn, and which say little."""
    notes = ["± standard deviation over seeds"] if any(row.seeds > 1 for row in rows) else []
    found = [one for row in rows for by_metric in row.differences.values() for one in by_metric.values()]
    drawn = sorted({one.drawn for one in found if one.low is not None}, key=len, reverse=True)
    if found:
        how = f" [95 % interval over {', of some figures over '.join(drawn)}]" if drawn else ""
        notes.append(f"− {baseline}: mean difference to the run of the same seed{how}")
    notes += [
        f"{CONSTANT} {row.title}, seeds {', '.join(map(str, row.constant))}: one output for every example (one class, "
        "value or sentence), so a difference says nothing of the method"
        for row in rows
        if row.constant
    ]
    for what, said in (
        ("rising", "runs that were best in the last epoch, so that more may change the order"),
        ("idle", "runs that no method regularized, so that they are plain ones (one epoch of cross-tuning is plain)"),
        ("warming", "runs that ended while the learning rate rose, so that they learnt little: lower --warmup"),
    ):
        if found := [f"{row.title} ({len(getattr(row, what))} of {row.seeds})" for row in rows if getattr(row, what)]:
            notes.append(f"{said}: {'; '.join(found)}")
    notes += ["epochs: how many were trained, the mean over seeds"] * _differ_in_epochs(rows)
    notes.append("elapsed: wall-clock seconds in updates, which other work on the machine lengthens")
    few = f"in italics, in a terminal dim: fewer than {ENOUGH} seeds"
    return notes + [few] * any(row.seeds < ENOUGH for row in rows)


def publish(out: Path, runs: Sequence[Run], notes: Sequence[str], console: Console) -> None:
    """Write results.json and results.md of finished runs, and print the table.

    Args:
        out: the folder of the experiment.
        runs: of `attn-reg compare` or `finetune`, in the order of the rows.
        notes: what the experiment is; what the figures are comes from here.
    """
    results = [result_of(run) for run in runs]
    rows, subsets = summarize(results), names_of_subsets(results)
    table, notes = cells(rows, subsets), [*notes, *notes_of(rows)]
    there = {path.parent.name for path in out.glob("[!._]*/run.json")} - {run.folder.name for run in runs}
    notes += [f"{len(there)} other runs in {out} are not in this table"] if there else []
    content = {
        "task": runs[0].settings["task"],
        "signatures": runs[0].result().get("signatures", []),
        "methods": [asdict(row) for row in rows],
        "runs": {
            f"{run.method}-seed{run.seed}": {**run.settings, **run.result(), **kept_of(result)}
            for run, result in zip(runs, results, strict=True)
        },
    }
    write_results(out / "results.json", content)
    write_text(out / "results.md", markdown(*table, notes))
    page = f"attn-reg report {shlex.quote(str(out))}"
    where = f"all figures: {out / 'results.json'}; table: {out / 'results.md'}; a page: {page}"
    show(console, terminal_table(*table), [*notes, where])


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write a results.json, in which each method and each run is a line."""
    dump = partial(json.dumps, ensure_ascii=False)
    head = "".join(f"{dump(name)}: {dump(content[name])},\n" for name in ("task", "signatures"))
    methods = ",\n".join(map(dump, content["methods"]))
    runs = ",\n".join(f"{dump(name)}: {dump(run)}" for name, run in content["runs"].items())
    write_text(path, f'{{\n{head}"methods": [\n{methods}\n],\n"runs": {{\n{runs}\n}}\n}}\n')


def kept_of(result: RunResult) -> dict[str, Any]:
    """The scores of a run by epoch, and by example as far as `of_kept` reads them: {subset: {metric: text}}."""
    examples: dict[str, dict[str, str]] = {}
    for (subset, metric), one in result.examples.items():
        if one.kept:
            examples.setdefault(subset, {})[metric] = one.kept
    return {"curves": result.curves, "examples": examples}


def markdown(header: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A Markdown table with a list of notes below."""
    import pandas as pd

    shown = [[f"*{cell}*" if isinstance(cell, Few) else cell.replace("|", r"\|") for cell in line] for line in body]
    table = pd.DataFrame(shown, columns=list(header)).to_markdown(index=False, disable_numparse=True)
    return "\n".join([table, "", *(f"- {note}" for note in notes), ""])


def terminal_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    """The table for a terminal; brackets are no markup."""
    table = Table()
    for number, name in enumerate(header):
        table.add_column(Text(name), justify="left" if number == 0 else "right", no_wrap=True)
    for line in body:
        table.add_row(*(Text(cell, style="dim" if isinstance(cell, Few) else "") for cell in line))
    return table
