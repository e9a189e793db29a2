"""Choose the positions to drop: pure functions on tensors.

AD-DROP (Yang et al., NeurIPS 2022): the positions of a row are sorted by attribution, those at or above the element of
index int(n(1 - p)) form the candidate discard region, and each of them is dropped with probability q. Here n counts the
*valid* keys of the row, so padding and the future change neither the threshold nor the count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Result = TypeVar("Result")

DIRECTIONS = ("high", "low")
#: n(1 - p) is counted in units of 2^-44, since not every device has float64; a row may have up to 2^19 keys
_BITS = 44
#: added to n(1 - p) before it is rounded down: 10 · (1 - 0.9) is 1
_GUARD = 2.0**-25


def check_ratio(name: str, value: float) -> None:
    """Refuse, by a ValueError, a `value` outside [0, 1], NaN included."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}, but must lie in [0, 1]")


def check_mask(name: str, mask: Tensor | None) -> None:
    """Refuse, by a TypeError, a mask of numbers, which would mean something else wherever it is inverted or added."""
    if mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        return
    given = f"tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    raise TypeError(f"{name} is a {given}, but must be a tensor of torch.bool, True = attend")


def _kept(keys: Any, p: float) -> Any:
    """Return int(n(1 - p)), how many of n keys are no candidates, of a number or a tensor of int64.

    The product is guarded against round-off: n = 10 and p = 0.9 leave int(10 · 0.1) = 1 position, not 0.
    """
    return (keys * round((1.0 - p) * 2**_BITS) + round(_GUARD * 2**_BITS)) >> _BITS


def _ranked(attribution: Tensor, valid: Tensor | None, p: float, direction: str) -> tuple[Tensor, Tensor | None]:
    """The positions of the candidate region: indices (B, H, T, K), and which of the K count in each row.

    K is the candidate count of a row in which every key is valid, the largest there can be. The second value is
    None when every row has exactly K.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}, but must be one of {', '.join(DIRECTIONS)}")
    check_ratio("p", p)
    check_mask("valid", valid)
    keys = attribution.size(-1)
    largest = keys - _kept(keys, p)
    scores = attribution.float() if direction == "high" else -attribution.float()
    if valid is None:
        return scores.topk(largest, dim=-1, sorted=False).indices, None
    valid = valid.expand(*valid.shape[:-1], keys)  # so that a mask over whole rows is counted key by key
    scores = scores.masked_fill(~valid, float("-inf"))
    counts = valid.sum(-1, keepdim=True)
    counts = counts - _kept(counts, p)
    ranks = torch.arange(largest, device=attribution.device)
    return scores.topk(largest, dim=-1, sorted=True).indices, ranks < counts


def candidate_region(attribution: Tensor, valid: Tensor | None, p: float, direction: str = "high") -> Tensor:
    """The positions that may be dropped (AD-DROP's candidate discard region, its s = 0).

    Args:
        attribution: (B, H, T, S), any floating dtype; compared in fp32.
        valid: bool, True = the key exists for the query, broadcastable to (B, H, T, S); None means all.
        p: ratio of candidates per row, in [0, 1]; 0 gives none, 1 gives every valid position.
        direction: `high` takes the largest attributions, `low` the smallest.

    Returns:
        bool (B, H, T, S), True = candidate. Of positions tied at the threshold only as many are taken as the rank
        gives, so a constant row does not lose everything.

    Raises:
        ValueError: p outside [0, 1], or an unknown direction.
        TypeError: `valid` is not bool.
    """
    indices, counted = _ranked(attribution, valid, p, direction)
    region = torch.zeros(attribution.shape, dtype=torch.bool, device=attribution.device)
    return region.scatter_(-1, indices, True if counted is None else counted.expand(indices.shape))


def drop_candidates(
    candidates: Tensor, valid: Tensor | None, q: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Drop each candidate with probability q (AD-DROP's mask).

    Args:
        candidates: bool (B, H, T, S), True = may be dropped.
        valid: bool, broadcastable to (B, H, T, S); None means all.
        q: probability of dropping a candidate, in [0, 1].
        generator: source of the random numbers, torch's global one by default.

    Returns:
        The keep mask, bool (B, H, T, S), True = attend; a subset of `valid`.

    Raises:
        ValueError: q outside [0, 1].
        TypeError: `candidates` or `valid` is not bool.
    """
    check_ratio("q", q)
    check_mask("candidates", candidates)
    check_mask("valid", valid)
    keep = ~(candidates & _bernoulli(candidates.shape, q, candidates.device, generator))
    return keep if valid is None else keep & valid


def sample_keep(
    attribution: Tensor,
    valid: Tensor | None,
    p: float,
    q: float,
    direction: str = "high",
    *,
    enabled: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`drop_candidates(candidate_region(...))` in one pass that draws random numbers for the candidates only.

    Arguments, result and errors as there; the distribution is the same, the random draws are not. In addition:

    Args:
        enabled: bool scalar on the device; where it is False nothing is dropped.
    """
    check_ratio("q", q)
    indices, counted = _ranked(attribution, valid, p, direction)
    dropped = _bernoulli(indices.shape, q, indices.device, generator)
    for condition in (counted, enabled):
        dropped = dropped if condition is None else dropped & condition
    keep = torch.ones(attribution.shape, dtype=torch.bool, device=attribution.device)
    keep.scatter_(-1, indices, ~dropped)
    return keep if valid is None else keep & valid


def pack_bits(mask: Tensor) -> Tensor:
    """Eight positions a byte along the last dimension, filled up with False: bool (..., S) to uint8 (..., ⌈S/8⌉)."""
    size = mask.size(-1)
    if size % 8:
        mask = torch.nn.functional.pad(mask, (0, -size % 8))
    mask = mask.contiguous()
    mask = mask.clone() if mask.storage_offset() % 8 else mask  # eight bytes begin at a multiple of eight
    bytes_of_mask = mask.view(torch.uint8).view(*mask.shape[:-1], mask.size(-1) // 8, 8)
    # eight bytes of 0 or 1 are one number, whose product with this one has their bits side by side at its upper end
    gathered = (bytes_of_mask.view(torch.int64).squeeze(-1) * 0x0102040810204080) >> 56
    return (gathered & 255).to(torch.uint8)


@lru_cache(maxsize=16)
def _bytes_unpacked(dtype: torch.dtype, device: torch.device) -> Tensor:
    kept = (torch.arange(256, device=device).unsqueeze(-1) >> torch.arange(8, device=device)) % 2 == 1
    return kept if dtype == torch.bool else torch.zeros_like(kept, dtype=dtype).masked_fill(~kept, -math.inf)


def unpack_bits(packed: Tensor, size: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """Unpack what `pack_bits` packed: uint8 (..., ⌈S/8⌉) to bool (..., S), S = `size`; in a floating `dtype` to scores,
    0 and -inf."""
    table = _bytes_unpacked(dtype, packed.device)
    return table.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], packed.size(-1) * 8)[..., :size]


class PackedMask:
    """Hold a keep mask as attention uses it, as packed bits, an eighth of its size: no map is kept per site.

    Attributes:
        bits: uint8 (B, H, T, ⌈S/8⌉), True = attend, with a key in every row: rows that lost all have their valid ones.
        dead: those rows, bool (B, H, T, 1).
        keys: S.
        shared: whether many attentions use it, so that they hold one map of its scores.
    """

    def __init__(self, bits: Tensor, dead: Tensor, keys: int, shared: bool = False) -> None:
        self.bits, self.dead, self.keys, self.shared = bits, dead, keys, shared

    @classmethod
    def of(cls, keep: Tensor, valid: Tensor | None, shared: bool = False) -> PackedMask:
        """Pack a mask, bool (B, H, T, S) or broadcastable to it, of the positions that are `valid`."""
        filled, _ = rows_of(valid)
        live = keep if valid is None else keep & valid
        dead = ~live.any(-1, keepdim=True)
        return cls(pack_bits(live | (dead if filled is None else dead & filled)), dead, live.size(-1), shared)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, T, S)."""
        return *self.bits.shape[:-1], self.keys

    def live(self) -> Tensor:
        """Return the positions to attend to, bool."""
        return unpack_bits(self.bits, self.keys)

    def scores(self, dtype: torch.dtype) -> Tensor:
        """Return what a shared mask adds to the scores: 0 and -inf; made once."""
        return _once(self.bits, dtype, lambda: unpack_bits(self.bits, self.keys, dtype))

    def unpacked(self) -> Tensor:
        """Return the keep mask, without what dead rows have again."""
        return self.live() & ~self.dead

    def split(self, parts: int) -> list[PackedMask]:
        """Return the masks that lie one after the other in the first dimension."""
        both = (tensor.unflatten(0, (parts, -1)).unbind() for tensor in (self.bits, self.dead))
        return [PackedMask(bits, dead, self.keys) for bits, dead in zip(*both, strict=True)]


#: of a mask: its version, and what was computed of it by `_once`
_KNOWN: MutableMapping[Tensor, tuple[int, dict[Any, Any]]] = WeakTensorKeyDictionary()


def _once(mask: Tensor, name: Any, compute: Callable[[], Result]) -> Result:
    """Compute something of a mask once for all attentions that are given it, as long as it lives and is not changed.

    The result must not be a view of it, which would keep it.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or mask.is_inference():
        return compute()
    version, known = _KNOWN.get(mask, (None, {}))
    if version != mask._version:
        _KNOWN[mask] = mask._version, (known := {})
    if name not in known:
        known[name] = compute()
    return known[name]


def four_dimensional(mask: Tensor) -> Tensor:
    """Return a mask that is broadcastable to (B, H, T, S) with all of these dimensions."""
    return mask[(None,) * (4 - mask.dim())]


def rows_of(valid: Tensor | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return `valid`, broadcastable to (B, H, T, S), with rows without a key filled; and these, bool (B, H, T, 1)."""

    def rows() -> tuple[Tensor, Tensor]:
        there = four_dimensional(valid)
        empty = ~there.any(-1, keepdim=True)
        return there | empty, empty

    return (None, None) if valid is None else _once(valid, "rows", rows)


def scores_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a bool mask adds to the scores: 0 and -inf."""
    return _once(mask, dtype, lambda: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf")))


def dropped_fraction(keep: Tensor, valid: Tensor | None, sites: int = 1) -> tuple[Tensor, Tensor]:
    """Count the dropped positions and the valid ones of each site, fp32 (sites,) on the device: no synchronization.

    Args:
        keep: bool (B, H, T, S), a subset of `valid`; of several sites, one after the other.
        valid: bool, broadcastable to (B, H, T, S); None means all.
        sites: their number.
    """
    # filled there: a number that is copied to the device would wait for it
    total = torch.full((sites,), float(keep.numel() // sites), device=keep.device)
    if valid is not None:
        parts = sites if len(valid) == len(keep) else 1
        total = valid.reshape(parts, -1).sum(-1).float() * (keep.numel() * parts / max(1, sites * valid.numel()))
    return total - keep.reshape(sites, -1).sum(-1).float(), total.expand(sites)


def all_finite(tensors: Iterable[Tensor | None]) -> Tensor:
    """Whether those that are there are finite: a bool scalar on their device, so that nothing waits for it."""
    there = [tensor.detach() for tensor in tensors if tensor is not None and tensor.numel()]
    if not there:
        return torch.ones((), dtype=torch.bool)
    # the largest absolute value is finite in every dtype, which a sum need not be
    return torch.stack(torch._foreach_norm(there, float("inf"))).isfinite().all()


def existing_keys(valid: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return which keys exist for any query: bool (B, S) of a `valid` that is broadcastable to (B, H, T, S)."""
    if valid is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    return four_dimensional(valid).flatten(1, 2).any(1).expand(shape)


def joined(masks: Sequence[Tensor | None], batch: int) -> Tensor | None:
    """Return masks of one shape, or all None, one after the other: that of a batch as many times as large as `batch`.

    They are broadcastable to (B, H, T, S).
    """
    return None if masks[0] is None else torch.cat([four_dimensional(m).expand(batch, -1, -1, -1) for m in masks])


def _bernoulli(
    shape: torch.Size, probability: float, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """True with `probability`; 0 and 1 draw nothing."""
    if probability in (0.0, 1.0):
        return torch.full(shape, bool(probability), dtype=torch.bool, device=device)
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(probability, generator=generator)
