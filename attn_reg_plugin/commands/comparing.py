"""Shared by the commands that compare methods: arguments, lists of what can be compared, and carrying it out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from attn_reg_plugin import configuration
from attn_reg_plugin.configuration import said_of


class Listing(argparse.Action):
    """A flag that prints lines and ends the command.

    Args:
        lines: gives them.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, lines: Callable[[], list[str]], help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)
        self.lines = lines

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and stop."""
        print("\n".join(self.lines()))
        parser.exit()


def arguments_of(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add the arguments of a comparison's settings, and a list of the methods."""
    configuration.add_arguments(parser, settings)
    text = "list the methods with their flags and stop"
    parser.add_argument("--list-methods", action=Listing, lines=lambda: _methods(settings), help=text)


def _methods(settings: Any) -> list[str]:
    from attn_reg_plugin.experiments.flags import words_of
    from attn_reg_plugin.experiments.methods import known_methods

    return [f"{name:30}{' '.join(words_of(one.flags))}" for name, one in known_methods(settings.without).items()]


def carry_out(arguments: argparse.Namespace, settings: type) -> int:
    """Carry out a comparison; a refusal before anything runs names the file of settings, too."""
    from attn_reg_plugin.experiments.executing import RunError

    found = configuration.from_arguments(settings, arguments)
    with said_of(arguments.config, but=RunError):
        return found.carry_out()
