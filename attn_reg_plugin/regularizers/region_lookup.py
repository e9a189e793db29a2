"""What is kept of the examples of a forward, as candidate regions of its attentions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.masks import drop_candidates, unpack_bits
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.example_digests import Examples
from attn_reg_plugin.regularizers.region_store import Kept

logger = logging.getLogger(__name__)

#: (index of the site, its call): which attention of a forward
Where = tuple[int, int]


def stacks_of(site: AttentionSite) -> tuple[str, str]:
    """Whose tokens are the queries and the keys of a site."""
    return site.stack, "encoder" if site.kind == "cross" else site.stack


def check_rows(examples: Examples, call: AttentionCall, rows: int) -> None:
    """Refuse a call whose rows aren't the examples of the forward.

    Raises:
        RuntimeError: they aren't.
    """
    if rows != len(examples):
        raise RuntimeError(
            f"{call.name} ({call.path}) ran with a batch of {rows}, but the forward has {len(examples)} examples, so "
            "what is kept cannot be told apart; leave this site out, or use probe='fresh'"
        )


def in_order(region: Tensor, site: AttentionSite, order: Callable[[str, int, torch.device], Tensor | None]) -> Tensor:
    """A map (N, H, T, S) with queries and keys in another order.

    Args:
        order: of a stack, its length and a device, the positions (N, L) that come first, second ...; None leaves them.
    """
    queries, keys = stacks_of(site)
    for dim, stack in ((-2, queries), (-1, keys)):
        positions = order(stack, region.size(dim), region.device)
        if positions is not None:
            positions = positions[:, None].unsqueeze(-1 if dim == -2 else -2).expand(region.shape)
            region = region.gather(dim, positions)
    return region


@dataclass
class Found:
    """What is known of a forward's examples.

    Attributes:
        examples: of the forward.
        kept: of each, or None.
        bits: its packed bits, read once.
        fresh: packed regions (N, H, T, ⌈S/8⌉) of a probe, for the others; by site and call.
        misfits: the names of sites whose map has another size than the kept one; each is told of once.
    """

    examples: Examples
    kept: list[Kept | None]
    bits: list[Tensor | None] = field(default_factory=list)
    fresh: dict[Where, Tensor] = field(default_factory=dict)
    misfits: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Read the bits, and find each call's among them."""
        self.bits = [None if kept is None else kept.read() for kept in self.kept]
        # a copy of the model copies this, and has no business with files
        self.kept = [None if kept is None else replace(kept, file=None, record=None) for kept in self.kept]
        self._starts = [{} if kept is None else _starts(kept) for kept in self.kept]

    @property
    def missing(self) -> list[int]:
        """The examples that nothing is kept of."""
        return [i for i, kept in enumerate(self.kept) if kept is None]

    def region(self, site: AttentionSite, where: Where, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The candidate region of a call, bool (N, H, T, S): none in padding, and none where nothing is known."""
        rows, heads, queries, keys = shape
        on_cuda = device.type == "cuda"  # which copies from pinned memory while the host goes on
        size = rows, heads, queries, -(-keys // 8)
        packed = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=on_cuda)
        ends = [self.examples.lengths(stack, n).tolist() for stack, n in zip(stacks_of(site), shape[2:], strict=True)]
        for i, starts in enumerate(self._starts):
            start, there = starts.get(where, (0, ()))
            if there != (heads, ends[0][i], ends[1][i]):
                if where in starts and site.name not in self.misfits:
                    self.misfits.add(site.name)
                    logger.warning(
                        f"ad_drop: {site.name} sees an example at another length than the one that was kept, so it "
                        "drops nothing there; supply example_tokens without padding, or use probe='fresh'"
                    )
                continue  # or LayerDrop left the site out
            width = -(-there[2] // 8)
            bits = self.bits[i][start : start + heads * there[1] * width].view(heads, there[1], width)
            packed[i, :, : there[1], :width] = bits
        region = in_order(unpack_bits(packed.to(device, non_blocking=on_cuda), keys), site, self.examples.order_back)
        fresh, missing = self.fresh.get(where), self.missing
        if fresh is not None and missing:
            region[missing] = unpack_bits(fresh[missing], keys)
        return region


def _starts(kept: Kept) -> dict[Where, tuple[int, tuple[int, int, int]]]:
    """Of each call: where its bits begin, and its (H, T, S)."""
    starts, at = {}, 0
    for index, call, heads, queries, keys in kept.parts:
        starts[index, call] = at, (heads, queries, keys)
        at += heads * queries * -(-keys // 8)
    return starts


def drawn_from(
    found: Found,
    site: AttentionSite,
    index: int,
    q: float,
    shape: tuple[int, ...],
    valid: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """A keep mask (N, H, T, S): of the candidates that are kept each is dropped with probability q."""
    call = site.current or AttentionCall(site)
    check_rows(found.examples, call, shape[0])
    region = found.region(site, (index, call.index), shape, generator.device)
    return drop_candidates(region, valid, q, generator=generator)
