"""Flags of fairseq's commands as data: a mapping of names, without the dashes, to values.

    {"lr": 0.001, "arch": "transformer", "cpu": True}     is     --lr 0.001 --arch transformer --cpu

Texts become such mappings where a user gives them, and mappings become texts where a command is started; in between
nothing is parsed.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: the model that a training starts from; the method that does not train: an update with a learning rate of zero, which
#: changes no bit of that model, and validates and keeps it like the others; the method that others are compared with
START, UNTUNED, PLAIN = "finetune-from-model", "untuned", "plain"
#: name -> value; True is a switch, and what is None or False is not given
Flags = Mapping[str, Any]
_FLAG = re.compile(r"--?[A-Za-z]")
_REASONS = {"No closing quotation": "a quote is not closed", "No escaped character": "it ends in a backslash"}


def named(**values: Any) -> dict[str, Any]:
    """Flags from keyword arguments: `named(max_epoch=3)` is `{"max-epoch": 3}`; None and False are left out."""
    return {name.replace("_", "-"): value for name, value in values.items() if value is not None and value is not False}


def words_of(flags: Flags) -> list[str]:
    """The words of a command line."""
    words = []
    for name, value in flags.items():
        if value is not None and value is not False:
            name = name if name.startswith("-") else f"--{name}"
            values = [str(one) for one in (value if isinstance(value, list) else [value] * (value is not True))]
            dashed = name.startswith("--") and len(values) == 1 and values[0].startswith("-")
            words += [f"{name}={values[0]}"] if dashed else [name, *values]
    return words


def parsed(flag: str, text: str) -> dict[str, Any]:
    """The flags in the text that a user gave as the value of `flag`; of one that comes twice, the last holds."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text!r}: {_REASONS.get(str(error), str(error))}") from None
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if _FLAG.match(word):
            name, given, value = word.removeprefix("--").partition("=")
            found[name] = value if given else True
        elif not name:
            raise ValueError(f"{flag} {text!r}: {word!r} follows no flag")
        else:
            before = found[name]
            found[name] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
    return found


def completed(flags: Flags) -> dict[str, str]:
    """The flags as texts, with the defaults of the options of the methods in `attn-reg`."""
    from attn_reg_plugin.regularizers import REGISTRY, option_flag, options_of

    found = {}
    for method in str(flags.get("attn-reg", "")).split("+"):
        for option in options_of(REGISTRY[method]) if method in REGISTRY else ():
            if option.default is not False:
                found[option_flag(method, option.name)] = _text(option.default)
    return found | {name: _text(value) for name, value in flags.items() if value is not None and value is not False}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def contrast(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first three settings, as `run.json` has them, in which a run that is there and one asked for differ; or "".

    Of a flag that names a file, the digests in `files` are compared where both runs have one, and else the paths. The
    order of flags and the defaults of a method make no difference.
    """
    before, now = _flat(one), _flat(other)
    for name in one.get("files", {}).keys() & other.get("files", {}).keys():
        before[f"--{name}"], now[f"--{name}"] = one["files"][name], other["files"][name]
    found = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    both = [(name, before.get(name, "absent"), now.get(name, "absent")) for name in found[:3]]
    return "; ".join(f"{name}: {there} there, {asked} asked for" for name, there, asked in both)


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that shape a run, by name; of flags with their dashes."""
    left_out = ("flags", "generate", "files", "paths", "method", "title")
    found = {name: _text(value) for name, value in settings.items() if name not in left_out}
    beside = str(Path(settings.get("paths", {}).get("data", "")).parent / "opus_mt")  # wherever the data lie
    for where, flags in (("", settings.get("flags", {})), ("generate ", settings.get("generate", {}))):
        for name, value in completed(flags).items():
            if (name, value) != ("opus-mt-folder", beside):
                found[where + (name if name.startswith("-") else f"--{name}")] = value
    return found
