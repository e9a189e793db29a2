"""Calls: the runs of an attention in one forward, and how a recomputed call finds the one that it repeats.

A model may run one attention several times in a forward: one encoder for two texts, a vision tower for every image.
Each call has a tape and a mask of its own, in order. Activation checkpointing runs a call again in the backward; which
one is known only where there is one, so with several it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_reg_plugin.attention.masks import PackedMask
from attn_reg_plugin.attention.requests import NOTHING, Recording, Request, Tape

if TYPE_CHECKING:
    from attn_reg_plugin.attention.sites import AttentionSite
    from attn_reg_plugin.attention.tokens import TokenBias


@dataclass(eq=False)
class AttentionCall:
    """One call of an attention of which something is asked; see `AttentionSite.enter`.

    Attributes:
        site: the attention.
        index: number of the call in the forward, from 0.
        request: what is asked of it.
        tape: where the probe records it, or None.
        uniform: every row is uniform over its valid keys.
        recomputed: the backward in which activation checkpointing computed it again; -1 for none.
    """

    site: AttentionSite
    index: int = 0
    request: Request = NOTHING
    tape: Tape | None = None
    uniform: bool = False
    recomputed: int = -1

    def keep_mask(self, shape: tuple[int, ...], valid: Tensor | None, device: torch.device) -> PackedMask | None:
        """Return the keep mask for a map of `shape` (B, H, T, S), or broadcastable to it; None keeps all.

        Raises:
            RuntimeError: the map has another shape than the one the mask was made for.
        """
        masks, keep = self.request.masks, self.request.keep
        if self.request.sampler is not None:
            keep = self.request.sampler(self, shape, valid, device)
        elif masks:
            if self.index >= len(masks):
                raise RuntimeError(
                    f"{self.site.name} ran more often in the forward than in the probe ({len(masks)}): AD-DROP and a "
                    "model's own LayerDrop do not go together where an attention runs several times; turn LayerDrop off"
                )
            keep = masks[self.index]
        if keep is not None and any(n not in (1, m) for n, m in zip_longest(keep.shape, shape)):
            raise RuntimeError(
                f"{self.site.name}: the keep mask is {tuple(keep.shape)}, but the attention map is {tuple(shape)}; "
                "it was made for other inputs: those of AD-DROP's probe, or the tokens that AttendOut's problem told"
            )
        return PackedMask.of(keep, valid) if isinstance(keep, Tensor) else keep

    def total_dropout(self, own: float) -> float:
        """Return the dropout of the weights: the model's `own` and the request's, independent of each other."""
        added = self.request.weights_dropout
        return 1.0 - (1.0 - own) * (1.0 - added) if added > 0 else own

    def scaled(self, output: Tensor, keys: int, valid: Tensor | None) -> Tensor:
        """Return the output (B, H, T, D) of attention over `keys` keys, multiplied by the factor if there is one."""
        if self.request.factor is None:
            return output
        factor = self.request.factor(self, (*output.shape[:-1], keys), valid, output.device)
        return output * factor.to(output.dtype)


@dataclass(eq=False)
class Calls:
    """Calls of one attention in the forward at hand, and what is remembered of all since its site was opened.

    Attributes:
        made: those that came.
        count: their number, with those that did not come, see `AttentionSite.pass_by`.
        current: the last one.
        over: whether the forward that the request is for has ended.
        released: why no call can be computed again; empty where each can.
        pending: whether an earlier forward may still wait for its backward.
        asked: whether anything was ever asked of it.
        came: whether a call ever came while something was asked.
        idled: whether it ever ran as usual with gradients.
    """

    made: list[AttentionCall] = field(default_factory=list)
    count: int = 0
    current: AttentionCall | None = None
    over: bool = False
    released: str = ""
    pending: bool = False
    asked: bool = False
    came: bool = False
    idled: bool = False
    _backward: int = -1

    def restart(self) -> None:
        """Forget the calls so far: a forward begins."""
        self.pending = self.pending or (self.over and any(call.recomputed < 0 for call in self.made))
        self.made, self.count, self.current, self.over = [], 0, None, False
        self._backward, self.released = graph_task(), ""

    def release(self, reason: str) -> None:
        """Forget the calls of forwards whose backwards are over; `reason` is raised where one is computed again."""
        reason = self.released or (reason if self.made else "")
        self.restart()
        self.over, self.released, self.pending = True, reason, False

    def repeats(self) -> bool:
        """Whether a call that begins is one that activation checkpointing computes again."""
        return graph_task() != self._backward


def graph_task() -> int:
    """Return the number of the backward pass that this thread is in; -1 outside of one."""
    return torch._C._current_graph_task_id()


def recomputed(calls: list[AttentionCall], pending: bool = True) -> AttentionCall | None:
    """Return the call of a forward that activation checkpointing computes again; None if there was none.

    Args:
        calls: those of the last forward.
        pending: whether an earlier forward may wait for its backward. Then a backward that asks twice means both;
            else it is checkpointing inside of checkpointing.

    Raises:
        RuntimeError: there are several calls, or several forwards before one backward.
    """
    if not calls:
        return None
    call, now = calls[0], graph_task()
    if len(calls) > 1 or (pending and call.recomputed == now):
        times = f"{len(calls)} times in one forward" if len(calls) > 1 else "in several forwards before one backward"
        raise RuntimeError(
            f"{call.site.name} ({call.site.path}) ran {times}, and activation checkpointing runs it again in the "
            "backward, where it can't be told which mask is meant; turn activation checkpointing off, or leave this "
            "site out"
        )
    call.recomputed = now
    return call


def generator_of(seed: int, call: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the random numbers of a site's call: those of `seed` for the first, others for each further one."""
    return torch.Generator(device).manual_seed((seed + call * 0x9E3779B97F4A7C15) % 2**62)


def drops(p: float, seed: int, call: int) -> bool:
    """Whether a call is dropped, with probability p; torch's global generator is left alone."""
    return bool(torch.rand((), generator=generator_of(seed, call), device="cpu") < p)


@contextmanager
def opened(sites: Iterable[AttentionSite]) -> Iterator[list[AttentionSite]]:
    """While open, the modules ask these sites, also of those that no method has; afterwards the sites are clear."""
    with ExitStack() as stack:
        sites = list(sites)
        for site in sites:
            if site.backend is not None and not site.attached:
                site.backend.open(site)
                stack.callback(site.backend.close, site)
            stack.callback(site.clear)
        yield sites


@contextmanager
def recording(
    sites: Iterable[AttentionSite],
    needs_weights: bool = False,
    tokens: Mapping[AttentionSite, TokenBias] | None = None,
) -> Iterator[None]:
    """While open, each site records what attribution needs, see `AttentionSite.tapes`; afterwards the sites are clear.

    A method's hooks clear the sites as the model's forward begins: record without one, or below them, as probes do.

    Args:
        needs_weights: materialize attention maps, see `Tape`.
        tokens: β of the keys of each site, see `TokenBias`.
    """
    with opened(sites) as asked:
        for site in asked:
            site.put_on(Request(recording=Recording(needs_weights, tokens[site] if tokens else None)))
        yield
