"""Masks that a method draws as attention comes to them: together for sites of one kind, by one seed a forward."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import sites_of_a_chunk
from attn_reg_plugin.attention.calls import AttentionCall, generator_of
from attn_reg_plugin.attention.masks import joined

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base.regularizer import Draw, Regularizer


class Drawn:
    """A sampler of what the sites are given in the next forward, in the order of their calls; it counts drop rates.

    A call draws for the others of its kind, too, as many as a chunk has; after one that turns out to have another shape
    or mask of valid keys, each draws for itself. A call has the same whenever it asks.

    Args:
        method: whose masks.
        draw: draws masks; that of several sites is one of a larger batch.
        made: (masks, valid, number of sites) -> what each site is given, and `dropped_fraction`'s two.
        alone: whether each site draws for itself from the start.
    """

    def __init__(self, method: Regularizer, draw: Draw, made: Callable[..., Any], alone: bool = False) -> None:
        self.method, self.draw, self.made, self.alone = method, draw, made, alone
        self.seed, self.draws = int(torch.randint(2**62, ())), 0
        self.given: dict[tuple[Any, int], Any] = {}
        self.ahead: dict[Any, tuple[Any, Tensor | None, deque[Any]]] = {}

    def __call__(self, call: AttentionCall, shape: tuple[int, ...], valid: Tensor | None, device: torch.device) -> Any:
        """Return what the call is given, for a map of `shape` (B, H, T, S)."""
        key = call.site, call.index
        if key not in self.given:
            kind = call.site.stack, call.site.kind
            known, of, ahead = self.ahead.get((kind, call.index), (None, None, ()))
            self.alone = self.alone or bool(ahead and (known != shape or of is not valid))
            if self.alone or not ahead:
                sites = sum((site.stack, site.kind) == kind for site in self.method.attached_sites)
                chunks = math.ceil(sites / sites_of_a_chunk(shape))
                count = 1 if self.alone else math.ceil(sites / chunks)  # chunks of about the same size
                generator = generator_of(self.seed, self.draws, device)
                every = joined([valid] * count, shape[0])
                keep = self.draw((count * shape[0], *shape[1:]), every, generator)
                ahead = deque(zip(*self.made(keep, every, count), strict=True))
                self.ahead[kind, call.index], self.draws = (shape, valid, ahead), self.draws + 1
            self.given[key], *share = ahead.popleft()
            self.method.count_share([call.site], *share)
        return self.given[key]


def kept_at_random(
    p: float, shape: tuple[int, ...], valid: Tensor | None, generator: torch.Generator, heads: int | None = None
) -> Tensor:
    """A keep mask (B, H, T, S) of positions that are each dropped with probability p; heads = 1: one for all heads."""
    shape = (shape[0], heads or shape[1], *shape[2:])
    keep = torch.empty(shape, dtype=torch.bool, device=generator.device).bernoulli_(1.0 - p, generator=generator)
    return keep if valid is None else keep & valid
