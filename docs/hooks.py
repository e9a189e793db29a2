"""Additions to the pages as mkdocs builds them: the flags, the methods, and pages that stand elsewhere.

Flags are read from the parsers that the programs themselves use, so that a new method, option or subcommand is in the
documentation without a change here. A page holds a marker where such a part goes:

    <!-- methods -->  <!-- flags of the methods -->  <!-- flags of the fairseq face -->  <!-- flags of attn-reg -->
    <!-- api of the methods -->

The README is the first page; the READMEs of the examples, CONTRIBUTING.md and CHANGELOG.md become pages as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: pages outside of docs/, and what is shown beside them
OUTSIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"examples/*/{name}" for name in ("README.md", "*.png", "*.yaml", "*.json")),
)
#: the first page, which is the README
INDEX = "index.md"
#: the packages of the fairseq face, whose modules register what has flags
FAIRSEQ_FACE = ("tasks", "criterions", "models")
#: how the help of a setting ends
TOLD = re.compile(r"\((required|default: (.*))\)$")


# -- tables of flags --------------------------------------------------------------------------------------------------


def cell(text: object) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(str(text).replace("%%", "%").split()).replace("|", "\\|").replace("<", "&lt;")


def default_of(action: argparse.Action) -> str:
    """Show as a cell what holds when a flag is not given."""
    told = TOLD.search(action.help or "")  # of settings that a file may give, too
    if action.required or (told and not told[2]):
        return "required"
    if action.nargs == 0:
        return "off"
    if told and action.default == argparse.SUPPRESS:
        return f"`{cell(told[2])}`"
    if action.default in (None, "", argparse.SUPPRESS, "???"):
        return ""
    value = ",".join(map(str, action.default)) if isinstance(action.default, list | tuple) else str(action.default)
    return f"`{cell(value)}`" if value else ""


def meaning_of(action: argparse.Action, prefix: str = "") -> str:
    """A flag's help as a cell, with its choices unless the help lists them; the default has a column of its own."""
    text = (action.help or "").removeprefix(prefix)
    default = ".*" if action.default == argparse.SUPPRESS else rf"%\(default\)s|{re.escape(str(action.default))}"
    text = re.sub(rf"\s*\(default: ({default})\)$|\s*\(required\)$", "", text)
    choices = [str(choice) for choice in action.choices or ()]
    if choices and not all(choice in text for choice in choices):
        text += f"{'; ' if text else ''}one of {', '.join(choices)}"
    return cell(text)


def flag_table(actions: Iterable[argparse.Action], prefix: str = "") -> str:
    """A table of flags and arguments; nothing if there are none."""
    rows = []
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest
        name = next((text for text in action.option_strings if text.startswith("--")), metavar)
        rows.append(f"| `{name}` | {default_of(action)} | {meaning_of(action, prefix)} |")
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows]) if rows else ""


def summary(thing: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


# -- the methods ------------------------------------------------------------------------------------------------------


def methods() -> dict[str, type]:
    """The registered methods by name."""
    from attn_reg_plugin.regularizers import REGISTRY

    return dict(sorted(REGISTRY.items()))


def method_parser() -> argparse.ArgumentParser:
    """The flags that a regularized fairseq task adds to its own."""
    from fairseq.dataclass import FairseqDataclass
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from attn_reg_plugin.tasks.attn_reg_task import with_attn_reg

    parser = argparse.ArgumentParser(add_help=False)
    gen_parser_from_dataclass(parser, with_attn_reg(FairseqDataclass)())
    return parser


def methods_table() -> str:
    """Every method: its name as a flag, its class, and what it does."""
    rows = [f"| `{name}` | `{method.__name__}` | {cell(summary(method))} |" for name, method in methods().items()]
    return "\n".join(["| `--attn-reg` | class | what it does |", "|---|---|---|", *rows])


def flags_of_methods() -> str:
    """The flags that all methods share, then those of each method under a heading."""
    known = methods()
    owned: dict[str, list[argparse.Action]] = {name: [] for name in known}
    shared = []
    for action in method_parser()._actions:
        # the longest name wins, where one method's is the beginning of another's
        owners = [name for name in known if action.dest.startswith(f"{name}_")]
        (owned[max(owners, key=len)] if owners else shared).append(action)
    parts = ["### All methods", flag_table(shared)]
    for name, method in known.items():
        table = flag_table(owned[name], f"{name}: ")
        parts += [f"### {name}", summary(inspect.getmodule(method)), table or "It has no flags of its own."]
    return "\n\n".join(parts)


def api_of_methods() -> str:
    """Say what mkdocstrings is to show of every method: the class, since its hooks are for those who write one."""
    parts = []
    for name, method in methods().items():
        parts.append(f"::: {method.__module__}.{method.__qualname__}\n    options:\n      members: []")
        parts.append(f"Defaults: [flags of `{name}`](flags.md#{name}).")
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


def registered() -> Iterator[tuple[str, str, type, list[argparse.Action]]]:
    """(flag, value, class, own flags) of every task, criterion, architecture and bpe that the package registers."""
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
                yield flag, name, owner, own_flags(config) if config is not None else older_flags(owner)


def older_flags(owner: type) -> list[argparse.Action]:
    """The same of a class that adds its arguments to a parser: those that fairseq's class does not add."""
    parsers = []
    for adding in (owner, next(base for base in owner.__mro__ if base.__module__.startswith("fairseq."))):
        parsers.append(argparse.ArgumentParser(add_help=False, conflict_handler="resolve"))
        if hasattr(adding, "add_args"):
            adding.add_args(parsers[-1])
    foreign = {action.dest for action in (*parsers[1]._actions, *method_parser()._actions)}
    return [action for action in parsers[0]._actions if action.dest not in foreign]


def flags_of_fairseq_face() -> str:
    """Every task, criterion, architecture and bpe, with the flags that it adds."""
    parts, shown = [], {"": ""}
    for flag, name, owner, actions in registered():
        table = flag_table(actions)
        text = f"Its flags are those of `{shown[table]}`." if shown.get(table) else table or "It adds no flags."
        parts += [f"### {flag} {name}", summary(owner), text]
        shown.setdefault(table, f"{flag} {name}")
    return "\n\n".join(parts)


# -- attn-reg ---------------------------------------------------------------------------------------------------------


def flags_of_attn_reg() -> str:
    """Every subcommand of `attn-reg`."""
    from attn_reg_plugin.cli import COMMANDS, build_parser

    parts = []
    for commands in COMMANDS.values():
        for name, text in commands.items():
            parts += [f"### attn-reg {name}", cell(text), flag_table(build_parser(name)._actions)]
    return "\n\n".join(part for part in parts if part)


MARKERS: dict[str, Callable[[], str]] = {
    "methods": methods_table,
    "flags of the methods": flags_of_methods,
    "flags of the fairseq face": flags_of_fairseq_face,
    "flags of attn-reg": flags_of_attn_reg,
    "api of the methods": api_of_methods,
}


def filled(markdown: str) -> str:
    """A page with its markers replaced; a marker is a line of its own."""
    for name, make in MARKERS.items():
        marker = f"<!-- {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown


# -- what mkdocs calls ------------------------------------------------------------------------------------------------


def on_startup(**_: Any) -> None:
    """Keep Python-Markdown quiet: importing fairseq opens the log to it."""
    logging.getLogger("MARKDOWN").setLevel(logging.WARNING)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand outside of docs/, the README as the first one."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, INDEX, abs_src_path=str(ROOT / "README.md")))
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            address = path.relative_to(ROOT).as_posix()
            if files.get_file_from_path(address) is None:
                files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill the markers; the site has the pages of docs/ beside those from outside of it."""
    if page.file.src_uri == INDEX or (ROOT / page.file.src_uri).exists():
        markdown = re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    else:
        markdown = markdown.replace("](../", "](").replace("](README.md", f"]({INDEX}")
    return filled(markdown)
