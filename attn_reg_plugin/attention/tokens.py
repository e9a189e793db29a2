"""Whole tokens: how much the objective depends on a key in every attention, head and query at once.

A bias β_j = 0 is added to the scores of key j everywhere, and every attention gives α = ½ of its output. The gradient,
of all sequences by one backward without a map,

    ∂F/∂β_j = Σ over attentions, heads and queries of A_ij (B_ij - Σ_k A_ik B_ik),    B = ∂F/∂A,

is the first-order effect on F of turning the token up; dropping is β_j → -∞. α A V is a path of integrated gradients
(Sundararajan et al. 2017, arXiv 1703.01365). At its end, 1, a token that decides alone has saturated attention.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_reg_plugin.attention.masks import existing_keys

#: dimensions that hold β, of which all but one are zero: kernels of a GPU want head sizes that are divisible by it
ALIGNED = 8
#: α: where the gradient is taken on the path from attentions that give nothing, 0, to the model's own, 1
HALFWAY = 0.5


@dataclass(eq=False)
class TokenBias:
    """β of a sequence of keys in the probe: zeros that all attentions over it add to the scores of each key, for ∂F/∂β.

    Attributes:
        leaves: β (B, S) of each call, fp32, made by the first attention that runs.
        valid: bool (B, S), the keys that exist for any query of that attention.
        columns: what `with_bias` adds to queries and keys, by call, scale and heads: made once for all layers.
    """

    leaves: list[Tensor] = field(default_factory=list)
    valid: list[Tensor] = field(default_factory=list)
    columns: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

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

    def columns_of(self, index: int, key: Tensor, valid: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return what call number `index` appends to its queries and keys, see `with_bias`.

        Args:
            key: (B, H, S, D).
            valid: of that attention.
            scale: factor of its scores.

        Returns:
            1 / scale (1, 1, 1, 8) and β (B, H, S, 8), each in its first column, beside zeros; fp32, in which the
            gradients of all attentions add up.
        """
        known, leaf = (index, scale, key.size(1)), self.leaf(index, key, valid)
        if known not in self.columns:
            beta = F.pad(leaf[:, None, :, None], (0, ALIGNED - 1)).expand(-1, key.size(1), -1, -1)
            self.columns[known] = F.pad(beta.new_full((1, 1, 1, 1), 1.0 / scale), (0, ALIGNED - 1)), beta
        return self.columns[known]


def with_bias(
    query: Tensor, key: Tensor, value: Tensor, constant: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value whose scores have β added to those of each key, in every head and row, and α V.

    β is one more dimension of the keys, beside a constant one of the queries: a bias that requires a gradient would
    send the kernels off their fused path, as would values of another size, and a size that is not divisible by eight.

    Args:
        query: (B, H, T, D).
        key, value: (B, H, S, D).
        constant, beta: see `TokenBias.columns_of`.
    """
    ones, beta = constant.to(query.dtype).expand(*query.shape[:-1], -1), beta.to(key.dtype)
    return torch.cat([query, ones], -1), torch.cat([key, beta], -1), torch.cat([HALFWAY * value, beta.detach()], -1)
