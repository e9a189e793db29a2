"""A user's own Transformer (Vaswani et al. 2017), regularized: what a user of plain PyTorch would write.

Only two lines are about regularizing: each attention module holds an `AttentionSite`, and it calls
`regularized_attention` with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention import AttentionSite, regularized_attention


class Attention(nn.Module):
    """Multi-head attention with a site.

    Args:
        width: C.
        heads: H, a divisor of C.
        site: the site of this attention.
    """

    def __init__(self, width: int, heads: int, site: AttentionSite) -> None:
        super().__init__()
        self.heads = heads
        self.to_query, self.to_key, self.to_value, self.to_output = (nn.Linear(width, width) for _ in range(4))
        self.site = site

    def forward(self, states: Tensor, memory: Tensor, valid: Tensor) -> Tensor:
        """(B, T, C), (B, S, C) and valid, bool and broadcastable to (B, H, T, S), give (B, T, C)."""
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projected in (self.to_query(states), self.to_key(memory), self.to_value(memory))
        )
        output = regularized_attention(query, key, value, valid=valid, site=self.site)
        return self.to_output(output.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Self-attention, in a decoder cross-attention, and a feed-forward network; norms after the residuals."""

    def __init__(self, stack: str, layer: int, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        kinds = ("self", "cross") if stack == "decoder" else ("self",)
        self.attentions = nn.ModuleList(Attention(width, heads, AttentionSite(stack, kind, layer)) for kind in kinds)
        self.feed_forward = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(len(kinds) + 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, valid: Tensor, memory: Tensor | None = None, there: Tensor | None = None) -> Tensor:
        """(B, T, C) to (B, T, C); `memory` (B, S, C) and its mask `there` are the decoder's."""
        x = self.norms[0](x + self.dropout(self.attentions[0](x, x, valid)))
        if memory is not None:
            x = self.norms[1](x + self.dropout(self.attentions[1](x, memory, there)))
        return self.norms[-1](x + self.dropout(self.feed_forward(x)))


class Transformer(nn.Module):
    """An encoder-decoder with one embedding for source, target and output.

    Args:
        vocabulary: V.
        layers: L, of the encoder and of the decoder.
        width, inner, heads: C, the feed-forward network's size, H.
        dropout: of embeddings and sublayers, in [0, 1).
        longest: the most tokens of a sentence.
        padding: the id of padding.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int = 6,
        width: int = 512,
        inner: int = 2048,
        heads: int = 8,
        dropout: float = 0.1,
        longest: int = 1024,
        padding: int = 1,
    ) -> None:
        super().__init__()
        self.padding = padding
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=padding)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.positions = nn.Embedding(longest, width)
        self.encoder, self.decoder = (
            nn.ModuleList(Layer(stack, i, width, inner, heads, dropout) for i in range(layers))
            for stack in ("encoder", "decoder")
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Token ids (B, S) and, shifted to the right, (B, T) give logits (B, T, V)."""
        there = source.ne(self.padding)[:, None, None, :]
        past = torch.ones(target.size(1), target.size(1), dtype=torch.bool, device=target.device).tril()
        past = past & target.ne(self.padding)[:, None, None, :]
        memory, x = self._embed(source), self._embed(target)
        for layer in self.encoder:
            memory = layer(memory, there)
        for layer in self.decoder:
            x = layer(x, past, memory, there)
        return nn.functional.linear(x, self.embedding.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, C)."""
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        return self.dropout(x + self.positions.weight[: tokens.size(1)])
