"""Learning curves of a comparison: the validation loss after every epoch, one line per method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.pictures import load_matplotlib, save

#: the name of the picture in the folder of a comparison
CURVES = "curves.png"
#: lines that differ in print too: (dashes, marker), and colors from dark to light beside them
_STYLES = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ((0, (5, 1, 1, 1, 1, 1)), "v"), ((0, (1, 1)), "x")]

Curve = list[tuple[int, float]]


def validation_curve(logs: Sequence[TrainingLog], loss: str) -> Curve:
    """Epoch and mean validation loss over the runs, for the epochs that all of them have.

    Args:
        logs: one per seed.
        loss: such as `nll_loss`.
    """
    runs = [
        {epoch: figures[loss] for (epoch, _), figures in sorted(log.validations.items()) if loss in figures}
        for log in logs
    ]
    epochs = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    return [(epoch, statistics.fmean(run[epoch] for run in runs)) for epoch in epochs]


def limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Where the axis begins and ends: high enough for the ends of all curves, low enough to see how they differ."""
    losses = [value for curve in curves for _, value in curve if math.isfinite(value)]
    last = [curve[-1][1] for curve in curves if math.isfinite(curve[-1][1])]
    low, high = min(losses), max(last, default=max(losses))
    top = min(max(losses), high + max(high - low, 0.1 * abs(high)))
    margin = 0.05 * ((top - low) or abs(low) or 1.0)
    return low - margin, top + margin


def plot_validation(logs: Mapping[str, Sequence[TrainingLog]], loss: str, path: Path) -> bool:
    """Draw the validation loss by epoch; a larger mark shows the lowest point of each line.

    Args:
        logs: by the title of a method, one per seed.
        loss: such as `nll_loss`.
        path: the file to write.

    Returns:
        Whether there was anything to draw.

    Raises:
        ValueError: matplotlib is missing.
    """
    curves = {title: curve for title, runs in logs.items() if (curve := validation_curve(runs, loss))}
    if not curves:
        return False
    matplotlib = load_matplotlib("the picture")
    figure = matplotlib.figure.Figure(figsize=(7.2, 4.4), layout="constrained")
    panel = figure.subplots()
    for i, (title, curve) in enumerate(curves.items()):
        dashes, marker = _STYLES[i % len(_STYLES)]
        color = matplotlib.colormaps["viridis"](0.8 * i / max(1, len(curves) - 1))
        epochs, losses = zip(*curve, strict=True)
        best = losses.index(min(losses))
        panel.plot(epochs, losses, linestyle=dashes, color=color, linewidth=1.8, label=title)
        panel.plot(epochs[best], losses[best], marker=marker, color=color, markersize=7, linestyle="none")
    low, high = limits(list(curves.values()))
    panel.set(xlabel="epoch", ylabel=f"validation {loss}", ylim=(low, high))
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    panel.legend(title="mark: lowest loss")
    save(figure, path)
    return True
