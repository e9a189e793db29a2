"""Choose the positions to drop: pure functions on tensors.

AD-DROP (Yang et al., NeurIPS 2022): the positions of a row are sorted by attribution, those at or above the element of
index int(n(1 - p)) form the candidate discard region, and each of them is dropped with probability q. Here n counts the
*valid* keys of the row, so padding and the future change neither the threshold nor the count.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

DIRECTIONS = ("high", "low")


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


def candidate_counts(valid_keys: Tensor, p: float) -> Tensor:
    """Count the candidates of a row: n - int(n(1 - p)).

    Args:
        valid_keys: n, the number of valid keys per row, any shape, integer.
        p: ratio of candidates, in [0, 1].

    Returns:
        Counts in [0, n], shape of `valid_keys`, int64. The product is guarded against round-off: n = 10 and
        p = 0.9 leave int(10 · 0.1) = 1 position, not 0.
    """
    kept = (valid_keys.double() * (1.0 - p) + 1e-9).floor().long()
    return (valid_keys - kept).clamp(min=0)


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
    largest = int(candidate_counts(torch.tensor(keys), p))
    scores = attribution.float() if direction == "high" else -attribution.float()
    if valid is None:
        return scores.topk(largest, dim=-1, sorted=False).indices, None
    valid = valid.expand(*valid.shape[:-1], keys)  # so that a mask over whole rows is counted key by key
    scores = scores.masked_fill(~valid, float("-inf"))
    counts = candidate_counts(valid.sum(-1, keepdim=True), p)
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


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """Unpack what `pack_bits` packed: uint8 (..., ⌈S/8⌉) to bool (..., S), S = `size`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(-2)
    return bits.view(torch.bool)[..., :size]


class PackedMask:
    """Hold a mask, bool (..., S), as packed bits, an eighth of its size: long sequences keep no map per site."""

    def __init__(self, mask: Tensor) -> None:
        self.bits, self.shape = pack_bits(mask), mask.shape

    def unpacked(self) -> Tensor:
        """Return the mask, a new tensor at every call."""
        return unpack_bits(self.bits, self.shape[-1])


def dropped_fraction(keep: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Count the dropped positions and the valid ones, as fp32 scalars on the device: no synchronization.

    Args:
        keep: bool (B, H, T, S), a subset of `valid`.
        valid: bool, broadcastable to (B, H, T, S); None means all.
    """
    # filled there: a number that is copied to the device would wait for it
    total = torch.full((), float(keep.numel()), device=keep.device)
    if valid is not None:
        total = valid.sum().float() * (keep.numel() / valid.numel())
    return total - keep.count_nonzero().float(), total


def all_finite(tensors: Iterable[Tensor | None]) -> Tensor:
    """Whether those that are there are finite: a bool scalar on their device, so that nothing waits for it."""
    each = [tensor.isfinite().all() for tensor in tensors if tensor is not None]
    return torch.stack(each or [torch.ones((), dtype=torch.bool)]).all()


def _bernoulli(
    shape: torch.Size, probability: float, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """True with `probability`; 0 and 1 draw nothing."""
    if probability in (0.0, 1.0):
        return torch.full(shape, bool(probability), dtype=torch.bool, device=device)
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(probability, generator=generator)
