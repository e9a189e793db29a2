"""Integrated gradients (Sundararajan et al. 2017, as in Hao et al. 2021): B = A ⊙ ∫₀¹ ∂F/∂A(αA) dα, AD-DROP's IGA.

Scaling A by α scales O by α, so each pass runs the model with the outputs of some attentions scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import NO_GRADIENTS, map_gradient, output_gradients
from attn_reg_plugin.attention.requests import NOTHING, Tape
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base.hooks.put_back import without_gradients

NODES = ("uniform", "gauss-legendre")


def integration_nodes(steps: int, nodes: str = "uniform") -> list[tuple[float, float]]:
    """(α, weight) pairs of the integral over α in [0, 1]; the weights sum to 1.

    Args:
        steps: m ≥ 1.
        nodes: `uniform` takes k/m for k = 1 … m (the paper's), `gauss-legendre` the Gaussian quadrature.

    Raises:
        ValueError: steps below 1, or unknown nodes.
    """
    if steps < 1:
        raise ValueError(f"integrated gradients need at least 1 step, not {steps}")
    if nodes == "uniform":
        return [(k / steps, 1.0 / steps) for k in range(1, steps + 1)]
    if nodes != "gauss-legendre":
        raise ValueError(f"nodes is {nodes!r}, but must be one of {', '.join(NODES)}")
    # Golub & Welsch 1969: the nodes are the eigenvalues of the Jacobi matrix, the weights come from its eigenvectors
    k = torch.arange(1, steps, dtype=torch.float64)
    beside = k / (4 * k**2 - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return [(float((x + 1) / 2), float(v**2)) for x, v in zip(values, vectors[0], strict=True)]


def _integrals(
    run: Callable[[], Tensor], calls: list[tuple[AttentionSite, Tape]], points: list[tuple[float, float]]
) -> list[Tensor | None]:
    """Σ w ∂F/∂A(αA) of each call over the points (α, w), all of them scaled together; None without a gradient."""
    totals: list[Tensor | None] = [None] * len(calls)
    for factor, weight in points:
        for site, tape in calls:
            site.calls.restart()
            tape.output, tape.factor = None, factor  # another pass over the same maps
        objective = run()
        if not any(tape.output.requires_grad for _, tape in calls):
            break
        gradients = output_gradients(objective, [tape for _, tape in calls])
        for i, ((_, tape), gradient) in enumerate(zip(calls, gradients, strict=True)):
            if gradient is not None:
                part = weight * map_gradient(gradient, tape.value)
                totals[i] = part if totals[i] is None else totals[i] + part
    return totals


def integrated_attribution(
    run: Callable[[], Tensor],
    sites: Sequence[AttentionSite],
    *,
    steps: int = 20,
    nodes: str = "uniform",
    path: str = "site",
) -> Iterator[tuple[AttentionSite, Tensor | None]]:
    """Integrated gradients, B = A ⊙ Σ w ∂F/∂A(αA) (AD-DROP's IGA; m = 20 there).

    Args:
        run: runs the forward with the same random draws every time and returns the objective F.
        sites: the sites, inside `recording(sites, needs_weights=True)`.
        steps: m, the number of passes a path.
        nodes: see `integration_nodes`.
        path: `site` scales one site's maps at a time (m passes per site), `joint` all of them together (m passes in
            all; the sum of B over every site is then F(A) - F(0)).

    Yields:
        (site, B) with B (B, H, T, S) in fp32, for each call of the site in order; None for a call that F does not
        depend on, or that ran without gradients. Sites that the forward skips are left out.

    Raises:
        ValueError: an unknown path; as `output_gradients`.
    """
    if path not in ("site", "joint"):
        raise ValueError(f"path is {path!r}, but must be one of site, joint")
    with without_gradients():
        run()
    sites = [site for site in sites if site.tapes]
    if not sites:
        return
    requests, tapes = {site: site.request for site in sites}, {site: site.tapes for site in sites}
    groups = [[site] for site in sites] if path == "site" else [sites]
    any_gradients = False
    for group in groups:
        for site in sites:
            site.put_on(requests[site] if site in group else NOTHING)
        used = [(site, tape) for site in group for tape in tapes[site]]
        totals = _integrals(run, used, integration_nodes(steps, nodes))
        any_gradients = any_gradients or any(tape.output.requires_grad for _, tape in used)
        for (site, tape), total in zip(used, totals, strict=True):
            tape.output = tape.output.detach()  # its graph reaches down to the inputs
            yield site, None if total is None else tape.dropped_weights.float() * total
    if not any_gradients:
        raise ValueError(NO_GRADIENTS)
    for site in sites:
        site.put_on(requests[site])
