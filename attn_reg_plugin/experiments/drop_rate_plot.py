"""The drop rate of every layer over training, drawn as in AttendOut's figure 3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attn_reg_plugin.experiments.drop_rates import Fit, Rates
from attn_reg_plugin.pictures import load_matplotlib, save


def plot_rates(rates: Mapping[str, Rates], fits: Mapping[str, Fit], path: Path) -> None:
    """Draw a panel for each kind of attention and in it a line per layer: the logged rates pale, the curve strong.

    Args:
        rates, fits: by site.
        path: the file to write; its ending names the format, such as .png or .pdf.

    Raises:
        ValueError: matplotlib is missing, or cannot write that format.
    """
    matplotlib = load_matplotlib("--plot")
    kinds = list(dict.fromkeys(site.partition("[")[0] for site in rates))
    figure = matplotlib.figure.Figure(figsize=(1 + 5 * len(kinds), 4), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        sites = [site for site in rates if site.partition("[")[0] == kind]
        for i, site in enumerate(sites):
            color = matplotlib.colormaps["viridis"](0.85 * i / max(1, len(sites) - 1))
            panel.plot(rates[site].middles, rates[site].drops, color=color, alpha=0.5, linewidth=1)
            updates, drops = zip(*fits[site].curve.points, strict=True)
            layer = site.partition("[")[2].rstrip("]")
            panel.plot(updates, drops, color=color, linewidth=2, label=f"layer {layer}")
        panel.set(title=kind, xlabel="updates")
        panel.legend(fontsize="small", ncols=1 + len(sites) // 7)
    panels[0].set(ylabel="drop rate", ylim=(0, 1))
    save(figure, path)
