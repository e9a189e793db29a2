"""`attn-reg finetune`: fine-tune a pretrained encoder on labelled text with several methods."""

from __future__ import annotations

import argparse

from attn_reg_plugin import configuration
from attn_reg_plugin.experiments.fine_tuning import FineTuning
from attn_reg_plugin.experiments.steps import add_toy, compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg finetune`; whatever follows `--` goes to every fairseq-train."""
    parser.usage = "attn-reg finetune [CONFIG | TASK DATA] --out FOLDER [options] [-- flags of fairseq-train]"
    configuration.add_arguments(parser, FineTuning)
    add_toy(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the comparison: 0, or 130 when interrupted from the keyboard."""
    settings = configuration.from_arguments(FineTuning, arguments)
    return compared(arguments.config, settings, arguments.toy)
