"""`attn-reg sweep`: search the settings of a method, beside as many plain trainings."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin import configuration
from attn_reg_plugin.commands.comparing import carry_out
from attn_reg_plugin.experiments.sweep.settings import Sweep

EXAMPLES = (
    "attn-reg sweep examples/sweep/sweep.yaml",
    "attn-reg sweep examples/sweep/sweep.yaml --trials 40 --pruner median --jobs 2",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg sweep`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with these settings; flags win over it")
    configuration.add_flags(parser, Sweep)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the sweep: 0, 1 if a trial failed, or 130 when interrupted from the keyboard."""
    return carry_out(arguments, Sweep)
