"""The single-head attention that every layer of AttendOut's generator shares (Wu, Zhao & Zhang 2021, section 4.2).

    scores = (X Wq + bq)(Y Wk + bk)ᵀ / √w                 the logits of P(keep)
    X'     = norm(X + softmax(scores)(Y Wv + bv) Wo + bo)

Since the weights are the same in every layer, their products are taken once a forward: X (Wq Wkᵀ) Yᵀ and
softmax(·) Y (Wv Wo) are the same function and the same gradients, with half as many multiplications by a weight. A
narrow attention (w well below C) is cheaper as it is written.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class Maps(NamedTuple):
    """The linear maps of an attention, each as (weight, bias); None where there is nothing to apply.

    Attributes:
        query, key: of the states and of the memory; scores are their products.
        shift: of the states to one number, added to the scores of a row.
        value: of the memory.
        output: of the mixed values; with None, only its bias is left.
    """

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor] | None
    shift: tuple[Tensor, Tensor] | None
    value: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor] | None


class SharedAttention(nn.Module):
    """One single-head attention, used by every layer: shared Q, K, V, O, residual and layer norm.

    Args:
        states: C, of the states.
        memory: M, of what they attend to.
        width: w, of queries, keys and values; C is the paper's.
    """

    def __init__(self, states: int, memory: int, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(states, width), nn.Linear(memory, width)
        self.value, self.output = nn.Linear(memory, width), nn.Linear(width, states)
        self.norm = nn.LayerNorm(states)

    @property
    def folded(self) -> bool:
        """Whether the weights are multiplied first: a token costs C M multiplications, not (C + M) w."""
        width, states = self.query.weight.shape
        memory = self.key.in_features
        return states * memory < (states + memory) * width

    def maps(self) -> Maps:
        """What is the same in every layer."""
        query, key, value, output = ((m.weight, m.bias) for m in (self.query, self.key, self.value, self.output))
        if not self.folded:
            return Maps(query, key, None, value, output)
        return Maps(
            query=(key[0].t() @ query[0], query[1] @ key[0]),
            key=None,
            shift=((key[1] @ query[0]).unsqueeze(0), (query[1] @ key[1]).unsqueeze(0)),
            value=(output[0] @ value[0], output[0] @ value[1]),
            output=None,
        )


class Layers:
    """A shared attention in one forward of the generator, layer by layer.

    Keys and values are kept while the memory is the same tensor, as in cross attention.

    Args:
        attention: whose weights stay as they are meanwhile.
    """

    def __init__(self, attention: SharedAttention) -> None:
        self.attention, self.maps = attention, attention.maps()
        self._memory: Tensor | None = None
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def scores(self, states: Tensor, memory: Tensor) -> Tensor:
        """(B, T, C) and (B, S, M): the raw scores, (B, T, S)."""
        if memory is not self._memory:
            self._memory, self._value = memory, None
            self._key = memory if self.maps.key is None else F.linear(memory, *self.maps.key)
        scores = F.linear(states, *self.maps.query) @ self._key.transpose(-1, -2)
        if self.maps.shift is not None:
            scores = scores + F.linear(states, *self.maps.shift)
        return scores / math.sqrt(self.attention.query.out_features)

    def attend(self, states: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
        """The next states (B, T, C) from these and their `scores`; valid bool (B, T, S), an empty row mixes nothing."""
        if self._value is None:
            self._value = F.linear(self._memory, *self.maps.value)
        empty = ~valid.any(-1, keepdim=True)
        weights = scores.masked_fill(~(valid | empty), -math.inf).softmax(-1).masked_fill(empty, 0.0)
        mixed = weights @ self._value
        mixed = mixed + self.attention.output.bias if self.maps.output is None else F.linear(mixed, *self.maps.output)
        return self.attention.norm(states + mixed)
