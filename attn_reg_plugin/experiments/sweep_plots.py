"""Pictures of a sweep: AD-DROP's figure 6, the gain over plain training by p and q, and figure 4, its distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.sweep_objective import Objective
from attn_reg_plugin.experiments.sweep_space import Dimension
from attn_reg_plugin.pictures import load_matplotlib, save

#: one per group, told apart without color
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def max_abs_scaled(gains: Mapping[Any, float]) -> tuple[dict[Any, float], float]:
    """Every gain divided by the largest absolute one, so that they lie in [-1, 1] and 0 stays 0; and that one."""
    largest = max((abs(gain) for gain in gains.values()), default=0.0)
    return {place: gain / largest if largest else 0.0 for place, gain in gains.items()}, largest


def plot_heat_map(
    x: Dimension, y: Dimension, cells: Mapping[tuple[Any, Any], tuple[float, bool]], title: str, unit: str, path: Path
) -> None:
    """Draw the gains over plain training by two keys: color and brightness MaxAbs scaled, the gain as a number.

    Args:
        x, y: the keys; x to the right, y upwards.
        cells: (value of x, value of y) -> the gain, and whether pruned trials are in it; what isn't there is crossed.
        title: what is shown.
        unit: what the gain is in, such as `accuracy`.
        path: the file to write.

    Raises:
        ValueError: matplotlib is missing.
    """
    matplotlib = load_matplotlib("the picture")
    scaled, largest = max_abs_scaled({place: gain for place, (gain, _) in cells.items()})
    columns, rows = sorted(x.values), sorted(y.values)
    size = (3.2 + 0.62 * len(columns), 1.9 + 0.46 * len(rows))
    figure = matplotlib.figure.Figure(figsize=(max(5.4, size[0]), max(3.8, size[1])), layout="constrained")
    panel = figure.subplots()
    grid = [[scaled.get((a, b), float("nan")) for a in columns] for b in rows]
    image = panel.imshow(grid, cmap="viridis", vmin=-1, vmax=1, origin="lower", aspect="auto")
    for j, b in enumerate(rows):
        for i, a in enumerate(columns):
            _write_cell(panel, i, j, cells.get((a, b)), largest)
    panel.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    panel.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    pruned = "; in ( ): pruned" if any(pruned for _, pruned in cells.values()) else ""
    missing = "; ×: no result" if len(cells) < len(columns) * len(rows) else ""
    panel.set(xlabel=x.key, ylabel=y.key)
    panel.set_title(f"{title}\nMaxAbs scaled{pruned}{missing}", fontsize="medium")
    bar = figure.colorbar(image, ax=panel, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.set_label(f"gain in {unit} / {largest:.3g}")
    save(figure, path)


def _write_cell(panel: Any, column: int, row: int, cell: tuple[float, bool] | None, largest: float) -> None:
    """Write a gain with three digits of the largest one."""
    if cell is None:
        panel.text(column, row, "×", ha="center", va="center", color="black")
        return
    gain, pruned = cell
    digits = max(1, 2 - math.floor(math.log10(largest))) if largest else 1
    text = f"{gain:+.{digits}f}".replace("-", "−")
    color = "white" if gain <= 0.25 * largest else "black"
    panel.text(column, row, f"({text})" if pruned else text, ha="center", va="center", color=color, fontsize="small")


def plot_distribution(groups: Mapping[str, Sequence[float]], objective: Objective, path: Path) -> None:
    """Draw the trials of every group as points beside a box: quartiles, median, and whiskers to the extremes.

    Args:
        groups: title -> values of the objective.
        path: the file to write.

    Raises:
        ValueError: matplotlib is missing.
    """
    matplotlib = load_matplotlib("the picture")
    figure = matplotlib.figure.Figure(figsize=(1.6 + 1.7 * max(2, len(groups)), 4.2), layout="constrained")
    panel = figure.subplots()
    line = {"color": "black", "linewidth": 1.2}
    for i, values in enumerate(groups.values()):
        color = matplotlib.colormaps["viridis"](0.7 * i / max(1, len(groups) - 1))
        panel.boxplot(
            [values], positions=[i - 0.17], widths=0.26, whis=(0, 100), medianprops={**line, "linewidth": 2},
            boxprops=line, whiskerprops=line, capprops=line, manage_ticks=False,
        )  # fmt: skip
        spread = [i + 0.1 + 0.28 * (k * 0.618034 % 1) for k in range(len(values))]
        panel.plot(spread, values, _MARKS[i % len(_MARKS)], color=color, markersize=4.5, alpha=0.75, markeredgewidth=0)
        mean = statistics.fmean(values)
        panel.plot([i - 0.3, i - 0.04], [mean, mean], linestyle=(0, (2, 1.5)), color="black", linewidth=1.2)
    panel.plot([], [], color="black", linewidth=2, label="median")
    panel.plot([], [], color="black", linewidth=1.2, linestyle=(0, (2, 1.5)), label="mean")
    panel.set_xticks(range(len(groups)), [f"{title}\n{len(values)} trials" for title, values in groups.items()])
    panel.set(
        ylabel=f"{objective.metric}, {objective.measured_on.removeprefix('the ')}", xlim=(-0.5, len(groups) - 0.5)
    )
    panel.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper right", ncols=2, fontsize="small")
    save(figure, path)
