"""The plots of an experiment: curves over training, a line a method; and estimates, a row a method.

Lines differ in dashes, marks and lightness, so that they can be told apart in grey.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attn_reg_plugin.experiments.report.results import VALID, RunResult, lower_is_better
from attn_reg_plugin.experiments.report.table import ENOUGH

if TYPE_CHECKING:
    import pandas as pd

DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "X", "P")
#: inches and points: a column of 370 pixels shows the text in 14 pixels
WIDTH, SIZE = 4.6, 12.5
#: characters of a name in a line, and in half of one
LINE, HALF = 42, 17
_LOOK = {"font.size": SIZE, "axes.spines.top": False, "axes.spines.right": False}
_INK = "#31688e"

#: a value by epoch
Curve = Mapping[float, float]


def load_matplotlib() -> ModuleType:
    """matplotlib, without the messages that fairseq opens the log to; a ModuleNotFoundError where it is missing."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    import matplotlib.figure

    return matplotlib


def plain_text(text: str) -> str:
    """A text of a user's as matplotlib shows it: dollars begin no formula."""
    return text.replace("$", r"\$")


def mean_curve(curves: Sequence[Curve]) -> pd.DataFrame:
    """Mean and standard deviation over runs (columns), at the places that all of them have (rows)."""
    import pandas as pd

    runs = pd.DataFrame([dict(curve) for curve in curves]).dropna(axis="columns").sort_index(axis="columns")
    return pd.DataFrame({"mean": runs.mean(), "std": runs.std().fillna(0.0)})


def limits(curves: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Where the axis of losses begins and ends: above the ends of all curves, and near enough to see how they differ.

    Args:
        curves: the values of each, in their order.
    """
    losses = [value for curve in curves for value in curve if math.isfinite(value)]
    last = [curve[-1] for curve in curves if math.isfinite(curve[-1])]
    low, high = min(losses), max(last, default=max(losses))
    top = min(max(losses), high + max(high - low, 0.1 * abs(high)))
    margin = 0.05 * ((top - low) or abs(low) or 1.0)
    return low - margin, top + margin


def draw_curves(runs: Sequence[RunResult], name: str) -> Any:
    """A figure of a curve in the logs of runs, such as `validation nll_loss`, a line a method.

    A line is the mean over runs, in a band of ± one standard deviation; its best epoch is marked.
    """
    by_title: dict[str, list[Curve]] = {}
    for run in runs:
        if curve := run.curves.get(name):
            by_title.setdefault(run.title, []).append(curve)
    means, lower = {title: mean_curve(curves) for title, curves in by_title.items()}, lower_is_better(name)
    lines = {title: found for title, found in means.items() if len(found)}  # without epochs that all its runs have
    columns = 2 if all(len(title) <= HALF for title in lines) else 1
    matplotlib = load_matplotlib()
    with matplotlib.rc_context(_LOOK):
        size = WIDTH, 3.0 + 0.24 * math.ceil(len(lines) / columns)
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for number, (title, found) in enumerate(lines.items()):
            color = matplotlib.colormaps["viridis"](0.8 * number / max(1, len(lines) - 1))
            look = {"linestyle": DASHES[number % len(DASHES)], "marker": MARKS[number % len(MARKS)], "color": color}
            mean, std = found["mean"], found["std"]
            best, shown = mean.argmin() if lower else mean.argmax(), plain_text(textwrap.fill(title, LINE))
            axes.plot(mean.index, mean, markevery=[best], markersize=6, linewidth=1.7, label=shown, **look)
            if std.any():
                axes.fill_between(mean.index, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)
        axes.set(xlabel="epoch", ylabel=plain_text(name))
        if lines and lower and name.startswith(VALID):
            axes.set_ylim(limits([found["mean"].tolist() for found in lines.values()]))
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns, frameon=False)
    return figure


@dataclass(frozen=True)
class Estimate:
    """A row of a plot of estimates: a mean, the ends of a line around it, and a text.

    Attributes:
        seeds: runs behind it; below `ENOUGH` the mark is hollow.
    """

    name: str
    mean: float
    low: float
    high: float
    seeds: int
    text: str


def draw_estimates(estimates: Sequence[Estimate], across: str, reference: float) -> Any:
    """A figure with a row for each estimate: its name, a mark, a line from end to end, and its text.

    Args:
        across: what the axis is.
        reference: where the vertical line is.
    """
    matplotlib = load_matplotlib()
    with matplotlib.rc_context(_LOOK):
        texts = [one.name + ("   " if len(one.name) + len(one.text) < LINE else "\n") + one.text for one in estimates]
        places = list(itertools.accumulate(1.0 + 0.5 * text.count("\n") for text in texts))
        figure = matplotlib.figure.Figure(figsize=(WIDTH, 0.9 + 0.6 * places[-1]), layout="constrained")
        axes = figure.subplots()
        axes.axvline(reference, color="black", linewidth=1)
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the lines of the grid
        where = {"transform": axes.get_yaxis_transform(), "va": "bottom", "bbox": paper, "fontsize": SIZE - 1}
        for place, one, text in zip(places, estimates, texts, strict=True):
            fill = _INK if one.seeds >= ENOUGH else "white"
            axes.plot([one.low, one.high], [place, place], "|-", color=_INK, markersize=9, linewidth=1.8)
            axes.plot(one.mean, place, "o", color=_INK, markerfacecolor=fill, markeredgewidth=1.8, markersize=8)
            axes.text(0, place - 0.24, plain_text(text), **where)
        axes.set(ylim=(places[-1] + 0.5, 0), xlabel=plain_text(across))
        axes.yaxis.set_visible(False)
        axes.spines["left"].set_visible(False)
        axes.xaxis.get_major_locator().set_params(nbins=5)
        axes.grid(axis="x", alpha=0.3)
    return figure


def svg(figure: Any) -> str:
    """A figure as SVG, the same for the same data."""
    content = io.StringIO()
    with load_matplotlib().rc_context({"svg.hashsalt": "attn_reg"}):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue()
