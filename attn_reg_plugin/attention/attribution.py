"""Attribution: how much the objective depends on each attention position, which AD-DROP compares.

Gradient attribution is B = ∂F/∂A. Because O = A V, it equals ∂F/∂O · Vᵀ, so no attention map has to be kept in the
autograd graph: the probe runs the fused kernel, keeps O and V of each site, and one backward gives every ∂F/∂O.

Integrated gradients (Sundararajan et al. 2017, as in Hao et al. 2021) are B = A ⊙ ∫₀¹ ∂F/∂A(αA) dα; scaling A by α
scales O by α.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attn_reg_plugin.attention.calls import without_gradients
from attn_reg_plugin.attention.requests import NOTHING, Tape
from attn_reg_plugin.attention.sites import AttentionSite

NODES = ("uniform", "gauss-legendre")
_NO_GRADIENTS = (
    "the selected attention ran without gradients: if it is frozen, choose other sites; if activation checkpointing "
    "runs it, use the non-reentrant kind (use_reentrant=False)"
)


def output_gradients(objective: Tensor, tapes: Sequence[Tape]) -> list[Tensor | None]:
    """∂F/∂O (B, H, T, D) of every tape by one backward; None where F does not depend on the call, or that ran without
    gradients.

    Only what lies between F and the sites is computed: no parameter's gradient is, and none is touched. (Parameters
    are not frozen for the probe all the same: PyTorch multiplies three-dimensional inputs by a frozen weight through
    copies of the weight, one per example.)

    Args:
        objective: F, a scalar in the probe's graph.
        tapes: recorded by the probe.

    Raises:
        ValueError: the objective is not a scalar, or depends on no site; or no site has gradients.
    """
    if objective.dim() != 0:
        raise ValueError(f"the objective must be a scalar, but has the shape {tuple(objective.shape)}")
    if not objective.requires_grad:
        raise ValueError("the objective depends on no selected attention site; compute it from the model's outputs")
    outputs = [tape.output for tape in tapes if tape.output.requires_grad]
    if not outputs:
        raise ValueError(_NO_GRADIENTS)
    gradients = iter(torch.autograd.grad(objective, outputs, allow_unused=True))
    return [next(gradients) if tape.output.requires_grad else None for tape in tapes]


def map_gradient(output_gradient: Tensor, value: Tensor) -> Tensor:
    """∂F/∂A = ∂F/∂O · Vᵀ in fp32, under autocast as well: (B, H, T, D) and (B, H, S, D) give (B, H, T, S)."""
    with torch.autocast(value.device.type, enabled=False):
        return output_gradient.float() @ value.float().transpose(-1, -2)


def gradient_attribution(objective: Tensor, sites: Sequence[AttentionSite]) -> list[Tensor]:
    """Gradient attribution B = ∂F/∂A (AD-DROP), one backward for all sites.

    Args:
        objective: F, a scalar computed from a forward run inside `recording(sites)`.
        sites: the recorded sites.

    Returns:
        One (B, H, T, S) fp32 tensor per site, zeros where F does not depend on it. With attention dropout on, A is
        the map after dropout.

    Raises:
        ValueError: a site recorded nothing or several calls, the objective isn't a scalar, or it depends on no site.
    """
    for site in sites:
        if len(site.tapes) > 1:
            raise ValueError(
                f"{site.name} ran {len(site.tapes)} times in the forward; give output_gradients the tapes of its "
                "calls, site.tapes, and map_gradient each of them"
            )
        if not site.tapes:
            raise ValueError(f"{site.name} recorded nothing; run the forward inside recording(sites), in training mode")
    tapes = [site.tapes[0] for site in sites]
    gradients = output_gradients(objective, tapes)
    given = [torch.zeros_like(t.output) if g is None else g for g, t in zip(gradients, tapes, strict=True)]
    return [map_gradient(gradient, tape.value) for gradient, tape in zip(given, tapes, strict=True)]


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
        raise ValueError(_NO_GRADIENTS)
    for site in sites:
        site.put_on(requests[site])
