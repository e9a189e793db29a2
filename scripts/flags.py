"""Rebuild the tables of docs/flags.md from the parsers that the programs use:

    python scripts/flags.py

A table goes from its marker, `<!-- flags of ... -->`, to the next heading of the second level, so that a new method,
option or subcommand is on the page without a change here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from attn_reg_plugin.cli import COMMANDS, build_parser  # noqa: E402
from attn_reg_plugin.files import write_text  # noqa: E402
from attn_reg_plugin.regularizers import REGISTRY, options_of  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
#: the packages of the fairseq face, whose modules register what has flags
FAIRSEQ_FACE = ("tasks", "criterions", "models")
#: what the help of a flag ends with: its default, and its range or its choices
TOLD = re.compile(r"\s*\((?:required|default: ([^()]*))\)$")
VALUES = re.compile(r"(?:[,;] in ([\[(][^\[(\])]*[\])])|; one of ([\w ,-]+))$")
#: a range inside of it
WITHIN = re.compile(r"\bin ([\[(][^\[(\])]*[\])])")


# -- tables of flags --------------------------------------------------------------------------------------------------


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(columns), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: object) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(str(text).replace("%%", "%").split()).replace("|", "\\|").replace("<", "&lt;")


def summary(thing: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def default_of(action: argparse.Action, told: re.Match[str] | None) -> str:
    """Show as a cell what holds when a flag is not given; `told` is what its help says, of settings of files too."""
    if action.required or (told and not told[1]):
        return "required"
    if action.nargs == 0:
        return "off"
    if told and action.default == argparse.SUPPRESS:
        return f"`{cell(told[1])}`"
    if action.default in (None, "", argparse.SUPPRESS, "???"):
        return ""
    value = ",".join(map(str, action.default)) if isinstance(action.default, list | tuple) else str(action.default)
    return f"`{cell(value)}`" if value else ""


def row(action: argparse.Action, prefix: str = "", within: str | None = None) -> tuple[str, ...]:
    """Flag, default, values (a range or choices) and meaning; the help's `prefix` is left out."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    name = next((text for text in action.option_strings if text.startswith("--")), metavar)
    text = TOLD.sub("", (action.help or "").removeprefix(prefix))
    said, text = VALUES.search(text), VALUES.sub("", text)
    told = TOLD.search(action.help or "") or TOLD.search(text)
    text = TOLD.sub("", text)
    choices = ", ".join(map(str, action.choices or ())) or (said and said[2])
    found = WITHIN.search(text)
    values = choices or within or (said and said[1]) or (found and found[1]) or ""
    return f"`{cell(name)}`", default_of(action, told), cell(values), cell(text)


def flag_table(
    actions: Iterable[argparse.Action], prefix: str = "", ranges: Mapping[str, str | None] | None = None
) -> str:
    """A table of flags and arguments, empty if there are none; `ranges` are those that a method's options declare."""
    shown = [a for a in actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]
    rows = [row(action, prefix, (ranges or {}).get(action.dest)) for action in shown]
    return table(("flag", "default", "values", "meaning"), rows) if rows else ""


# -- the methods ------------------------------------------------------------------------------------------------------


def method_parser() -> argparse.ArgumentParser:
    """The flags that a regularized fairseq task adds to its own."""
    from fairseq.dataclass import FairseqDataclass
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from attn_reg_plugin.tasks.attn_reg_task import with_attn_reg

    parser = argparse.ArgumentParser(add_help=False)
    gen_parser_from_dataclass(parser, with_attn_reg(FairseqDataclass)())
    return parser


def methods_table() -> str:
    """Every method: its name as a flag, its class, what it does, and where it is from."""
    rows = [
        (f"`{name}`", f"`{method.__name__}`", cell(summary(method)), cell(summary(inspect.getmodule(method))))
        for name, method in sorted(REGISTRY.items())
    ]
    return table(("`--attn-reg`", "class", "what it does", "method"), rows)


def flags_of_methods() -> str:
    """The methods, the flags that all of them share, and those of each method under a heading."""
    known = sorted(REGISTRY)
    owned: dict[str, list[argparse.Action]] = {name: [] for name in known}
    shared = []
    for action in method_parser()._actions:
        # the longest name wins, where one method's is the beginning of another's
        owners = [name for name in known if action.dest.startswith(f"{name}_")]
        (owned[max(owners, key=len)] if owners else shared).append(action)
    parts = [methods_table(), "### All methods", flag_table(shared)]
    for name in known:
        ranges = {f"{name}_{option.name}": option.metadata["within"] for option in options_of(REGISTRY[name])}
        parts += [f"### {name}", flag_table(owned[name], f"{name}: ", ranges) or "It has no flags of its own."]
    return "\n\n".join(parts)


# -- the rest of the fairseq face -------------------------------------------------------------------------------------


def own_flags(config: type) -> list[argparse.Action]:
    """The flags that a config of the package has beyond fairseq's own and the methods'."""
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    parser = argparse.ArgumentParser(add_help=False)
    gen_parser_from_dataclass(parser, config())
    bases = (base for base in config.__mro__ if base.__module__.startswith("fairseq."))
    foreign = {field.name for base in bases if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)}
    foreign |= {action.dest for action in method_parser()._actions}
    return [action for action in parser._actions if action.dest not in foreign]


def older_flags(owner: type) -> list[argparse.Action]:
    """The same of a class that adds its arguments to a parser: those that fairseq's class does not add."""
    parsers = []
    for adding in (owner, next(base for base in owner.__mro__ if base.__module__.startswith("fairseq."))):
        parsers.append(argparse.ArgumentParser(add_help=False, conflict_handler="resolve"))
        if hasattr(adding, "add_args"):
            adding.add_args(parsers[-1])
    foreign = {action.dest for action in (*parsers[1]._actions, *method_parser()._actions)}
    return [action for action in parsers[0]._actions if action.dest not in foreign]


def registered() -> Iterator[tuple[str, type, list[argparse.Action]]]:
    """(flag and value, class, own flags) of every task, criterion, architecture and bpe that the package registers."""
    from fairseq.registry import REGISTRIES

    import attn_reg_plugin

    for part in FAIRSEQ_FACE:
        folder = importlib.import_module(f"{attn_reg_plugin.__name__}.{part}")
        for module in pkgutil.iter_modules(folder.__path__):
            importlib.import_module(f"{folder.__name__}.{module.name}")
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

    criterions, bpe = REGISTRIES["criterion"], REGISTRIES["bpe"]
    for flag, classes, configs in (
        ("--task", TASK_REGISTRY, TASK_DATACLASS_REGISTRY),
        ("--criterion", criterions["registry"], criterions["dataclass_registry"]),
        ("--arch", ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY),
        ("--bpe", bpe["registry"], bpe["dataclass_registry"]),
    ):
        for name, owner in sorted(classes.items()):
            if owner.__module__.startswith(f"{attn_reg_plugin.__name__}."):
                config = configs.get(name)
                actions = own_flags(config) if config is not None else older_flags(owner)
                yield f"{flag} {name}", owner, actions


def flags_of_fairseq_face() -> str:
    """Every task, criterion, architecture and bpe with what it is, then the flags that they add, each set once."""
    sets: dict[str, list[str]] = {}
    rows = []
    for name, owner, actions in registered():
        own = flag_table(actions)
        rows.append((f"`{name}`", cell(summary(owner)), "below" if own else "none"))
        if own:
            sets.setdefault(own, []).append(name)
    parts = [table(("given", "what it is", "flags of its own"), rows)]
    for own_table, names in sets.items():
        parts += [f"### {', '.join(names)}", own_table]
    return "\n\n".join(parts)


# -- attn-reg ---------------------------------------------------------------------------------------------------------


def flags_of_attn_reg() -> str:
    """Every subcommand of `attn-reg`."""
    commands = {name: text for group in COMMANDS.values() for name, text in group.items()}
    parts = [table(("`attn-reg`", "what it does"), [(f"`{name}`", cell(text)) for name, text in commands.items()])]
    for name in commands:
        own = flag_table(build_parser(name)._actions)
        parts += [f"### {name}", own] if own else []
    return "\n\n".join(parts)


MARKERS: dict[str, Callable[[], str]] = {
    "flags of the methods": flags_of_methods,
    "flags of the fairseq face": flags_of_fairseq_face,
    "flags of attn-reg": flags_of_attn_reg,
}


def filled(page: str) -> str:
    """The page with its tables made anew."""
    for name, make in MARKERS.items():
        head, marker, rest = page.partition(f"<!-- {name} -->\n")
        assert marker, f"the page has no marker {name!r}"
        following = rest.find("\n## ")
        page = f"{head}{marker}\n{make()}\n{rest[following:] if following >= 0 else ''}"
    return page


if __name__ == "__main__":
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8")))
