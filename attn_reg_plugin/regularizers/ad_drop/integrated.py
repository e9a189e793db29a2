"""Integrated gradients (Sundararajan et al. 2017, as in Hao et al. 2021): B = A ⊙ ∫₀¹ ∂F/∂A(αA) dα, AD-DROP's IGA.

Scaling A by α scales O by α, so each pass runs the model with the outputs of some attentions scaled.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from attn_reg_plugin.attention.attribution import NO_GRADIENTS, map_gradient, output_gradients
from attn_reg_plugin.attention.requests import NOTHING, Tape
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base.hooks.put_back import without_gradients


def _integrals(run: Callable[[], Tensor], calls: list[tuple[AttentionSite, Tape]], steps: int) -> list[Tensor | None]:
    """(1/m) Σ ∂F/∂A(k/m A) of each call for k = m … 1, all of them scaled together; None without a gradient.

    A is that of the first of these, which scales nothing.
    """
    totals: list[Tensor | None] = [None] * len(calls)
    for k in range(steps, 0, -1):
        for site, tape in calls:
            site.calls.restart()
            tape.output, tape.factor = None, k / steps  # another pass over the same maps
        objective = run()
        if not any(tape.output.requires_grad for _, tape in calls):
            break
        gradients = output_gradients(objective, [tape for _, tape in calls])
        for i, ((_, tape), gradient) in enumerate(zip(calls, gradients, strict=True)):
            if gradient is not None:
                part = map_gradient(gradient, tape.value) / steps
                totals[i] = part if totals[i] is None else totals[i] + part
    return totals


def integrated_attribution(
    run: Callable[[], Tensor],
    sites: Sequence[AttentionSite],
    *,
    steps: int = 20,
    path: str = "site",
) -> list[Tensor | None]:
    """Integrated gradients, B = A ⊙ (1/m) Σ ∂F/∂A(k/m A) for k = 1 … m (AD-DROP's IGA; m = 20 there).

    Args:
        run: runs the forward with the same random draws every time and returns the objective F.
        sites: the sites, inside `recording(sites, needs_weights=True)`.
        steps: m, the number of passes a path, at least 1.
        path: `site` scales one site's maps at a time (m passes per site), `joint` all of them together (m passes in
            all; the sum of B over every site is then F(A) - F(0), for many steps).

    Returns:
        B (B, H, T, S) in fp32 for each call that the forward makes, site by site and in their order; None for one that
        F does not depend on, or that ran without gradients.

    Raises:
        ValueError: as `output_gradients`.
    """
    with without_gradients():
        run()
    sites = [site for site in sites if site.tapes]
    for tape in (tape for site in sites for tape in site.tapes):  # what is not recorded may draw another dropout
        tape.weights = tape.dropped_weights = None
    if not sites:
        return []
    requests, tapes = {site: site.request for site in sites}, {site: site.tapes for site in sites}
    groups = [[site] for site in sites] if path == "site" else [sites]
    found: list[Tensor | None] = []
    any_gradients = False
    for group in groups:
        for site in sites:
            site.put_on(requests[site] if site in group else NOTHING)
        used = [(site, tape) for site in group for tape in tapes[site]]
        totals = _integrals(run, used, steps)
        any_gradients = any_gradients or any(tape.output.requires_grad for _, tape in used)
        for (_, tape), total in zip(used, totals, strict=True):
            tape.output = tape.output.detach()  # its graph reaches down to the inputs
            found.append(None if total is None else tape.dropped_weights.float() * total)
    if not any_gradients:
        raise ValueError(NO_GRADIENTS)
    for site in sites:
        site.put_on(requests[site])
    return found
