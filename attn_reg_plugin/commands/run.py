"""`attn-reg run`: the steps that a configuration file describes, such as preparing a corpus and comparing methods."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attn_reg_plugin.configuration import flag_of
from attn_reg_plugin.experiments.steps import STEPS, plan
from attn_reg_plugin.experiments.toy import MADE_UP, make_task_files


@dataclass(frozen=True)
class Flags:
    """A step that is a command of its own; its settings are the command's flags.

    Attributes:
        command: its module in this package.
        toy: settings at toy size.
        report: of `attn-reg report`, which.
    """

    command: str
    toy: Mapping[str, Any]
    report: str = ""

    def __call__(self, settings: dict[str, Any], toy: bool, task: Any = None) -> Callable[[], int]:
        """What to call.

        Args:
            settings: of the section.
            toy: at toy size.
            task: that the file fine-tunes on, if it does.

        Raises:
            ValueError: a setting that the command hasn't, or a value that it does not take.
        """
        module = importlib.import_module(f"{__package__}.{self.command}")
        parser = argparse.ArgumentParser(prog=self.command, add_help=False)
        module.add_arguments(parser)
        made_up: Path | None = None
        if toy:
            settings = {**settings, **self.toy}
            task = settings.get("on", task)
            if task is not None and "data" in settings:
                runs = settings.get("run_folder")
                made_up = Path(str(runs[0] if isinstance(runs, list) else runs)).parent / MADE_UP / task
                settings["data"] = str(made_up)
        parsed = self._parsed(parser, settings)
        if not toy and hasattr(module, "check"):
            module.check(parsed, task)
        return partial(_carried_out, module.run, parsed, made_up)

    def _parsed(self, parser: argparse.ArgumentParser, settings: dict[str, Any]) -> argparse.Namespace:
        """The settings as the command's parser gives them."""
        section = f"{self.command} {self.report}".strip() if self.report != "html" else self.command
        words = [self.report] if self.report else []
        chosen = parser
        for action in parser._actions if self.report else ():
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices[self.report]
        actions = {action.dest: action for action in chosen._actions if action.dest != "help"}
        for name, value in settings.items():
            if name not in actions:
                known = ", ".join(actions)
                raise ValueError(f"{section}: unknown setting {name!r}; the settings are: {known}")
            words += [] if value is None else _words(actions[name], value)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                return parser.parse_args(words)
        except SystemExit:  # argparse has no other way to refuse
            reason = said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
            raise ValueError(f"{section}: {reason}") from None


def _words(action: argparse.Action, value: Any) -> list[str]:
    """A setting as words of the command line."""
    if isinstance(value, bool):
        return [action.option_strings[0]] if value else []
    if action.nargs == "+":
        words = [str(one) for one in (value if isinstance(value, list) else [value])]
        return words if not action.option_strings else [action.option_strings[0], *words]
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [text] if not action.option_strings else [f"{flag_of(action.dest)}={text}"]


def _carried_out(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, made_up: Path | None) -> int:
    if made_up is not None:
        make_task_files(made_up)
    return run(arguments)


#: section -> the command
COMMAND_STEPS = {
    "evaluate": Flags("evaluate", {"cpu": True}),
    "probe": Flags("probe", {"cpu": True, "examples": 8}),
    "bench": Flags("bench", {"size": "tiny", "device": "cpu", "repeats": 1, "warmup": 0, "threads": 1}),
    "report": Flags("report", {}, "html"),
    "report curves": Flags("report", {}, "curves"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg run`."""
    parser.usage = "attn-reg run FILE [--toy] [--SETTING VALUE ...] [-- flags of fairseq-train]"
    steps = ", ".join([*STEPS, *COMMAND_STEPS])
    parser.add_argument("file", type=Path, metavar="FILE", help=f"YAML with a section per step: {steps}")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SETTING",
        help="flags that win over the file: of values above its sections, and of any step; `FILE -h` lists them",
    )
    _keep_separator(parser)


def _keep_separator(parser: argparse.ArgumentParser) -> None:
    """Leave `--` and what follows in `words`: argparse drops a `--` that comes right behind FILE."""
    parse = parser.parse_known_args

    def with_separator(
        args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(args)
        place = words.index("--") if "--" in words else len(words)
        namespace, unknown = parse(words[:place], namespace)
        namespace.words = [*namespace.words, *words[place:]]
        return namespace, unknown

    parser.parse_known_args = with_separator  # type: ignore[method-assign]


def run(arguments: argparse.Namespace) -> int:
    """Carry out the steps in the file's order: 0, or what the first one that ended otherwise gave."""
    for step in plan(arguments.file, arguments.words, COMMAND_STEPS):
        if code := step():
            return code
    return 0
