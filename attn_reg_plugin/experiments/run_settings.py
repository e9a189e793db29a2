"""The settings of a run, compared: where two differ, by the names of the flags."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attn_reg_plugin.corpora.manifest import sha256
from attn_reg_plugin.experiments.methods import START, fairseq_flags
from attn_reg_plugin.regularizers import REGISTRY, options_of
from attn_reg_plugin.regularizers.scheduled_dropout import Schedule, file_of

#: settings that earlier versions did not record, or whose file is gone: without one, nothing is known to differ
LATER = ("start", "references", "further", "tokenizer", "schedule")
_RESTORE, _SCHEDULE = "--restore-file", "--scheduled-dropout-schedule"
#: what a file holds -> what gives its path, which says nothing where both runs have the former
_PATHS = {"start": (START, _RESTORE, "compare.opus_mt"), "schedule": (_SCHEDULE,)}
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
    both = before.keys() & now.keys()
    passed_over = {path for name in _PATHS.keys() & both for path in both.intersection(_PATHS[name])}
    passed_over |= {name for name in LATER if name not in both}
    return {
        name: (before.get(name), now.get(name))
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name) and name not in passed_over
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


def without_paths(text: str) -> list[str]:
    """The words of flags of fairseq-generate, without the folder of an OPUS-MT model's pieces, which is the data's."""
    words = _words_of(text)
    return [word for before, word in zip(["", *words], words, strict=False) if before != "--opus-mt-folder"]


def in_files(flags: Iterable[str]) -> dict[str, str]:
    """What the files hold that flags of fairseq-train name; nothing of those that aren't there or cannot be read.

    Returns:
        `start`: a digest of the model that the training starts from; `schedule`: the entries of scheduled dropout's.
    """
    values, found = values_of(flags), {}
    start = Path(values.get(START, values.get(_RESTORE, "")))
    if start.is_file():
        found["start"] = _digest_of_file(start, start.stat().st_mtime_ns)
    schedule = values.get(_SCHEDULE, "")
    if file_of(schedule) and "scheduled_dropout" in values.get("--attn-reg", "").split("+"):
        with contextlib.suppress(ValueError):  # the command says what is wrong with it
            found["schedule"] = "; ".join(Schedule.read(schedule).to_yaml().splitlines())
    return found


@functools.lru_cache
def _digest_of_file(path: Path, changed: int) -> str:
    """A digest of a file; it is read again where its time of change is another one."""
    return sha256(path)[:16]


def flags_of(text: str) -> dict[str, str]:
    """The value of each flag in a text, without what runs that differ in the seed alone have each of their own."""
    values = values_of(_words_of(text))
    drawn_anew = {"--train-fraction", "--train-per-class"} & set(values)  # and the updates are each seed's own
    left_out = ("--seed", *(_OF_THE_PART if drawn_anew else ()))
    return {name: value for name, value in values.items() if name not in left_out}
