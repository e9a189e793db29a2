"""From a dataclass to flags and to YAML: the settings of a command, declared once.

A field made by `setting` is a flag `--like-this` of the command and a key `like_this` of a file of settings. Flags win
over the file. What doesn't fit the dataclass is refused with its name, and the file's, before anything runs. Values of
a file refer to others as `${name}`.
"""

import argparse
import contextlib
import dataclasses
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attn_reg_plugin.files import open_file

T = TypeVar("T")
#: how a setting may stand on the command line, see `setting`
WAYS = ("positional", "repeated", "rest", "unflagged")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
_WORDS[dict] = "a mapping of settings"


def setting(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    choices: tuple[str, ...] | None = None,
    within: str | None = None,
    metavar: str | None = None,
    group: str = "",
    **ways: bool,
) -> Any:
    """A documented field of a command's settings.

    Args:
        help: one line, for `--help`.
        default: the value if none is given; without a default the setting is required.
        choices, within: the values that a text may have; the range of a number, see `Interval`.
        metavar: how the value is called in the help.
        group: heading in the help; by default `GROUP` of the class.
        **ways: `positional=True`, an argument without a flag; `repeated=True`, a list whose flag is given once per
            entry (other lists are written with commas); `rest=True`, a text that takes what follows `--` as well;
            `unflagged=True`, a key of a file and no flag.
    """
    metadata = {"help": help, "choices": choices, "within": within, "metavar": metavar, "group": group}
    return dataclasses.field(default=default, metadata={**metadata, **dict.fromkeys(WAYS, False), **ways})


@contextlib.contextmanager
def said_of(path: Path | None, unless: Callable[[ValueError], bool]) -> Iterator[None]:
    """Around checks of a file's settings: a ValueError names the file, unless they have no part in it."""
    try:
        yield
    except ValueError as error:
        if path is None or str(path) in str(error) or unless(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add an argument for each setting; the positional ones are a list, which a file may begin."""
    places = [entry for entry in dataclasses.fields(settings) if entry.metadata["positional"]]
    metavar = " ".join(["CONFIG", *["|"] * bool(places), *(entry.metadata["metavar"] for entry in places)])
    said = "".join(f"; or {entry.metadata['metavar']}: {_help(entry)}" for entry in places)
    parser.add_argument(
        "words", nargs="*", metavar=metavar, help=f"a YAML file with these settings, which flags win over{said}"
    )
    add_flags(parser, settings, positional=True)


def add_flags(parser: argparse.ArgumentParser, settings: type, positional: bool = False) -> None:
    """Add a flag for each setting that has none yet; with `positional`, those declared so are arguments already."""
    known = {action.dest for action in parser._actions}
    groups: dict[str, Any] = {group.title: group for group in parser._action_groups}
    for entry in dataclasses.fields(settings):
        meta, kind = entry.metadata, kind_of(settings, entry.name)
        if entry.name in known or meta["unflagged"] or (positional and meta["positional"]):
            continue
        title = meta["group"] or _owner(settings, entry.name)
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title) if title else parser)
        how: dict[str, Any] = {"dest": entry.name, "help": _help(entry), "default": argparse.SUPPRESS}
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how["action"] = "append" if meta["repeated"] else "store"
            how["metavar"] = meta["metavar"] or entry.name.upper()
        group.add_argument(flag_of(entry.name), **how)


def flagged(settings: type) -> list[str]:
    """The names of the settings that have a flag."""
    return [entry.name for entry in dataclasses.fields(settings) if not entry.metadata["unflagged"]]


def _owner(settings: type, name: str) -> str:
    """The group of the class that declares a setting."""
    return next(vars(one).get("GROUP", "") for one in settings.__mro__ if name in vars(one).get("__annotations__", ()))


def load(path: Path | None) -> DictConfig:
    """A YAML file's content; without a file nothing. What isn't a mapping in YAML is refused."""
    if path is None:
        return OmegaConf.create()
    with open_file(path) as file:
        try:
            for token in yaml.scan(file):
                line = token.start_mark.line + 1
                if isinstance(token, yaml.AliasToken):  # a few lines of them may stand for a billion values
                    raise ValueError(f"in line {line} *{token.value} is an alias; refer to a value by ${{name}}")
                if isinstance(token, yaml.ScalarToken) and token.plain and _BASE_60.fullmatch(token.value):
                    raise ValueError(f"in line {line} {token.value} is a number in base 60; put it in quotes")
            file.seek(0)
            content = OmegaConf.load(file)
        except Exception as error:  # of yaml, of its characters, of OmegaConf
            raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, DictConfig):
        raise ValueError(f"{path} holds no settings, but a list or a text; write `name: value`, one per line")
    return content


def read(
    settings: type[T],
    part: DictConfig,
    given: Mapping[str, Any],
    path: Path | None = None,
    rest: Sequence[str] = (),
) -> T:
    """The settings in a part of a file, under those given.

    Args:
        settings: the dataclass.
        part: a section of the file, whose path is for messages, or all of it; not changed.
        given: name -> value, as flags have them.
        rest: what follows `--`.

    Raises:
        ValueError: an unknown key, a value that isn't allowed, or a setting that is missing.
    """
    part, fields = part.copy(), {entry.name: entry for entry in dataclasses.fields(settings)}  # type: ignore[arg-type]
    if unknown := [str(key) for key in part if key not in fields]:
        raise ValueError(f"{path}: unknown setting {unknown[0]!r}; the settings are: {', '.join(fields)}")
    for name in [name for name, entry in fields.items() if rest and entry.metadata["rest"]]:
        given = {**given, name: f"{given.get(name, part.get(name) or '')} {shlex.join(rest)}".strip()}
    for name, value in given.items():
        there = None
        with contextlib.suppress(OmegaConfBaseException):  # what it refers to may be missing where a flag is given
            there = part.get(name)
        if isinstance(there, DictConfig):  # names with commas pick the entries of a file's mapping, if it has any
            names = [one.strip() for one in value.split(",") if one.strip()]
            value = {one: there.get(one) for one in names} if any(one in there for one in names) else value
        part[name] = value
    where = {name: flag_of(name) if name in given else f"{path}: {name}" for name in fields}
    plain, shape = resolved(part, path), OmegaConf.structured(settings)
    for name, entry in fields.items():
        if plain.get(name, MISSING if entry.default is dataclasses.MISSING else None) == MISSING:
            what = entry.metadata["metavar"] if entry.metadata["positional"] else flag_of(name)
            raise ValueError(f"{what} is missing: {entry.metadata['help']}")
    values = {name: _converted(shape, fields[name], value, where[name]) for name, value in plain.items()}
    with said_of(path, unless=lambda error: any(flag_of(name) in str(error) for name in given)):
        return settings(**values)


def kind_of(settings: type, name: str) -> Any:
    """A field's type without `| None`."""
    hint = typing.get_type_hints(settings)[name]
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


def _converted(shape: DictConfig, entry: dataclasses.Field, value: Any, where: str) -> Any:
    """A value of the field's type, of what a file or a flag holds; a list may be written with commas."""
    from attn_reg_plugin.regularizers.base.options import check_value  # torch, which help does without

    kind = kind_of(OmegaConf.get_type(shape), entry.name)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Path and value == "":
        raise ValueError(f"{where} is empty, but must be a path, such as ./here")
    found = value
    if origin is tuple and not isinstance(value, list):
        words = [value] if entry.metadata["repeated"] else [word.strip() for word in str(value).split(",")]
        found = [] if value in (None, "") else words
    several = value if isinstance(value, list) else [value]
    if str in (kind, *arguments) and any(isinstance(one, bool) for one in several):
        raise ValueError(f"{where} is {value!r}, but must be text; put yes, no, on and off in quotes")
    try:
        found = OmegaConf.to_container(OmegaConf.merge(shape, {entry.name: found}))[entry.name]
        if origin is tuple and any(isinstance(one, list | dict) for one in found):
            raise OmegaConfBaseException
    except OmegaConfBaseException:
        what = f"{_WORDS[arguments[0]]}, or several with commas" if origin is tuple else _WORDS[origin]
        raise ValueError(f"{where} is {value!r}, but must be {what}") from None
    found = tuple(found) if origin is tuple else found
    try:
        if found is not None:
            check_value(entry, found)
    except ValueError as error:
        raise ValueError(where + str(error).removeprefix(entry.name)) from None
    return found


def _help(entry: dataclasses.Field) -> str:
    """The help with choices and default."""
    text, choices, default = entry.metadata["help"], entry.metadata["choices"], entry.default
    text += f"; one of {', '.join(choices)}" if choices else ""
    text += f"; in {entry.metadata['within']}" if entry.metadata["within"] else ""
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    if default is dataclasses.MISSING:
        text += " (required)"
    elif default is not None and not isinstance(default, bool) and shown != "":
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def resolved(content: DictConfig, path: Path | None) -> dict[str, Any]:
    """A mapping's values, with what they refer to; a reference to something missing is refused."""
    try:
        return {str(name): value for name, value in OmegaConf.to_container(content, resolve=True).items()}
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise ValueError(f"{path}: {key}{str(error).splitlines()[0]}") from None
