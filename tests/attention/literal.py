"""The equations evaluated literally: one row at a time, nothing fused, nothing vectorized."""

from fractions import Fraction
from itertools import product

import torch
from torch import Tensor


def loop_row(scores: list[float], valid: list[bool], p: float, direction: str) -> tuple[set[int], set[int], int]:
    """Sort the valid positions ascending; those at or above the element of index int(n(1 - p)) are candidates.

    Returns:
        Those above it, those tied with it, and the number of candidates among both.
    """
    scores = [score if direction == "high" else -score for score in scores]
    keys = [s for s, exists in enumerate(valid) if exists]
    ascending = sorted(keys, key=lambda s: scores[s])
    index = int(len(keys) * (1 - Fraction(str(p))))
    if index == len(keys):
        return set(), set(), 0
    threshold = scores[ascending[index]]
    ties = {s for s in keys if scores[s] == threshold}
    return {s for s in keys if scores[s] > threshold}, ties, len(keys) - index


def check_region(region: Tensor, attribution: Tensor, valid: Tensor | None, p: float, direction: str = "high") -> None:
    """Assert that `region` is the candidate region of `attribution`, whichever of the tied positions it takes."""
    assert region.dtype == torch.bool
    assert region.shape == attribution.shape
    exists = torch.ones_like(region) if valid is None else valid.expand(region.shape)
    for at in product(*map(range, region.shape[:-1])):
        must, may, count = loop_row(attribution[at].float().tolist(), exists[at].tolist(), p, direction)
        chosen = set(region[at].nonzero().flatten().tolist())
        assert must <= chosen <= must | may and len(chosen) == count, (at, must, may, count, chosen)


def loop_candidates(attribution: Tensor, valid: Tensor | None, p: float, direction: str = "high") -> Tensor:
    """The candidate region; of tied positions the first ones."""
    region = torch.zeros(attribution.shape, dtype=torch.bool)
    exists = torch.ones_like(region) if valid is None else valid.expand(region.shape)
    for at in product(*map(range, region.shape[:-1])):
        must, may, count = loop_row(attribution[at].tolist(), exists[at].tolist(), p, direction)
        region[at][(sorted(must) + sorted(may))[:count]] = True
    return region


def loop_weights(
    query: Tensor,
    key: Tensor,
    *,
    valid: Tensor | None = None,
    keep: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """softmax(QKᵀ) over the kept keys; uniform over the valid ones if none is kept; zero if none is valid.

    A sink takes its share of a row with kept keys, and is left out.
    """
    batch, heads, queries, size = query.shape
    keys = key.size(-2)
    shape = (batch, heads, queries, keys)
    everything = torch.ones(shape, dtype=torch.bool)
    valid = everything if valid is None else valid.expand(shape)
    keep = everything if keep is None else keep.expand(shape)
    bias = None if bias is None else bias.expand(shape)
    sink = None if sink is None else sink.expand(*shape[:-1], 1)
    scale = size**-0.5 if scale is None else scale
    rows = []
    for b, h, t in product(range(batch), range(heads), range(queries)):
        there = valid[b, h, t]
        live, weights = there & keep[b, h, t], query.new_zeros(keys)
        if live.any():
            scores = (query[b, h, t] * key[b, h, live]).sum(-1) * scale
            scores = scores if bias is None else scores + bias[b, h, t, live]
            largest = scores.detach().max()
            exponentials = (scores - largest).exp()
            total = exponentials.sum() + (0.0 if sink is None else (sink[b, h, t, 0] - largest).exp())
            weights = weights.masked_scatter(live, exponentials / total)
        elif there.any():
            weights = weights.masked_fill(there, 1.0 / int(there.sum()))
        rows.append(weights)
    return torch.stack(rows).view(shape)


def loop_attention(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    """O = A V, with the weights of `loop_weights`."""
    return loop_weights(query, key, **options) @ value


def padding(lengths: list[int], size: int) -> Tensor:
    """(B, 1, 1, S), True for the first keys of each example."""
    return (torch.arange(size) < torch.tensor(lengths).unsqueeze(-1))[:, None, None, :]


def causal(size: int) -> Tensor:
    """(T, T), True up to the diagonal."""
    return torch.ones(size, size, dtype=torch.bool).tril()
