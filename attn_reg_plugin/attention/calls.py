"""The calls of an attention in one forward, and how a recomputed call finds the one that it repeats.

A model may run one attention several times in a forward: one encoder for two texts, a vision tower for every image.
Each call has a tape and a mask of its own, in order. Activation checkpointing runs calls again in the backward, in
another order, so there calls are recognized by what they are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_reg_plugin.attention.packed import PackedMask

if TYPE_CHECKING:
    from attn_reg_plugin.attention.sites import AttentionSite, Watch


@dataclass(eq=False)
class Tape:
    """What the probe keeps of one call of a site.

    Attributes:
        needs_weights: materialize the attention map (integrated gradients and attention weights need it).
        factor: the map is scaled by it (integrated gradients' k/m).
        output: O (B, H, T, D), in the probe's graph.
        value: V (B, H, S, D), detached.
        valid: bool, broadcastable to (B, H, T, S), or None.
        weights, dropped_weights: A before and after dropout, (B, H, T, S), detached.
        further: of a site's first tape, those of its further calls.
    """

    needs_weights: bool = False
    factor: float = 1.0
    output: Tensor | None = None
    value: Tensor | None = None
    valid: Tensor | None = None
    weights: Tensor | None = None
    dropped_weights: Tensor | None = None
    further: list[Tape] = field(default_factory=list, repr=False)

    def keep(self, output: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Keep the call's tensors; activation checkpointing calls again, to recompute."""
        if self.output is None:
            self.output, self.value, self.valid = output, value, valid

    def whole(self) -> Tensor:
        """The keep mask of the call that drops nothing: bool (B, H, T, S), its valid positions."""
        shape = *self.output.shape[:-1], self.value.size(-2)
        keep = torch.ones(shape, dtype=torch.bool, device=self.value.device)
        return keep if self.valid is None else keep & self.valid

    def rewind(self, factor: float) -> None:
        """Make ready for another pass over the same maps, scaled by `factor`."""
        self.output, self.factor = None, factor

    def of_call(self, index: int) -> Tape:
        """The tape of the site's call number `index`, from 0."""
        while len(self.further) < index:
            self.further.append(Tape(self.needs_weights, self.factor))
        return self.further[index - 1] if index else self


@dataclass(eq=False)
class AttentionCall:
    """One call of an attention that a regularizer watches or masks; see `AttentionSite.enter`.

    Attributes:
        site: whose call it is.
        index: which call of the forward, from 0.
        tape: what the probe keeps of it, or None.
        uniform: every row is uniform over its valid keys.
        seen: what it was given, in short, to be recognized by; None if that wasn't needed.
        keep: its mask among those of the site, once it is chosen.
        settled: whether the mask is chosen.
        watch: is given what it computes, see `AttentionSite`.
        graph: whether it began with gradients; of PyTorch's reentrant checkpointing only the recomputation has any.
        counted: the seeds of what was drawn for it and is in the statistics.
    """

    site: AttentionSite
    index: int = 0
    tape: Tape | None = None
    uniform: bool = False
    seen: list[Tensor] | None = None
    keep: Tensor | PackedMask | None = None
    settled: bool = False
    watch: Watch | None = None
    graph: bool = True
    counted: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site.name

    @property
    def path(self) -> str:
        """The site's path."""
        return self.site.path

    def keep_mask(self, shape: tuple[int, ...], valid: Tensor | None, device: torch.device) -> Tensor | None:
        """The keep mask of this call for a map of `shape` (B, H, T, S), or broadcastable to it; None keeps all.

        Raises:
            RuntimeError: the map has another shape than the one the mask was made for.
        """
        site = self.site
        site.current = self
        if site.sampler is not None:
            return site.sampler(shape, valid, device)
        if not self.settled:
            self.keep, self.settled = site.mask_for(self, shape, valid), True
        if self.keep is not None and not fits(self.keep, shape):
            raise RuntimeError(
                f"{self.name}: the keep mask is {tuple(self.keep.shape)}, but the attention map is {tuple(shape)}; "
                "the probe and the forward saw different inputs"
            )
        return self.keep.unpacked() if isinstance(self.keep, PackedMask) else self.keep

    def total_dropout(self, own: float) -> float:
        """The dropout of the weights: the model's `own` and the site's, which are independent of each other."""
        added = self.site.weights_dropout
        return 1.0 - (1.0 - own) * (1.0 - added) if added > 0 else own

    def scaled(self, output: Tensor, keys: int, valid: Tensor | None) -> Tensor:
        """The output (B, H, T, D) of attention over `keys` keys, multiplied by the site's factor if there is one."""
        site = self.site
        if site.factor is None:
            return output
        site.current = self
        factor = site.factor((*output.shape[:-1], keys), valid, output.device)
        return output * factor.to(output.dtype)


def fits(keep: Tensor | PackedMask, shape: tuple[int, ...]) -> bool:
    """Whether a mask can be broadcast to an attention map of `shape`."""
    return len(keep.shape) == len(shape) and all(n in (1, m) for n, m in zip(keep.shape, shape, strict=True))


def graph_task() -> int:
    """Which backward pass this thread is in; -1 outside of one."""
    return torch._C._current_graph_task_id()


def essence(inputs: tuple[Tensor | None, ...]) -> list[Tensor]:
    """What a call is recognized by: the sums over all but the first two dimensions of its inputs, in fp32.

    They are small, and computing them again from the same tensors gives the same bits.
    """
    return [
        tensor.detach().reshape(*tensor.shape[:2], -1).sum(-1, dtype=torch.float32)
        for tensor in inputs
        if tensor is not None
    ]


def recomputed(calls: list[AttentionCall], inputs: tuple[Tensor | None, ...]) -> AttentionCall | None:
    """Which of a forward's calls is computed again from `inputs`; None if there was none.

    The only call is itself. Of several, the one that saw the same; else the one of which it isn't known what it saw.

    Raises:
        RuntimeError: none or several of them may be meant, and it matters which.
    """
    if len(calls) < 2:
        return calls[0] if calls else None
    now = essence(inputs)
    meant = [call for call in calls if call.seen is not None and _same(call.seen, now)]
    meant = meant or [call for call in calls if call.seen is None]
    if meant and (len(meant) == 1 or _alike(meant) or not all(tensor.isfinite().all() for tensor in now)):
        return meant[0]
    site = calls[0].site
    raise RuntimeError(
        f"{site.name} ({site.path}) ran {len(calls)} times in one forward, and activation checkpointing runs "
        f"{'one of them again with other inputs' if not meant else 'calls with equal inputs again'}, so it can't be "
        "told which mask is meant; turn activation checkpointing off, or leave this site out"
    )


def _same(then: list[Tensor], now: list[Tensor]) -> bool:
    pairs = zip(then, now, strict=True)
    return len(then) == len(now) and all(a.shape == b.shape and a.nan_to_num().equal(b.nan_to_num()) for a, b in pairs)


def _alike(calls: list[AttentionCall]) -> bool:
    """Whether it makes no difference which of them is meant."""
    first, site = calls[0], calls[0].site
    if first.tape is not None:
        return True  # the probe's: equal inputs have equal maps
    if first.watch is not None and not first.graph:
        return False  # equal inputs, but what arrives from above differs
    draws = (site.sampler, site.factor, site.look)
    if any(draw is not None for draw in draws) or len({call.uniform for call in calls}) > 1:
        return False
    return first.uniform or all(call.keep is first.keep for call in calls)


def only_where_same(keep: Tensor, then: Tensor | None, now: Tensor | None) -> Tensor:
    """The mask where the call's valid keys are those that it was made for, else all True; nothing waits for a device.

    Of a site that runs several times, a call that LayerDrop left out of the probe would else get its neighbour's.
    """
    if then is None and now is None:
        return keep
    same = (then == now).all() if then is not None and now is not None else (now if then is None else then).all()
    return keep | ~same


def derived(seed: int, call: int) -> int:
    """The seed of a site's call: `seed` itself for the first, another for each further one. Draws nothing."""
    return (seed + call * 0x9E3779B97F4A7C15) % 2**62


@contextmanager
def without_gradients() -> Iterator[None]:
    """`torch.no_grad()` within a training step: of what the caller's autocast casts in it, nothing stays.

    Earlier versions of torch would give such a cast, which has no graph, to the training's own forward.
    """
    try:
        with torch.no_grad():
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def recording(sites: Iterable[AttentionSite], needs_weights: bool = False) -> Iterator[list[Tape]]:
    """While open, each site keeps what attribution needs on fresh tapes, one per call; afterwards the sites are clear.

    Yields:
        The tapes of the first calls; those of all calls are in `AttentionSite.tapes`.
    """
    sites = list(sites)
    for site in sites:
        site.clear()
        site.tape = Tape(needs_weights=needs_weights)
    try:
        yield [site.tape for site in sites]
    finally:
        for site in sites:
            site.tape = None
            site.restart()
