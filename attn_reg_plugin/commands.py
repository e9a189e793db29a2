"""The subcommands of `attn-reg`: `run`, and those whose arguments are the settings of a step."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attn_reg_plugin import configuration
from attn_reg_plugin.experiments.steps import STEPS, Step, from_arguments, plan, settings_of


class Listing(argparse.Action):
    """A flag that prints the lines that `const` gives, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and stop."""
        print("\n".join(self.const()))
        parser.exit()


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Add the settings of a command, and flags that list what there is."""
    if command == "run":
        parser.usage = "attn-reg run FILE [--SETTING VALUE ...] [-- flags of fairseq-train]"
        what = f"YAML with a section per step: {', '.join(STEPS)}, or script FILE.py"
        parser.add_argument("file", type=Path, metavar="FILE", help=what)
        text = "flags that win over the file: of values above its sections, and of any step; `FILE -h` lists them"
        parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SETTING", help=text).required = False
        return
    settings = settings_of(command)
    parser.usage = getattr(settings, "USAGE", None)
    configuration.add_arguments(parser, settings)
    for what, lines in LISTS.get(command, {}).items():
        how = {"action": Listing, "nargs": 0, "dest": argparse.SUPPRESS, "const": lines}
        parser.add_argument(f"--list-{what}", help=f"list the {what} and stop", **how)


def examples_of(command: str) -> Sequence[str]:
    """Two lines that call it."""
    return EXAMPLES if command == "run" else settings_of(command).EXAMPLES


def run(arguments: argparse.Namespace) -> int:
    """Carry out a command: its exit status; of `run` that of the first step that ended otherwise than by 0."""
    command = arguments.command
    if command == "run":
        rest = ["--", *arguments.rest] if arguments.rest else []
        steps = plan(arguments.file, [*arguments.words, *rest])
    else:
        steps = [Step(command, from_arguments(settings_of(command), arguments), arguments.config)]
    return next((code for step in steps if (code := step.carry_out())), 0)


def _methods(command: str) -> list[str]:
    from attn_reg_plugin.experiments.methods import known_methods
    from attn_reg_plugin.experiments.running.flags import words_of

    known = known_methods(settings_of(command).without)
    return [f"{name:30}{' '.join(words_of(one.flags))}" for name, one in known.items()]


def _tasks() -> list[str]:
    from attn_reg_plugin.labelled import KINDS, TASKS

    named = [f"{name:16}{task.kind.replace('_', ' ')}, {', '.join(task.metrics)}" for name, task in TASKS.items()]
    return [*named, *(f"{kind:16}of files of your own" for kind in KINDS)]


def _rows() -> list[str]:
    from attn_reg_plugin.bench.rows import all_rows

    return [row.name for row in all_rows()]


#: command -> what it lists by `--list-...` -> the lines
LISTS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "compare": {"methods": lambda: _methods("compare")},
    "finetune": {"methods": lambda: _methods("finetune"), "tasks": _tasks},
    "bench": {"methods": _rows},
}
#: examples of `run`, which has no settings of its own
EXAMPLES = (
    "attn-reg run examples/demo/demo.yaml --epochs 24 --out runs/longer",
    "attn-reg run examples/papers/ad_drop_table_1.yaml --task cola -h",
)
