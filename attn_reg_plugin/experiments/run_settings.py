"""The settings of a run, compared: where two differ, by the names of the flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from attn_reg_plugin.experiments.methods import fairseq_flags
from attn_reg_plugin.regularizers import REGISTRY, options_of

#: settings that earlier versions did not record, or whose file is gone: without one, nothing is known to differ
LATER = ("start", "references", "further", "tokenizer")


def difference_of(recorded: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The settings in which two runs differ, at most three of them; where flags stand, and which are repeated or are a
    method's defaults, makes no difference."""
    before, now = (_by_flag(settings) for settings in (recorded, wanted))
    found = [
        f"{name}: {before.get(name, 'absent')} there, {now.get(name, 'absent')} asked for"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name) and (name not in LATER or (name in before and name in now))
    ]
    return "; ".join(found[:3])


def _by_flag(settings: dict[str, Any]) -> dict[str, str]:
    flags = str(settings.get("flags", ""))
    try:
        words = shlex.split(flags)
    except ValueError:  # written by something else
        words = flags.split()
    given = {name: str(value) for name, value in settings.items() if name != "flags"} | values_of(words)
    methods = [REGISTRY[name] for name in given.get("--attn-reg", "").split("+") if name in REGISTRY]
    for method in methods:
        defaults = {option.name: option.default for option in options_of(method)}
        given = values_of(fairseq_flags(method.name, defaults)) | given
    return given


def values_of(words: Iterable[str]) -> dict[str, str]:
    """The value of each flag, the last one of those that are repeated."""
    values, name = {}, ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values[name] = value or "given"
        else:
            values[name] = word if values.get(name) == "given" else f"{values.get(name)} {word}"
    return values
