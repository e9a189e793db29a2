"""`attn-reg sweep`: search the settings of a method, beside as many plain trainings."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin import configuration
from attn_reg_plugin.experiments.steps import add_toy, compared
from attn_reg_plugin.experiments.sweep.settings import Sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg sweep`."""
    parser.allow_abbrev = False
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with these settings; flags win over it")
    configuration.add_flags(parser, Sweep)
    add_toy(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the sweep: 0, 1 if a trial failed, or 130 when interrupted from the keyboard."""
    return compared(arguments.config, configuration.from_arguments(Sweep, arguments), arguments.toy)
