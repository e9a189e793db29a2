"""AD-DROP in the form its paper measures (Yang et al., NeurIPS 2022), to compare with.

Every selected attention map is materialized and kept in the autograd graph of the whole model, parameters included;
each layer is attributed by a backward of its own; each row is sorted completely. Written from the equations and
sharing no attribution, mask or attention code with the rest of the package, it is also the tests' second opinion.

    F of the pseudo labels                              the caller's objective
    B_l = ∂F/∂A_l                                       one torch.autograd.grad per layer
    S = 1 below the element of index int(n(1 - p))      a full ascending sort
    M = -∞ with probability q where S = 0               added before the softmax

Two favours are done to it: the probe's graph is freed before the training forward begins, and its masks are booleans.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import opened
from attn_reg_plugin.attention.selection import find_sites
from attn_reg_plugin.attention.sites import AttentionSite


@contextmanager
def materialized(
    sites: Sequence[AttentionSite], keep: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """While open, the attention of the sites is softmax(QKᵀ + M)V, computed as it is written.

    It takes the place of the fused kernel that the sites call; all other attention runs as usual.

    Args:
        keep: bool (B, H, T, S) by the site's name, True = attend; without it all that exists is attended, and recorded.

    Yields:
        A in the autograd graph, after dropout, and bool, True = the key exists, both (B, H, T, S), by the site's name.
    """
    maps, exists, announced = {}, {}, []
    fused = F.scaled_dot_product_attention

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, dropout_p: float = 0.0, *more: Any, **named: Any
    ) -> Tensor:
        if not announced:
            return fused(query, key, value, mask, dropout_p, *more, **named)
        name, scale = announced.pop(), named.get("scale")
        scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
        valid = torch.ones_like(scores, dtype=torch.bool)
        if mask is not None and mask.is_floating_point():
            scores, valid = scores + mask, valid & (mask > float("-inf"))
        elif mask is not None:
            scores, valid = scores.masked_fill(~mask, float("-inf")), valid & mask
        if keep is not None:  # a row that lost every key is uniform over those that exist
            dead = ~keep[name].any(-1, keepdim=True)
            scores = scores.masked_fill(~(keep[name] | dead), float("-inf")).masked_fill(dead & valid, 0.0)
        weights = F.dropout(scores.softmax(-1), dropout_p)
        if keep is None:
            maps[name], exists[name] = weights, valid
        return weights @ value

    with opened(sites), mock.patch.object(F, "scaled_dot_product_attention", attend):
        for site in sites:
            # a site asks for its mask right before its attention
            site.ask(sampler=lambda *_, name=site.name: announced.append(name))
        yield maps, exists


def naive_candidates(attribution: Tensor, valid: Tensor, p: float) -> Tensor:
    """The candidate discard region by a full sort of every row.

    Args:
        attribution: B, (B, H, T, S).
        valid: bool (B, H, T, S), True = the key exists.
        p: ratio of candidates, in [0, 1].

    Returns:
        bool (B, H, T, S), True = candidate; positions tied with the threshold are all candidates.
    """
    ascending = attribution.float().masked_fill(~valid, float("inf")).sort(dim=-1).values
    count = valid.sum(-1, keepdim=True)
    index = (count.double() * (1 - p) + 1e-9).long()
    threshold = ascending.gather(-1, index.clamp(max=attribution.size(-1) - 1))
    return valid & (attribution.float() >= threshold) & (index < count)


def naive_masks(
    model: nn.Module, inputs: Mapping[str, Any], objective: Callable[[Any], Tensor], select: str, p: float, q: float
) -> dict[str, Tensor]:
    """Probe and attribute a model: the keep masks, bool (B, H, T, S), by the site's name."""
    keep = {}
    with materialized(find_sites(model, select)) as (maps, exists):
        scalar = objective(model(**inputs))
        for name, weights in maps.items():
            (attribution,) = torch.autograd.grad(scalar, weights, retain_graph=True)
            candidates = naive_candidates(attribution, exists[name], p)
            keep[name] = exists[name] & ~(candidates & (torch.rand(candidates.shape, device=candidates.device) < q))
    return keep


def naive_forward(
    model: nn.Module,
    inputs: Mapping[str, Any],
    objective: Callable[[Any], Tensor],
    *,
    select: str = "encoder.self",
    p: float = 0.3,
    q: float = 0.3,
) -> Any:
    """Probe and attribute a model in training mode, and return its outputs under the masks.

    Args:
        inputs: the forward's arguments by name.
        objective: F, a scalar of the model's outputs.
        select: a `SiteSelector` pattern.
        p, q: the ratio of candidates a row and the probability to drop one, in [0, 1].
    """
    keep = naive_masks(model, inputs, objective, select, p, q)  # whose graph is gone by now
    with materialized(find_sites(model, select), keep):
        return model(**inputs)
