"""The settings of a run, compared: where two differ, by the names of the flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from attn_reg_plugin.experiments.methods import fairseq_flags
from attn_reg_plugin.regularizers import REGISTRY, options_of

#: settings that earlier versions did not record, or whose file is gone: without one, nothing is known to differ
LATER = ("start", "references", "further", "tokenizer")
#: flags of which every seed has its own, where the part that is trained on is drawn anew for each
_OF_THE_PART = ("--train-sample-seed", "--total-num-update", "--lr-period-updates")


def difference_of(recorded: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The settings in which two runs differ, at most three of them; where flags stand, and which are repeated or are a
    method's defaults, makes no difference."""
    found = [
        "{}: {} there, {} asked for".format(name, *("absent" if value is None else value for value in values))
        for name, values in differing(recorded, wanted).items()
    ]
    return "; ".join(found[:3])


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """The settings in which two runs are known to differ, and both values; None where a run hasn't got one.

    Args:
        one, other: as `run.json` has them, or with their flags as settings.
    """
    before, now = _by_flag(one), _by_flag(other)
    return {
        name: (before.get(name), now.get(name))
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name) and (name not in LATER or (name in before and name in now))
    }


def _by_flag(settings: Mapping[str, Any]) -> dict[str, str]:
    words = _words_of(str(settings.get("flags", "")))
    given = {name: str(value) for name, value in settings.items() if name != "flags"} | values_of(words)
    methods = [REGISTRY[name] for name in given.get("--attn-reg", "").split("+") if name in REGISTRY]
    for method in methods:
        defaults = {option.name: option.default for option in options_of(method)}
        given = values_of(fairseq_flags(method.name, defaults)) | given
    return given


def _words_of(flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError:  # written by something else
        return flags.split()


def values_of(words: Iterable[str]) -> dict[str, str]:
    """The value of each flag, the last one of those that are repeated; a switch has the value `given`."""
    values, name = {}, ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values[name] = value or "given"
        elif name:
            values[name] = word if values[name] == "given" else f"{values[name]} {word}"
    return values


def flags_of(text: str) -> dict[str, str]:
    """The value of each flag in a text, without what runs that differ in the seed alone have each of their own."""
    values = values_of(_words_of(text))
    drawn_anew = {"--train-fraction", "--train-per-class"} & set(values)  # and the updates are each seed's own
    left_out = ("--seed", *(_OF_THE_PART if drawn_anew else ()))
    return {name: value for name, value in values.items() if name not in left_out}
