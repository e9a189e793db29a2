"""`attn-reg compare`: train, translate and score several methods on the same corpus."""

from __future__ import annotations

import argparse

from attn_reg_plugin.commands.comparing import arguments_of, carry_out
from attn_reg_plugin.experiments.translation import TranslationComparison

EXAMPLES = TranslationComparison.EXAMPLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg compare`; whatever follows `--` goes to every fairseq-train."""
    parser.usage = "attn-reg compare [CONFIG | DATA] --out FOLDER [options] [-- flags of fairseq-train]"
    arguments_of(parser, TranslationComparison)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the comparison: 0, or 130 when interrupted from the keyboard."""
    return carry_out(arguments, TranslationComparison)
