"""What kept and fresh candidates have in common over a training, as lines over epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_reg_plugin.bench.agreement import mean_share
from attn_reg_plugin.pictures import load_matplotlib, save

#: name of a measure -> label, color, dashes, marker; lines that differ in grey too
LINES = {
    "noise_loss": ("two fresh probes of the loss: noise", "0.0", "-", "o"),
    "kept_loss": ("kept, and a fresh probe of the loss", "0.0", "--", "s"),
    "older_loss": ("kept an epoch before, and a fresh probe of the loss", "0.0", ":", "D"),
    "noise_prediction": ("two fresh probes of the prediction: noise", "0.55", "-", "o"),
    "kept_prediction": ("kept, and a fresh probe of the prediction", "0.55", "--", "s"),
    "chance": ("chance", "0.6", (0, (1, 3)), ""),
}


def plot_agreement(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw a panel for each run: the shares over epochs, means over the sites.

    Args:
        runs: title -> what `Agreement.measure` gave in each epoch.
        path: the file to write; its ending names the format.

    Raises:
        ValueError: matplotlib is missing.
    """
    matplotlib = load_matplotlib("the picture")
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    figure = matplotlib.figure.Figure(figsize=(1 + 3.4 * columns, 1.2 + 2.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for panel, (title, epochs) in zip(panels, runs.items(), strict=False):
        for name, (label, color, dashes, marker) in LINES.items():
            points = [_number(mean_share(epoch, name)) for epoch in epochs]
            numbers = [epoch["epoch"] for epoch in epochs]
            panel.plot(numbers, points, color=color, linestyle=dashes, marker=marker, markersize=4, label=label)
        panel.set_title(title, fontsize="small")
        panel.set(xlabel="epoch")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    for panel in panels[len(runs) :]:
        panel.set_visible(False)
    for panel in panels[::columns]:
        panel.set_ylabel("share in common")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    save(figure, path, dpi=90)


def _number(share: float | None) -> float:
    return float("nan") if share is None else share
