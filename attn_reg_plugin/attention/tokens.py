"""Whole tokens: how much the objective depends on a key in every attention, head and query at once.

A bias β_j = 0 is added to the scores of key j everywhere. Its gradient, of all sequences by one backward without a map,

    ∂F/∂β_j = Σ over attentions, heads and queries of A_ij (B_ij - Σ_k A_ik B_ik),    B = ∂F/∂A,

is the first-order effect on F of turning the token up; dropping it is β_j → -∞.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_reg_plugin.attention.masks import four_dimensional


@dataclass(eq=False)
class TokenBias:
    """β of a sequence of keys in the probe: zeros that are added to the scores of each key, so that ∂F/∂β can be taken.

    Shared by all attentions over the sequence.

    Attributes:
        leaves: β (B, S) of each call, fp32, made by the first attention that runs.
        valid: bool (B, S), the keys that exist for any query of that attention.
    """

    leaves: list[Tensor] = field(default_factory=list)
    valid: list[Tensor] = field(default_factory=list)

    def leaf(self, index: int, key: Tensor, valid: Tensor | None) -> Tensor:
        """Return β of call number `index`, whose keys are `key` (B, H, S, D).

        Raises:
            ValueError: an attention over the sequence has other keys than the first one.
        """
        shape = key.size(0), key.size(-2)
        if index == len(self.leaves):
            self.leaves.append(torch.zeros(shape, device=key.device, requires_grad=torch.is_grad_enabled()))
            self.valid.append(existing_keys(valid, shape, key.device))
        if self.leaves[index].shape != shape:
            raise ValueError(
                f"unit='token' hides a token in all of the selected attentions, but their keys differ: {shape} and "
                f"{tuple(self.leaves[index].shape)} (batch, keys); select sites over one sequence, or unit='position'"
            )
        return self.leaves[index]


def existing_keys(valid: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return which keys exist for any query: bool (B, S) of a `valid` that is broadcastable to (B, H, T, S)."""
    if valid is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    return four_dimensional(valid).flatten(1, 2).any(1).expand(shape)


def with_bias(query: Tensor, key: Tensor, value: Tensor, scale: float, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value whose scores have β (B, S) added to those of each key, in every head and row.

    β is one more dimension of the keys, beside a constant one of the queries: a bias that requires a gradient would
    send the kernels off their fused path, as would values of another size.
    """
    column = beta.to(key.dtype)[:, None, :, None].expand(*key.shape[:-1], 1)
    return F.pad(query, (0, 1), value=1.0 / scale), torch.cat([key, column], -1), F.pad(value, (0, 1))
