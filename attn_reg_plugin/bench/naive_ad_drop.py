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

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attn_reg_plugin.attention.selection import find_sites
from attn_reg_plugin.attention.sites import AttentionSite


class MaterializedAttention(TorchFunctionMode):
    """While on, the attention of the given sites is softmax(QKᵀ + M)V, computed as it is written.

    It takes the place of the fused kernel that the sites call; all other attention runs as usual.

    Attributes:
        maps, valid: A in the autograd graph, after dropout, and bool, True = the key exists, both (B, H, T, S), by the
            site's name; filled while `recorded`.
        keep: bool (B, H, T, S) by the site's name, True = attend; set it to mask a forward.
    """

    def __init__(self, sites: Sequence[AttentionSite]) -> None:
        super().__init__()
        self.sites, self.recorded = sites, True
        self.maps, self.valid, self.keep = ({} for _ in range(3))
        self._next: str | None = None

    def __enter__(self) -> MaterializedAttention:
        """Make the sites' modules say when they attend: a site asks for its mask right before its attention."""
        for site in self.sites:
            site.backend.open(site)
            site.ask(sampler=partial(self._announce, site.name))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Leave the model as it was."""
        super().__exit__(*error)
        for site in self.sites:
            site.clear()
            site.backend.close(site)

    def _announce(self, name: str, *_: Any) -> None:
        self._next = name

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything pass but the attention of an announced site."""
        if function is not F.scaled_dot_product_attention or self._next is None:
            return function(*args, **(kwargs or {}))
        name, self._next = self._next, None
        return self._attend(name, *args, **(kwargs or {}))

    def _attend(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        dropout_p: float = 0.0,
        *,
        scale=None,
    ) -> Tensor:
        """(B, H, T, D), (B, H, S, D) and (B, H, S, D) give (B, H, T, D); `mask` as the fused kernel takes it."""
        scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
        valid = torch.ones_like(scores, dtype=torch.bool)
        if mask is not None and mask.is_floating_point():
            scores, valid = scores + mask, valid & (mask > float("-inf"))
        elif mask is not None:
            scores, valid = scores.masked_fill(~mask, float("-inf")), valid & mask
        keep = self.keep.get(name)
        if keep is not None:  # a row that lost every key is uniform over those that exist
            dead = ~keep.any(-1, keepdim=True)
            scores = scores.masked_fill(~(keep | dead), float("-inf")).masked_fill(dead & valid, 0.0)
        weights = F.dropout(scores.softmax(-1), dropout_p)
        if self.recorded:
            self.maps[name], self.valid[name] = weights, valid
        return weights @ value


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


@contextmanager
def naive_masks(
    model: nn.Module,
    inputs: Mapping[str, Any],
    objective: Callable[[Any], Tensor],
    *,
    select: str = "encoder.self",
    p: float = 0.3,
    q: float = 0.3,
) -> Iterator[dict[str, Tensor]]:
    """Probe and attribute a model in training mode; while open, its forward attends with the masks.

    Args:
        inputs: the forward's arguments by name.
        objective: F, a scalar of the model's outputs.
        select: a `SiteSelector` pattern.
        p, q: the ratio of candidates a row and the probability to drop one, in [0, 1].

    Yields:
        The keep masks, bool (B, H, T, S), by the site's name.
    """
    with MaterializedAttention(find_sites(model, select)) as attention:
        scalar = objective(model(**inputs))
        keep = {}
        for name, weights in attention.maps.items():
            (attribution,) = torch.autograd.grad(scalar, weights, retain_graph=True)
            candidates = naive_candidates(attribution, attention.valid[name], p)
            dropped = candidates & (torch.rand(candidates.shape, device=candidates.device) < q)
            keep[name] = attention.valid[name] & ~dropped
        del scalar, attribution, weights
        attention.maps.clear()
        attention.valid.clear()
        attention.recorded, attention.keep = False, keep
        yield keep


def naive_forward(model: nn.Module, inputs: Mapping[str, Any], objective: Callable[[Any], Tensor], **how: Any) -> Any:
    """The model's outputs under AD-DROP, in training mode; arguments as of `naive_masks`."""
    with naive_masks(model, inputs, objective, **how):
        return model(**inputs)
