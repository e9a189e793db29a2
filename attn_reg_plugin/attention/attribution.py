"""How much the objective depends on each attention position: the attributions that AD-DROP compares.

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
from attn_reg_plugin.attention.sites import AttentionSite, Tape

NODES = ("uniform", "gauss-legendre")


def output_gradients(objective: Tensor, tapes: Sequence[Tape]) -> list[Tensor]:
    """∂F/∂O of every tape by one backward; zeros where the objective does not depend on a site,
    or the site runs without gradients.

    Only what lies between F and the sites is computed: no parameter's gradient is, and none is touched. (Parameters
    are not frozen for the probe all the same: PyTorch multiplies three-dimensional inputs by a frozen weight through
    copies of the weight, one per example.)

    Args:
        objective: F, a scalar in the probe's graph.
        tapes: recorded by the probe.

    Returns:
        One (B, H, T, D) tensor a tape.

    Raises:
        ValueError: the objective is not a scalar, or depends on no site; or no site has gradients.
    """
    if objective.dim() != 0:
        raise ValueError(f"the objective must be a scalar, but has the shape {tuple(objective.shape)}")
    if not objective.requires_grad:
        raise ValueError("the objective depends on no selected attention site; compute it from the model's outputs")
    outputs = [tape.output for tape in tapes if tape.output.requires_grad]
    if not outputs:
        raise ValueError("the selected attention ran without gradients, as a frozen part does; choose other sites")
    gradients = iter(torch.autograd.grad(objective, outputs, allow_unused=True, materialize_grads=True))
    return [next(gradients) if tape.output.requires_grad else torch.zeros_like(tape.output) for tape in tapes]


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
        One (B, H, T, S) fp32 tensor per site. With attention dropout on, A is the map after dropout.

    Raises:
        ValueError: a site recorded nothing or several calls, the objective isn't a scalar, or it depends on no site.
    """
    for site in sites:
        if len(site.tapes) > 1:
            raise ValueError(
                f"{site.name} ran {len(site.tapes)} times in the forward; give output_gradients the tapes of its "
                "calls, site.tapes, and map_gradient each of them"
            )
        if site.tape is None or site.tape.output is None:
            raise ValueError(f"{site.name} recorded nothing; run the forward inside recording(sites), in training mode")
    gradients = output_gradients(objective, [site.tape for site in sites])
    return [map_gradient(gradient, site.tape.value) for gradient, site in zip(gradients, sites, strict=True)]


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


def integrated_attribution(
    run: Callable[[], Tensor],
    sites: Sequence[AttentionSite],
    *,
    steps: int = 20,
    nodes: str = "uniform",
    path: str = "site",
) -> Iterator[tuple[AttentionSite, Tensor]]:
    """Integrated gradients, B = A ⊙ Σ w ∂F/∂A(αA) (AD-DROP's IGA; m = 20 there).

    Args:
        run: runs the forward with the same random draws every time and returns the objective F.
        sites: the sites, inside `recording(sites, needs_weights=True)`.
        steps: m, the number of passes a path.
        nodes: see `integration_nodes`.
        path: `site` scales one site's maps at a time (m passes per site), `joint` all of them together (m passes in
            all; the sum of B over every site is then F(A) - F(0)).

    Yields:
        (site, B) with B (B, H, T, S) in fp32, for each call of the site in order. Sites that the forward skips are
        left out.
    """
    if path not in ("site", "joint"):
        raise ValueError(f"path is {path!r}, but must be one of site, joint")
    with without_gradients():
        run()
    sites = [site for site in sites if site.tapes]
    if not sites:
        return
    firsts, tapes = {id(site): site.tape for site in sites}, {id(site): site.tapes for site in sites}
    groups = [[site] for site in sites] if path == "site" else [sites]
    for group in groups:
        for site in sites:
            site.tape = firsts[id(site)] if site in group else None
        used = [(site, tape) for site in group for tape in tapes[id(site)]]
        totals: list[Tensor | float] = [0.0] * len(used)
        for factor, weight in integration_nodes(steps, nodes):
            for site, tape in used:
                site.restart()
                tape.rewind(factor)
            gradients = output_gradients(run(), [tape for _, tape in used])
            for i, ((_, tape), gradient) in enumerate(zip(used, gradients, strict=True)):
                totals[i] = totals[i] + weight * map_gradient(gradient, tape.value)
        for (site, tape), total in zip(used, totals, strict=True):
            tape.output = tape.output.detach()  # its graph reaches down to the inputs
            yield site, tape.dropped_weights.float() * total
    for site in sites:
        site.tape = firsts[id(site)]
