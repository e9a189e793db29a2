"""`attn-reg bench`: time and peak memory of a training step, method by method, beside plain training."""

from __future__ import annotations

import argparse

from attn_reg_plugin import configuration
from attn_reg_plugin.bench.settings import Settings
from attn_reg_plugin.commands.comparing import Listing

EXAMPLES = (
    "attn-reg bench --family bert --methods plain,ad_drop,attend_out --repeats 5",
    "attn-reg bench --device cuda --dtype bfloat16 --json costs.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg bench`."""
    configuration.add_arguments(parser, Settings)
    parser.add_argument("--list-methods", action=Listing, lines=_methods, help="list the methods and stop")


def _methods() -> list[str]:
    from attn_reg_plugin.bench.rows import all_rows

    return [row.name for row in all_rows()]


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the table. Gives 0; a row over its budget is marked, not an error.

    Raises:
        ValueError: an option is out of its range, or an unknown method.
    """
    from attn_reg_plugin.bench.benchmark import publish

    publish(configuration.from_arguments(Settings, arguments, "bench"))
    return 0
