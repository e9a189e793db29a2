"""The pictures of a report, as SVG: bars, convergence, drop rates, cost.

They are drawn for a column of 300 to 560 pixels, and to be read in grey: lines differ in dashes, marks and lightness,
bars of fewer than three seeds are pale and hatched.
"""

from __future__ import annotations

import io
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from attn_reg_plugin.experiments.curve_plot import limits
from attn_reg_plugin.experiments.drop_rates import Rates
from attn_reg_plugin.experiments.report_logs import HELD_OUT, VALID, lower_is_better, mean_curve
from attn_reg_plugin.experiments.report_runs import Compared, Experiment, Group, compared
from attn_reg_plugin.experiments.table import ENOUGH
from attn_reg_plugin.pictures import load_matplotlib

WIDTH = 4.3  # inches
#: characters of a method's title in a line
TITLE = 18
DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "X", "P")
STRONG, PALE = "#31688e", "#c8c8c8"
#: lines in one picture, at most; the best are drawn
MOST_LINES = 10
#: layers with an entry in a legend each; more have a color bar
MOST_LAYERS = 8
_LOOK = {"font.size": 9, "svg.hashsalt": "attn_reg", "axes.spines.top": False, "axes.spines.right": False}


def draw(height: float, fill: Callable[[ModuleType, Any], None]) -> str:
    """An SVG of `WIDTH` by `height` inches, the same for the same data.

    Args:
        fill: draws into (matplotlib, figure).

    Raises:
        ValueError: matplotlib is missing.
    """
    matplotlib = load_matplotlib("a report")
    with matplotlib.rc_context(_LOOK):
        figure = matplotlib.figure.Figure(figsize=(WIDTH, height), layout="constrained")
        fill(matplotlib, figure)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def style(matplotlib: ModuleType, number: int, of: int) -> dict[str, Any]:
    """How the line `number` of `of` is drawn."""
    color = matplotlib.colormaps["viridis"](0.8 * number / max(1, of - 1))
    return {"color": color, "linestyle": DASHES[number % len(DASHES)], "marker": MARKS[number % len(MARKS)]}


def _bars(
    panel: Any,
    titles: Sequence[str],
    values: Sequence[Sequence[float]],
    texts: Sequence[str],
    intervals: Sequence[tuple[float, float] | None] = (),
) -> None:
    """A horizontal bar a method from zero to its mean, a line of ± one standard deviation, a point a run, a text.

    Args:
        intervals: one a method; those that are known take the place of the standard deviation.
    """
    for place, (runs, text) in enumerate(zip(values, texts, strict=True)):
        mean, enough = statistics.fmean(runs), len(runs) >= ENOUGH
        spread = statistics.stdev(runs) if len(runs) > 1 else 0.0
        looks = {"color": STRONG} if enough else {"color": PALE, "hatch": "////", "edgecolor": "#909090"}
        panel.barh(place, mean, height=0.62, **looks)
        interval = intervals[place] if intervals else None
        low, high = interval or (mean - spread, mean + spread)
        if high > low:
            panel.plot([low, high], [place, place], "|-", color="black", markersize=9, linewidth=1.2)
        points = {"color": "white", "edgecolor": "black", "linewidth": 0.8, "s": 14, "zorder": 3}
        panel.scatter(runs, np.linspace(place - 0.16, place + 0.16, len(runs)) if len(runs) > 1 else [place], **points)
        panel.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
    panel.axvline(0, color="black", linewidth=1)
    panel.set_yticks(range(len(titles)), [textwrap.fill(title, TITLE) for title in titles])
    panel.xaxis.get_major_locator().set_params(nbins=5)
    panel.set_ylim(len(titles) - 0.5, -0.5)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def _height(groups: Sequence[Group]) -> float:
    """Inches for a bar a method, and a title that may take several lines."""
    lines = [len(textwrap.wrap(group.title, TITLE)) for group in groups]
    return 0.75 + max(0.34, 0.19 * max(lines)) * len(lines)


def bars(experiment: Experiment, score: str) -> str:
    """A bar a method from zero: mean over seeds, ± one standard deviation, a point a run."""
    shown = [(group, list(group.values(score).values())) for group in experiment.groups if group.values(score)]

    def fill(matplotlib: ModuleType, figure: Any) -> None:
        panel = figure.subplots()
        values = [runs for _, runs in shown]
        texts = [spread_text(runs, digits=digits_in(experiment, score)) for runs in values]
        _bars(panel, [group.title for group, _ in shown], values, texts)
        panel.set_xlabel(score)

    return draw(_height([group for group, _ in shown]), fill)


def differences(experiment: Experiment, score: str) -> str | None:
    """A bar a method: how much it differs from the baseline, seed by seed; None where nothing can be compared."""
    baseline = experiment.baseline
    shown = [(group, found) for group in experiment.groups if (found := compared(experiment, group, score))]
    if not shown or baseline is None:
        return None

    def fill(matplotlib: ModuleType, figure: Any) -> None:
        panel = figure.subplots()
        texts = [difference_text(one, digits_in(experiment, score), "\n") for _, one in shown]
        titles, values = [group.title for group, _ in shown], [one.values for _, one in shown]
        _bars(panel, titles, values, texts, [one.interval for _, one in shown])
        better = "lower is better" if lower_is_better(score) else "higher is better"
        panel.set_xlabel(f"{score}: difference to {baseline.title}\n({better})")

    return draw(_height([group for group, _ in shown]) + 0.15, fill)


def costs(experiment: Experiment) -> str | None:
    """A bar a method: seconds per epoch over those of the baseline; None where times are unknown."""
    baseline = experiment.baseline
    shown = [group for group in experiment.groups if group.seconds]
    if baseline is None or not baseline.seconds or len(shown) < 2:
        return None
    whole = statistics.fmean(baseline.seconds)

    def fill(matplotlib: ModuleType, figure: Any) -> None:
        panel = figure.subplots()
        values = [[seconds / whole for seconds in group.seconds] for group in shown]
        texts = [
            f"{statistics.fmean(runs):.2f} ×, {statistics.fmean(group.seconds):.3g} s"
            for group, runs in zip(shown, values, strict=True)
        ]
        _bars(panel, [group.title for group in shown], values, texts)
        panel.axvline(1, color="black", linewidth=1, linestyle="--")
        panel.set_xlabel(f"time of an epoch, × that of {baseline.title}")

    return draw(_height(shown), fill)


def convergence(experiment: Experiment, curve: str) -> tuple[str, int]:
    """A curve by epoch, a line a method: the mean over seeds, ± one standard deviation; and how many are left out."""
    drawn = [(group, mean_curve(group.curves(curve))) for group in experiment.groups if group.curves(curve)]
    lower = lower_is_better(curve)
    ranked = sorted(
        ((group, values) for group, (_, values, _) in drawn if len(values)),
        key=lambda one: (one[0] is not experiment.baseline, one[1].min() if lower else -one[1].max()),
    )
    best = {id(group) for group, _ in ranked[:MOST_LINES]}
    kept = [(group.title, means) for group, means in drawn if id(group) in best]

    def fill(matplotlib: ModuleType, figure: Any) -> None:
        panel = figure.subplots()
        for number, (title, (epochs, values, spread)) in enumerate(kept):
            look = style(matplotlib, number, len(kept))
            mark = look.pop("marker")
            top = int(values.argmin() if lower else values.argmax())
            panel.plot(epochs, values, linewidth=1.6, **look)
            if spread.any():
                panel.fill_between(epochs, values - spread, values + spread, color=look["color"], alpha=0.15, lw=0)
            panel.plot(epochs[top], values[top], mark, color=look["color"], markersize=6)
            panel.plot([], [], linewidth=1.6, marker=mark, label=title, **look)
        if lower and curve.startswith((VALID, HELD_OUT)):
            panel.set_ylim(*limits([list(zip(epochs, values, strict=True)) for _, (epochs, values, _) in kept]))
        panel.set(xlabel="epoch", ylabel=f"{curve} as logged" if "loss" in curve else curve)
        if max(epochs.max() for _, (epochs, *_) in kept) > 2:
            panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)

    return draw(2.9 + 0.18 * ((len(kept) + 1) // 2), fill), len(drawn) - len(kept)


def drop_rates(rates: Mapping[str, Rates]) -> str:
    """The drop rate of every layer over training, as in AttendOut's figure 3: a panel for each kind of attention."""
    kinds = list(dict.fromkeys(site.partition("[")[0] for site in rates))
    sites = {kind: [site for site in rates if site.partition("[")[0] == kind] for kind in kinds}
    many = max(map(len, sites.values())) > MOST_LAYERS

    def fill(matplotlib: ModuleType, figure: Any) -> None:
        panels = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
        for panel, kind in zip(panels, kinds, strict=True):
            for number, site in enumerate(sites[kind]):
                look = style(matplotlib, number, len(sites[kind]))
                mark = look.pop("marker")
                series = rates[site].thinned(60)
                layer = site.partition("[")[2].replace("]", "")
                every = max(1, len(series.drops) // 6)
                panel.plot(
                    series.middles,
                    series.drops,
                    label=None if many else f"layer {layer}",
                    linewidth=1.4,
                    marker=None if many else mark,
                    markevery=every,
                    markersize=4,
                    **look,
                )
            panel.set(title=kind.replace(".", " "), ylabel="drop rate", ylim=(-0.02, 1.02))
            panel.grid(alpha=0.3)
            if not many:
                panel.legend(fontsize="small", ncols=2, framealpha=0.8)
        panels[-1].set_xlabel("updates")
        if many:
            scale = matplotlib.colors.Normalize(0, (max(map(len, sites.values())) - 1) / 0.8)
            shades = matplotlib.cm.ScalarMappable(scale, "viridis")
            bar = figure.colorbar(shades, ax=list(panels), label="layer", boundaries=None)
            bar.ax.set_ylim(0, max(map(len, sites.values())) - 1)

    return draw(0.5 + 1.75 * len(kinds), fill)


def spread_text(values: Sequence[float], signed: bool = False, digits: int | None = None) -> str:
    """`27.31 ± 0.22`, or `27.31` of a single run; the digits fit the size of the values."""
    mean = statistics.fmean(values)
    digits = digits_of([mean]) if digits is None else digits
    text = f"{mean:{'+' if signed else ''}.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def difference_text(found: Compared, digits: int, between: str = " ") -> str:
    """`+2.10 [+0.35, +3.91]` where the interval is known, else `+2.10 ± 0.22`."""
    if found.interval is None:
        return spread_text(found.values, True, digits)
    low, high = found.interval
    return f"{statistics.fmean(found.values):+.{digits}f}{between}[{low:+.{digits}f}, {high:+.{digits}f}]"


def digits_of(values: Sequence[float]) -> int:
    """Digits after the point that values are shown with: 2, or more of small ones."""
    largest = max((abs(value) for value in values), default=0.0)
    return 2 if largest >= 10 or largest == 0 else 3 if largest >= 0.1 else 4


def digits_in(experiment: Experiment, score: str) -> int:
    """The same for all methods."""
    return digits_of([value for group in experiment.groups for value in group.values(score).values()])
