"""`attn-reg compare`: train, translate and score several methods on the same corpus."""

from __future__ import annotations

import argparse

from attn_reg_plugin import configuration
from attn_reg_plugin.experiments.steps import add_toy, compared
from attn_reg_plugin.experiments.translation import TranslationComparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg compare`; whatever follows `--` goes to every fairseq-train."""
    parser.usage = "attn-reg compare [CONFIG | DATA] --out FOLDER [options] [-- flags of fairseq-train]"
    configuration.add_arguments(parser, TranslationComparison)
    add_toy(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the comparison: 0, or 130 when interrupted from the keyboard."""
    settings = configuration.from_arguments(TranslationComparison, arguments)
    return compared(arguments.config, settings, arguments.toy)
