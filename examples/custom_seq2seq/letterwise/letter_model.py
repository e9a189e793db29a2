"""A model of a user's own: a small encoder-decoder around fairseq's attention. It knows no regularizer."""

from dataclasses import dataclass, field

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqDecoder, FairseqEncoder, FairseqEncoderDecoderModel, register_model
from fairseq.modules import MultiheadAttention
from torch import nn


@dataclass
class LetterwiseConfig(FairseqDataclass):
    """The model's flags."""

    width: int = field(default=64, metadata={"help": "size of the states"})
    layers: int = field(default=2, metadata={"help": "of encoder and decoder"})
    heads: int = field(default=4, metadata={"help": "of each attention"})


class Block(nn.Module):
    """Self-attention, cross attention if there is a memory, and a feed-forward; states (T, B, C)."""

    def __init__(self, cfg, cross):
        super().__init__()
        self.self_attn = MultiheadAttention(cfg.width, cfg.heads, self_attention=True)
        self.cross_attn = MultiheadAttention(cfg.width, cfg.heads, encoder_decoder_attention=True) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(cfg.width) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(cfg.width, 2 * cfg.width), nn.GELU(), nn.Linear(2 * cfg.width, cfg.width))

    def forward(self, x, padding=None, future=None, memory=None, memory_padding=None):
        h = self.norms[0](x)
        x = x + self.self_attn(h, h, h, key_padding_mask=padding, attn_mask=future, need_weights=False)[0]
        if memory is not None:
            h = self.norms[1](x)
            x = x + self.cross_attn(h, memory, memory, key_padding_mask=memory_padding, need_weights=False)[0]
        return x + self.feed(self.norms[2](x))


def embed(table, positions, tokens):
    """Tokens (B, T) to states (T, B, C)."""
    return (table(tokens) + positions.weight[: tokens.size(1)]).transpose(0, 1)


class LetterEncoder(FairseqEncoder):
    """Letters to states."""

    def __init__(self, dictionary, cfg, table):
        super().__init__(dictionary)
        self.table, self.positions = table, nn.Embedding(512, cfg.width)
        self.layers = nn.ModuleList(Block(cfg, cross=False) for _ in range(cfg.layers))

    def forward(self, src_tokens, src_lengths=None, **kwargs):
        padding = src_tokens.eq(self.dictionary.pad())
        x = embed(self.table, self.positions, src_tokens)
        for layer in self.layers:
            x = layer(x, padding)
        return {"states": x, "padding": padding}


class LetterDecoder(FairseqDecoder):
    """States and the letters so far to the next letter."""

    def __init__(self, dictionary, cfg, table):
        super().__init__(dictionary)
        self.table, self.positions = table, nn.Embedding(512, cfg.width)
        self.layers = nn.ModuleList(Block(cfg, cross=True) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)

    def forward(self, prev_output_tokens, encoder_out=None, **kwargs):
        padding = prev_output_tokens.eq(self.dictionary.pad())
        future = torch.full((padding.size(1),) * 2, float("-inf"), device=padding.device).triu(1)
        x = embed(self.table, self.positions, prev_output_tokens)
        for layer in self.layers:
            x = layer(x, padding, future, encoder_out["states"], encoder_out["padding"])
        return self.norm(x).transpose(0, 1) @ self.table.weight.t(), {}


@register_model("letterwise", dataclass=LetterwiseConfig)
class LetterwiseModel(FairseqEncoderDecoderModel):
    """The two of them, with one embedding."""

    @classmethod
    def build_model(cls, cfg, task):
        letters = task.source_dictionary
        table = nn.Embedding(len(letters), cfg.width, letters.pad())
        nn.init.normal_(table.weight, std=cfg.width**-0.5)
        return cls(LetterEncoder(letters, cfg, table), LetterDecoder(letters, cfg, table))
