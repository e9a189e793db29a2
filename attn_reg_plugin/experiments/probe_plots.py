"""The pictures of `attn-reg probe`: loss with positions dropped (AD-DROP's figure 2), and maps (its figure 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.attention.masks import candidate_region
from attn_reg_plugin.experiments.probe_lens import AttentionMap, Point, Subject
from attn_reg_plugin.pictures import load_matplotlib, save

#: which positions are dropped -> how the line looks, in grey too
LOOKS: dict[str, dict[str, Any]] = {
    "high": {"color": "#440154", "linestyle": "-", "marker": "o"},
    "low": {"color": "#2a9d6f", "linestyle": "--", "marker": "s"},
    "random": {"color": "#6c8ebf", "linestyle": "-.", "marker": "^"},
}
NOTHING = {"color": "black", "linestyle": ":"}
AVERAGES = ("mean", "layers", "heads")
#: what an attribution is, for the title of its map
MEANINGS = {"gradient": "∂F/∂A", "integrated": "A ⊙ ∫ ∂F/∂A", "attention": "A"}
#: tokens on an axis, at most, and inches of a cell
LONGEST, CELL = 128, 0.2
#: pairs of maps in one column; more are set in two
MOST_BELOW = 6


def plot_dropping(points: Sequence[Point], subject: Subject, path: Path) -> None:
    """Loss and score by the ratio of dropped positions; a line each for high, low and random ones."""
    nothing = next(point for point in points if point.which == "none")
    lines = {which: [point for point in points if point.which == which] for which in LOOKS}
    axis = "p, the share of each row that is dropped"
    if nothing.q != 1:
        axis = f"p, the candidates of each row (dropped with probability {nothing.q:g})"
    curves = {which: [(0.0, nothing), *((point.p, point) for point in line)] for which, line in lines.items() if line}
    _plot(curves, nothing, subject, axis, path)


def plot_checkpoints(by_checkpoint: Mapping[int, Sequence[Point]], subject: Subject, unit: str, path: Path) -> None:
    """Loss and score by epoch (or update), with positions of one ratio dropped and with none."""
    curves: dict[str, list[tuple[float, Point]]] = {}
    for number, points in by_checkpoint.items():
        for point in points:
            curves.setdefault(point.which, []).append((number, point))
    curves["none"] = curves.pop("none")  # drawn last: it may lie under another
    _plot(curves, None, subject, unit, path)


def _plot(
    curves: Mapping[str, Sequence[tuple[float, Point]]],
    nothing: Point | None,
    subject: Subject,
    axis: str,
    path: Path,
) -> None:
    matplotlib = load_matplotlib("a picture of attn-reg probe")
    panels = [(f"loss, nats per {subject.unit}", "loss")]
    panels += [(f"{subject.score}, %", "score")] if subject.score else []
    if subject.score is None:
        panels = [("squared error", "loss")]
    figure = matplotlib.figure.Figure(figsize=(4.4 * len(panels), 3.6), layout="constrained")
    for panel, (label, field) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for which, line in curves.items():
            looks = LOOKS.get(which, {**NOTHING, "marker": "x"})
            name = "nothing dropped" if which == "none" else f"{which} attribution" if which != "random" else which
            panel.plot([x for x, _ in line], [getattr(point, field) for _, point in line], label=name, **looks)
        if nothing is not None:
            panel.axhline(getattr(nothing, field), label="nothing dropped", linewidth=1, **NOTHING)
        panel.set(xlabel=axis, ylabel=label)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        if nothing is None:
            panel.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, title="dropped positions")
    figure.suptitle(subject.title, fontsize="medium")
    save(figure, path)


@dataclass(frozen=True)
class Picture:
    """A pair of maps to draw.

    Attributes:
        title: of both.
        attention, attribution: (T, S).
        valid: bool (T, S).
        rows, columns: the tokens.
        marked: bool (T, S), or None.
    """

    title: str
    attention: Tensor
    attribution: Tensor
    valid: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    marked: Tensor | None = None


def pictures(
    maps: Sequence[AttentionMap], tokens: Mapping[str, list[str]], row: int, average: str, mark: float
) -> list[Picture]:
    """What is drawn of a sentence.

    Args:
        maps: of a batch in which it is the row `row`.
        tokens: by stack.
        average: `mean` over heads and layers, `layers` over heads only, `heads` not at all.
        mark: p of the candidates that are marked where each head is drawn; 0 marks none.
    """
    made: list[Picture] = []
    kinds: dict[tuple[str, str], list[AttentionMap]] = {}
    for one in maps:
        kinds.setdefault((one.site.stack, one.site.kind), []).append(one)
    for (stack, kind), found in kinds.items():
        if average == "mean":
            layers = "" if len(found) == 1 else f" of {len(found)} layers"
            heads = found[0].attention.size(1)
            title = f"{stack} {kind} attention: mean over {heads} heads{layers}"
            attention = torch.stack([one.attention[row].mean(0) for one in found]).mean(0)
            attribution = torch.stack([one.attribution[row].mean(0) for one in found]).mean(0)
            made.append(_picture(title, attention, attribution, found[0], row, tokens))
            continue
        for one in found:
            if average == "layers":
                title = f"{one.site.name}: mean over {one.attention.size(1)} heads"
                made.append(_picture(title, one.attention[row].mean(0), one.attribution[row].mean(0), one, row, tokens))
                continue
            region = candidate_region(one.attribution, one.valid, mark) if mark else None
            for head in range(one.attention.size(1)):
                marked = None if region is None else region[row, head]
                title = f"{one.site.name}, head {head}"
                a, b = one.attention[row, head], one.attribution[row, head]
                made.append(_picture(title, a, b, one, row, tokens, marked))
    return made


def _picture(
    title: str,
    attention: Tensor,
    attribution: Tensor,
    one: AttentionMap,
    row: int,
    tokens: Mapping[str, list[str]],
    marked: Tensor | None = None,
) -> Picture:
    """Maps without padding, cut at `LONGEST` tokens."""
    shape = one.attention.shape
    valid = torch.ones(shape[-2:], dtype=torch.bool) if one.valid is None else one.valid.expand(shape)[row, 0].cpu()
    columns = valid.any(0).nonzero().flatten()[:LONGEST]
    padded = one.site.stack == "encoder" and one.site.kind == "self"
    rows = columns if padded else torch.arange(shape[-2])[:LONGEST]
    queries, keys = tokens[one.site.stack], tokens["encoder" if one.site.kind == "cross" else one.site.stack]

    def cut(full: Tensor | None) -> Any:
        return None if full is None else full.cpu()[rows][:, columns]

    names = [[_shown(all_of[i]) for i in chosen.tolist()] for all_of, chosen in ((queries, rows), (keys, columns))]
    return Picture(title, cut(attention), cut(attribution), cut(valid), *names, cut(marked))


def _shown(token: str) -> str:
    """A token as an axis can show it; matplotlib reads dollars as formulas."""
    return token.replace("Ġ", "▁").replace("$", r"\$")[:16]


def plot_maps(drawn: Sequence[Picture], attribution: str, subtitle: str, path: Path) -> None:
    """Attention and attribution side by side, a row for each picture.

    Args:
        drawn: see `pictures`.
        attribution: how it was computed, a key of `MEANINGS`.
        subtitle: of the whole.
        path: the file to write.
    """
    matplotlib = load_matplotlib("a picture of attn-reg probe")
    across = 1 if len(drawn) <= MOST_BELOW else 2
    down = math.ceil(len(drawn) / across)
    wide = max(3.0, CELL * max(len(one.columns) for one in drawn))
    heights = [max(2.2, CELL * max(len(one.rows) for one in drawn[i::down])) + 1.1 for i in range(down)]
    figure = matplotlib.figure.Figure(figsize=(across * (2 * wide + 3.2), sum(heights) + 0.6), layout="constrained")
    figure.suptitle(subtitle, fontsize="medium")
    panels = figure.subplots(down, 2 * across, squeeze=False, gridspec_kw={"height_ratios": heights})
    for number in range(down * across):  # column by column
        left, right = panels[number % down, 2 * (number // down) : 2 * (number // down) + 2]
        if number >= len(drawn):
            left.axis("off")
            right.axis("off")
            continue
        one = drawn[number]
        marks = "" if one.marked is None else " (dots: candidates)"
        _map(figure, left, one, one.attention, "Greys", f"{one.title}\nattention A", 0.0)
        _map(figure, right, one, one.attribution, "viridis", f"{one.title}\nattribution {MEANINGS[attribution]}{marks}")
        if one.marked is not None:
            queries, keys = one.marked.nonzero(as_tuple=True)
            look = {"s": 12, "color": "white", "edgecolor": "black", "linewidth": 0.7}
            right.scatter(keys.numpy(), queries.numpy(), **look)
    save(figure, path)


def _map(
    figure: Any, panel: Any, one: Picture, values: Tensor, colors: str, title: str, low: float | None = None
) -> None:
    """One map with its tokens; what no query may see is hatched."""
    shown = values.masked_fill(~one.valid, float("nan")).numpy()
    image = panel.imshow(shown, cmap=colors, vmin=low, aspect="auto", interpolation="nearest")
    panel.patch.set(facecolor="white", hatch="////", edgecolor="#c0c0c0")
    size = 8 if max(len(one.rows), len(one.columns)) <= 40 else 6
    panel.set_xticks(range(len(one.columns)), one.columns, rotation=90, fontsize=size)
    panel.set_yticks(range(len(one.rows)), one.rows, fontsize=size)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("key", fontsize=8)
    panel.set_ylabel("query", fontsize=8)
    figure.colorbar(image, ax=panel, shrink=0.8).ax.tick_params(labelsize=7)
