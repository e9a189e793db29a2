"""`attn-reg run`: the steps that a configuration file describes, such as preparing a corpus and comparing methods."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.flags import words_of

EXAMPLES = (
    "attn-reg run examples/demo/demo.yaml --epochs 24 --out runs/longer",
    "attn-reg run examples/papers/ad_drop_table_1.yaml --task cola -h",
)
#: commands that may be steps, with their first word where they need it
COMMAND_STEPS = ("export", "report", "report curves")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg run`; the others are flags of the file's values and steps."""
    parser.usage = "attn-reg run FILE [--SETTING VALUE ...] [-- flags of fairseq-train]"
    what = "YAML with a section per step: convert opus-mt, prepare ..., compare, finetune, sweep, bench, report"
    parser.add_argument("file", type=Path, metavar="FILE", help=what)
    text = "flags that win over the file: of values above its sections, and of any step; `FILE -h` lists them"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SETTING", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the steps in the file's order: 0, or what the first step that ended otherwise gave."""
    from attn_reg_plugin.experiments.steps import plan

    rest = ["--", *arguments.rest] if arguments.rest else []
    for step in plan(arguments.file, [*arguments.words, *rest], steps()):
        if code := step.carry_out():
            return code
    return 0


def steps() -> dict[str, Callable[[dict[str, Any]], tuple[argparse.Namespace, Callable[[argparse.Namespace], int]]]]:
    """The commands that may be steps, by the names of their sections."""
    return {name: partial(_command, name) for name in COMMAND_STEPS}


def _command(
    command: str, settings: Mapping[str, Any]
) -> tuple[argparse.Namespace, Callable[[argparse.Namespace], int]]:
    """A command's arguments, and the function that takes them.

    Args:
        settings: its flags and positional arguments, by name.

    Raises:
        ValueError: a setting that the command does not have, or a value that it does not take.
    """
    name, *first = command.split()
    module = importlib.import_module(f"{__package__}.{name}")
    parser = argparse.ArgumentParser(prog=command, add_help=False)
    module.add_arguments(parser)
    actions = {action.dest: action for action in parser._actions}
    settings = {setting: value for setting, value in settings.items() if value is not None}
    if unknown := [setting for setting in settings if setting not in actions]:
        raise ValueError(f"{command}: unknown setting {unknown[0]!r}; the settings are: {', '.join(actions)}")
    places = [settings[name] for name in settings if not actions[name].option_strings]
    flags = {
        name.replace("_", "-"): ",".join(map(str, value))
        if isinstance(value, list) and actions[name].nargs is None
        else value
        for name, value in settings.items()
        if actions[name].option_strings
    }
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            words = [str(word) for value in places for word in (value if isinstance(value, list) else [value])]
            return parser.parse_args([*first, *words, *words_of(flags)]), module.run
    except SystemExit:  # argparse has no other way to refuse
        reason = said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise ValueError(f"{command}: {reason}") from None
