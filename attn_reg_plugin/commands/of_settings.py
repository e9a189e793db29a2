"""The subcommands whose arguments are the settings of a step: `compare`, `report`, `bench` ..."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from attn_reg_plugin import configuration
from attn_reg_plugin.experiments.steps import Step, function_of, settings_of


class Listing(argparse.Action):
    """A flag that prints the lines that `const` gives, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and stop."""
        print("\n".join(self.const()))
        parser.exit()


class Command:
    """A subcommand, as a module of this package is: its arguments, what runs it and two examples."""

    def __init__(self, name: str) -> None:
        self.name, self.settings = name, settings_of(name)
        self.EXAMPLES: Sequence[str] = EXAMPLES.get(name) or self.settings.EXAMPLES

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the settings, and flags that list what there is; what follows `--` goes to every fairseq-train."""
        parser.usage = getattr(self.settings, "USAGE", None)
        configuration.add_arguments(parser, self.settings)
        for what, lines in LISTS.get(self.name, {}).items():
            how = {"action": Listing, "nargs": 0, "dest": argparse.SUPPRESS, "const": lines}
            parser.add_argument(f"--list-{what}", help=f"list the {what} and stop", **how)

    def run(self, arguments: argparse.Namespace) -> int:
        """Carry out the step: its exit status; a refusal before anything runs names the file of settings, too."""
        found = configuration.from_arguments(self.settings, arguments)
        return Step(self.name, found, function_of(self.name), arguments.config).carry_out()


def _methods(command: str) -> list[str]:
    from attn_reg_plugin.experiments.flags import words_of
    from attn_reg_plugin.experiments.methods import known_methods

    known = known_methods(settings_of(command).without)
    return [f"{name:30}{' '.join(words_of(one.flags))}" for name, one in known.items()]


def _tasks() -> list[str]:
    from attn_reg_plugin.labelled import TASKS

    return [f"{name:14}{task.kind.replace('_', ' ')}, {', '.join(task.metrics)}" for name, task in TASKS.items()]


def _rows() -> list[str]:
    from attn_reg_plugin.bench.rows import all_rows

    return [row.name for row in all_rows()]


#: command -> what it lists by `--list-...` -> the lines
LISTS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "compare": {"methods": lambda: _methods("compare")},
    "finetune": {"methods": lambda: _methods("finetune"), "tasks": _tasks},
    "bench": {"methods": _rows},
}
#: examples of the commands whose settings have none
EXAMPLES = {
    "prepare text": (
        "attn-reg prepare text --pair en-fr --source my_text --out data/en-fr",
        "attn-reg prepare text --pair en-fr --source my_text --out data/en-fr --opus-mt models/en-fr",
    ),
    "prepare wmt16": (
        "attn-reg prepare wmt16 --pair en-ro --out data/en-ro",
        "attn-reg prepare wmt16 --pair tr-en --source my_text --out data/tr-en --max-pieces 128",
    ),
    "prepare phrasebook": (
        "attn-reg prepare phrasebook --pair en-ro --out data",
        "attn-reg prepare phrasebook --pair en-tr --train 300 --noise 0.25 --out data",
    ),
}
