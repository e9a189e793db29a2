"""`--bpe opus_mt`: OPUS-MT's tokenization in `fairseq-generate` and `fairseq-interactive`, so that raw text goes in
and comes out."""

# no "from __future__ import annotations": fairseq makes flags of the types of a config's fields, not of their names
from dataclasses import dataclass, field
from pathlib import Path

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass


@dataclass
class OpusMTBPEConfig(FairseqDataclass):
    """The flag of `--bpe opus_mt`."""

    opus_mt_folder: str = field(
        default="???", metadata={"help": "folder that `attn-reg convert opus-mt` or `attn-reg prepare --opus-mt` wrote"}
    )


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

    def is_beginning_of_word(self, x: str) -> bool:
        """Whether a symbol begins a word."""
        return x.startswith(("▁", "<", ">>"))
