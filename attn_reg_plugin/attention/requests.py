"""Requests: what a method asks of an attention in one forward, and the tapes that a probe records on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_reg_plugin.attention.masks import PackedMask

if TYPE_CHECKING:
    from attn_reg_plugin.attention.calls import AttentionCall
    from attn_reg_plugin.attention.sites import AttentionSite
    from attn_reg_plugin.attention.tokens import TokenBias

#: draws a keep mask: (call, shape (B, H, T, S), valid, device) -> bool, or packed; the same whenever a call asks again
MaskSampler = Callable[["AttentionCall", tuple[int, ...], Tensor | None, torch.device], Tensor | PackedMask]
#: sees the map of a call: (call, weights (B, H, T, S), valid)
Look = Callable[["AttentionCall", Tensor, Tensor | None], None]
#: whether the layer of these sites is left out of its call of this number
LayerPlan = Callable[[list["AttentionSite"], int], bool]


@dataclass(eq=False)
class Tape:
    """Record of one call of a site in the probe.

    Attributes:
        needs_weights: materialize the attention map (integrated gradients and attention weights need it).
        factor: the map is scaled by it (integrated gradients' k/m).
        tokens: adds its β to the scores, by the number of the call; or None.
        index: number of the call in the forward, from 0.
        output: O (B, H, T, D), in the probe's graph.
        value: V (B, H, S, D), detached.
        valid: bool, broadcastable to (B, H, T, S), or None.
        weights, dropped_weights: A before and after dropout, (B, H, T, S), detached.
    """

    needs_weights: bool = False
    factor: float = 1.0
    tokens: TokenBias | None = None
    index: int = 0
    output: Tensor | None = None
    value: Tensor | None = None
    valid: Tensor | None = None
    weights: Tensor | None = None
    dropped_weights: Tensor | None = None

    def keep(self, output: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Keep the call's tensors; activation checkpointing calls again, to recompute."""
        if self.output is None:
            self.output, self.value, self.valid = output, value, valid


@dataclass(eq=False)
class Recording:
    """Tapes of a site's calls in the probe, one per call in order."""

    needs_weights: bool = False
    tokens: TokenBias | None = None
    tapes: list[Tape] = field(default_factory=list)

    def tape(self, index: int) -> Tape:
        """Return the tape of call number `index`, from 0."""
        while len(self.tapes) <= index:
            self.tapes.append(Tape(self.needs_weights, tokens=self.tokens, index=len(self.tapes)))
        return self.tapes[index]


@dataclass(frozen=True, eq=False)
class Request:
    """A method's request of an attention in one forward; immutable, put on and taken off whole.

    Attributes:
        recording: record the calls; everything else is left to the forward that follows the probe.
        keep: mask of every call, bool, broadcastable to (B, H, T, S).
        masks: masks of the calls in order; in place of `keep`.
        sampler: draws the mask of each call; in place of both.
        look: sees the map of each call, as its mask has left it.
        uniform: decides for each call, by its number, whether every row is uniform; asked once per call.
        weights_dropout: ordinary dropout of the weights, in [0, 1), on top of the model's own and independent of it.
        factor: draws a float factor of each call's output, broadcastable to (B, H, T, 1), as `sampler` draws a mask.
        layer: decides whether the layer around the site is left out; the attention itself runs as usual.
        once: reason why a second call in a forward is refused; empty where it isn't.
    """

    recording: Recording | None = None
    keep: Tensor | None = None
    masks: tuple[PackedMask, ...] = ()
    sampler: MaskSampler | None = None
    look: Look | None = None
    uniform: Callable[[int], bool] | None = None
    weights_dropout: float = 0.0
    factor: MaskSampler | None = None
    layer: LayerPlan | None = None
    once: str = ""

    @property
    def masking(self) -> bool:
        """Whether a call does anything but run as usual, recording and uniform rows apart."""
        parts = (self.keep, self.sampler, self.look, self.factor)
        return self.weights_dropout > 0 or bool(self.masks) or any(part is not None for part in parts)

    @property
    def acting(self) -> bool:
        """Whether attention does anything but run as usual."""
        return self.masking or self.recording is not None or self.uniform is not None

    def __or__(self, other: Request) -> Request:
        """Return both together; `other` wins where both ask for the same."""
        asked = {one.name: getattr(other, one.name) for one in fields(other)}
        return replace(self, **{name: value for name, value in asked.items() if value is not getattr(NOTHING, name)})


#: plain attention
NOTHING = Request()
