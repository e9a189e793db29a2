"""Masks that a method draws as attention comes to them: together for sites of one kind, by one seed a forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import sites_of_a_chunk
from attn_reg_plugin.attention.calls import AttentionCall, derived
from attn_reg_plugin.attention.masks import joined

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base.regularizer import Draw, Regularizer

#: makes of masks and `valid` of so many sites, one after the other, what each site is given, and the drop rates of all
Made = Callable[[Tensor, Tensor | None, int], tuple[Sequence[Any], Tensor, Tensor]]


class Drawn:
    """A sampler of what the sites are given in the next forward, in the order of their calls; it counts drop rates.

    A call draws for the others of its kind, too, as many as a chunk has; after one that turns out to have another shape
    or mask of valid keys, each draws for itself. A call has the same whenever it asks.

    Args:
        method: whose masks.
        draw: draws masks; that of several sites is one of a larger batch.
        made: what is made of them.
        alone: whether each site draws for itself from the start.
    """

    def __init__(self, method: Regularizer, draw: Draw, made: Made, alone: bool = False) -> None:
        self.method, self.draw, self.made, self.alone = method, draw, made, alone
        self.seed, self.draws = int(torch.randint(2**62, ())), 0
        self.given: dict[AttentionCall, Any] = {}
        self.ahead: dict[Any, tuple[Any, Tensor | None, deque[Any]]] = {}

    def __call__(self, call: AttentionCall, shape: tuple[int, ...], valid: Tensor | None, device: torch.device) -> Any:
        """Return what the call is given, for a map of `shape` (B, H, T, S)."""
        if call not in self.given:
            kind = call.site.stack, call.site.kind, call.index
            known, of, ahead = self.ahead.get(kind, (None, None, ()))
            self.alone = self.alone or bool(ahead and (known != shape or of is not valid))
            if self.alone or not ahead:
                ahead = self._drawn(kind, shape, valid, device)
                self.ahead[kind] = shape, valid, ahead
            self.given[call], *share = ahead.popleft()
            self.method.count_share([call.site], *share)
        return self.given[call]

    def _drawn(self, kind: Any, shape: tuple[int, ...], valid: Tensor | None, device: torch.device) -> deque[Any]:
        sites = sum((site.stack, site.kind) == kind[:2] for site in self.method.attached_sites)
        count = 1 if self.alone else -(-sites // -(-sites // sites_of_a_chunk(shape)))
        generator = torch.Generator(device).manual_seed(derived(self.seed, self.draws))
        self.draws += 1
        valid = joined([valid] * count, shape[0])
        keep = self.draw((count * shape[0], *shape[1:]), valid, generator)
        return deque(zip(*self.made(keep, valid, count), strict=True))
