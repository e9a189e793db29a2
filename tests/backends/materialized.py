"""PyTorch's attention written out, whichever framework calls it, so that its maps stand in the autograd graph."""

from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn


class Materialized:
    """While open, keeps the attention maps of a stock model, after dropout, in the order of the calls.

    Attributes:
        maps: of fused attention (B, H, T, S), of models that call softmax themselves as they have it.
    """

    def __init__(self) -> None:
        self.maps: list[Tensor] = []
        self.softmax, self.dropout = nn.functional.softmax, nn.functional.dropout

    def __enter__(self) -> Self:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(nn.functional, "softmax", self.keep_softmax)
        self.patch.setattr(nn.functional, "dropout", self.keep_dropout)
        self.patch.setattr(nn.functional, "scaled_dot_product_attention", self.attend)
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.undo()

    def keep_softmax(self, *args: Any, **kwargs: Any) -> Tensor:
        self.maps.append(self.softmax(*args, **kwargs))
        return self.maps[-1]

    def keep_dropout(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dropped = self.dropout(states, *args, **kwargs)
        if self.maps and states is self.maps[-1]:
            self.maps[-1] = dropped
        return dropped

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(QKᵀ/√d + M) V; a row without any key is uniform over all, as in transformers' `eager`."""
        if enable_gqa:
            key, value = (each.repeat_interleave(query.size(1) // key.size(1), 1) for each in (key, value))
        scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
        elif attn_mask is not None:
            scores = scores + attn_mask
        self.maps.append(self.dropout(self.softmax(scores, -1), dropout_p))
        return self.maps[-1] @ value
