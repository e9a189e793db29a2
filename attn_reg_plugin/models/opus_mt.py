"""`--arch opus_mt`: Marian's Transformer, as OPUS-MT models are published, native to fairseq.

Junczys-Dowmunt et al., "Marian: Fast Neural Machine Translation in C++", ACL 2018; Tiedemann & Thottingal,
"OPUS-MT", EAMT 2020. It is fairseq's own Transformer, post-norm, with four things of Marian's:

- sinusoids whose sines fill the first half and whose cosines fill the second, with position 0 for the first token;
- decoding starts from the embedding of padding, which is zero in a published model, and not from that of `</s>`;
- a constant `final_logits_bias` is added to the logits;
- swish in the feed-forward layers.

Published models score padding, whose row and bias are zero, with a logit of 0, often above every real piece. fairseq
takes it out after the softmax, which loses its share; with `--renormalize-search` it goes before the softmax.

Attention is fairseq's `MultiheadAttention`, so every regularizer finds it. `--bpe opus_mt` is OPUS-MT's tokenization in
`fairseq-generate` and `fairseq-interactive`, so that raw text goes in and comes out.
"""

# no `from __future__ import annotations`: fairseq makes flags of the types of a config's fields, not of their names
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
    base_architecture,
)
from torch import Tensor, nn

from attn_reg_plugin.configuration import setting

logger = logging.getLogger(__name__)

#: the logit of what cannot come, as fairseq's `<s>`, which Marian does not have: no probability is left for it in any
#: precision, and label smoothing, which sums over the vocabulary, stays finite
NEVER = -100.0


class MarianPositions(nn.Module):
    """Marian's sinusoids: sin(t / 10000^(2i/C)) at dimension i < C/2, the cosine of the same at C/2 + i.

    Args:
        dim: C, even.
        padding_idx: of the dictionary.
        init_size: positions whose sinusoids are computed beforehand.
    """

    def __init__(self, dim: int, padding_idx: int, init_size: int) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"the width of an opus_mt model is {dim}, but must be even")
        self.dim, self.padding_idx = dim, padding_idx
        self.register_buffer("weights", self.table(init_size, dim), persistent=False)
        #: sinusoids have no longest length; fairseq compares this with the model's own limit
        self.max_positions = int(1e5)

    @staticmethod
    def table(positions: int, dim: int) -> Tensor:
        """Compute the sinusoids of positions 0 … `positions` − 1, (positions, C), in double precision."""
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1).float()

    def forward(self, tokens: Tensor, incremental_state: Any = None, **_: Any) -> Tensor:
        """Give tokens (B, T) their sinusoids (B, T, C), in incremental decoding the last ones, (B, 1, C)."""
        length = tokens.size(1)
        if length > self.weights.size(0):
            self.weights = self.table(2 * length, self.dim).to(self.weights)
        positions = (tokens.ne(self.padding_idx).cumsum(1) - 1).clamp(min=0)  # wherever a sentence begins
        if incremental_state is not None:
            positions = positions[:, -1:]
        return self.weights[positions]


class MarianEmbedding(nn.Embedding):
    """An embedding in which the start symbol has the row of padding, as in Marian; its own row is never used."""

    def __init__(self, dictionary: Dictionary, dim: int) -> None:
        super().__init__(len(dictionary), dim, padding_idx=dictionary.pad())
        self.start = dictionary.bos()
        with torch.no_grad():
            self.weight.normal_(std=dim**-0.5)
            self.weight[[self.padding_idx, self.start]] = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) to (..., C)."""
        return super().forward(tokens.masked_fill(tokens.eq(self.start), self.padding_idx))


def _activate(layer: nn.Module, name: str) -> nn.Module:
    """Put swish into a layer, wrapped or not: fairseq has torch's class there, and calls it as a function."""
    for module in layer.modules():
        if name == "swish" and hasattr(module, "activation_fn"):
            module.activation_fn = nn.functional.silu
    return layer


class OpusMTEncoder(TransformerEncoderBase):
    """fairseq's encoder with Marian's positions and activation."""

    def __init__(self, cfg: TransformerConfig, dictionary: Dictionary, embed_tokens: nn.Embedding) -> None:
        super().__init__(cfg, dictionary, embed_tokens)
        self.embed_positions = MarianPositions(cfg.encoder.embed_dim, dictionary.pad(), cfg.max_source_positions)

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        """Build a layer of fairseq's."""
        return _activate(super().build_encoder_layer(cfg), cfg.activation_fn)


class OpusMTDecoder(TransformerDecoderBase):
    """fairseq's decoder with Marian's positions, activation, start and bias.

    Attributes:
        final_logits_bias: (V), added to the logits; a constant, as in Marian and in Hugging Face's Marian.
    """

    def __init__(self, cfg: TransformerConfig, dictionary: Dictionary, embed_tokens: nn.Embedding, **options: Any):
        super().__init__(cfg, dictionary, embed_tokens, **options)
        self.embed_positions = MarianPositions(cfg.decoder.embed_dim, dictionary.pad(), cfg.max_target_positions)
        self.start = dictionary.bos()
        self.renormalizes = bool(getattr(cfg, "renormalize_search", False))
        self.register_buffer("final_logits_bias", torch.zeros(len(dictionary)))

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        """A layer of fairseq's."""
        return _activate(super().build_decoder_layer(cfg, no_encoder_attn), cfg.activation_fn)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Any = None,
        features_only: bool = False,
        **options: Any,
    ) -> tuple[Tensor, dict]:
        """Return logits (B, T, V) of outputs so far (B, T); in incremental search padding's may be `NEVER`."""
        logits, extra = super().forward(prev_output_tokens, encoder_out, incremental_state, features_only, **options)
        if self.renormalizes and incremental_state is not None and not features_only:
            logits[..., self.padding_idx] = NEVER
        return logits, extra

    def extract_features(self, prev_output_tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, dict]:
        """Return features (B, T, C) of outputs so far (B, T), whose first real token counts as the start symbol."""
        real = prev_output_tokens.ne(self.padding_idx)
        first = real & real.cumsum(1).eq(1)
        return super().extract_features(prev_output_tokens.masked_fill(first, self.start), *args, **kwargs)

    def output_layer(self, features: Tensor) -> Tensor:
        """Turn features (B, T, C) into logits (B, T, V)."""
        logits = self.output_projection(features)
        logits = logits + self.final_logits_bias.to(logits.dtype)
        logits[..., self.start] = NEVER
        return logits


@register_model("opus_mt")
class OpusMTModel(TransformerModel):
    """Marian's Transformer; the flags are those of fairseq's `transformer`, and one more."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """fairseq's flags of a Transformer, and `--renormalize-search`."""
        gen_parser_from_dataclass(parser, TransformerConfig(), delete_default=True, with_prefix="")
        parser.add_argument(
            "--renormalize-search",
            action="store_true",
            help="in search leave padding no probability before the softmax, as Hugging Face's renormalize_logits "
            "does; `attn-reg convert opus-mt` sets it where the folder's generation settings say so",
        )

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "OpusMTModel":
        """Build the model, but refuse options of fairseq's Transformer that change what Marian is made of."""
        opus_mt(args)
        stacked = [
            f"{stack}_{what}" for stack in ("encoder", "decoder") for what in ("learned_pos", "normalize_before")
        ]
        for name in ("adaptive_softmax_cutoff", "adaptive_input", "layernorm_embedding", *stacked):
            if getattr(args, name, None):
                raise ValueError(f"--{name.replace('_', '-')} cannot be given with --arch opus_mt: Marian has no such")
        return super().build_model(args, task)

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Get ready to translate; warn where nothing parts text into the model's pieces and joins them again."""
        super().prepare_for_inference_(cfg)
        bpe = getattr(getattr(cfg, "bpe", None), "_name", None)
        if bpe not in ("opus_mt", "sentencepiece"):
            logger.warning(
                "--arch opus_mt translates pieces, not text: give --bpe opus_mt --opus-mt-folder DIR, the folder that "
                "`attn-reg convert opus-mt` wrote, or raw text becomes unknown words"
            )

    @classmethod
    def build_embedding(cls, args: Any, dictionary: Dictionary, embed_dim: int, path: str | None = None) -> nn.Module:
        """The embedding of a dictionary."""
        if path:
            raise ValueError("--encoder-embed-path and --decoder-embed-path cannot be given with --arch opus_mt")
        return MarianEmbedding(dictionary, embed_dim)

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Dictionary, embed_tokens: nn.Embedding) -> OpusMTEncoder:
        """The encoder."""
        return OpusMTEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Dictionary, embed_tokens: nn.Embedding) -> OpusMTDecoder:
        """The decoder."""
        return OpusMTDecoder(TransformerConfig.from_namespace(args), tgt_dict, embed_tokens)


@register_model_architecture("opus_mt", "opus_mt")
def opus_mt(args: Any) -> None:
    """The published shape: 6 + 6 layers, 512 wide, 2,048 in the feed-forward layers, 8 heads."""
    args.activation_fn = getattr(args, "activation_fn", "swish")
    args.renormalize_search = getattr(args, "renormalize_search", False)
    base_architecture(args)


# -- the tokenization -------------------------------------------------------------------------------------------------


@dataclass
class OpusMTBPEConfig(FairseqDataclass):
    """The flag of `--bpe opus_mt`."""

    opus_mt_folder: str = setting("folder that `attn-reg convert opus-mt` or `attn-reg prepare --opus-mt` wrote", "???")


@register_bpe("opus_mt", dataclass=OpusMTBPEConfig)
class OpusMTBPE:
    """Source text to symbols of the dictionary, and symbols of the target to text, as `MarianTokenizer` does it."""

    def __init__(self, cfg: OpusMTBPEConfig) -> None:
        # imported only when it is asked for: fairseq loads this file with every --user-dir, sentencepiece or not
        from attn_reg_plugin.opus_mt.tokenization import OpusMTTokenizer

        self.tokenizer = OpusMTTokenizer(Path(cfg.opus_mt_folder))

    def encode(self, x: str) -> str:
        """A source sentence as symbols with spaces between; the end of sentence is fairseq's to add."""
        return " ".join(self.tokenizer.source.encode(x))

    def decode(self, x: str) -> str:
        """The text of symbols with spaces between."""
        return self.tokenizer.decode(x.split(" "))
