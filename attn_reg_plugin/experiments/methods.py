"""The methods `attn-reg compare` knows: a table. To add one, add a row."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The fairseq task every method is trained with; with `--attn-reg none` it is plain translation.
TASK = "attn_reg_translation"

#: The method that is no training: one update with a learning rate of zero, which changes no bit of what
#: --finetune-from-model names, and validates and keeps it like the others.
UNTUNED = "untuned"
START = "--finetune-from-model"

#: name -> (title in tables, flags of fairseq-train)
METHODS: dict[str, tuple[str, str]] = {
    UNTUNED: ("untuned", "--attn-reg none --max-update 1"),
    "plain": ("plain", "--attn-reg none"),
    "attention_dropout": ("attention dropout", "--attn-reg none --attention-dropout 0.3"),
    "ad_drop": (
        "AD-DROP",
        "--attn-reg ad_drop --ad-drop-p 0.3 --ad-drop-q 0.3 --attn-sites encoder.self --ad-drop-cross-tuning epoch",
    ),
    "attend_out": ("AttendOut", "--attn-reg attend_out --attn-sites encoder.self"),
    # the probabilities that AttendOut's tables compare with
    "attention_dropout_0.1": ("attention dropout 0.1", "--attn-reg none --attention-dropout 0.1"),
    "attention_dropout_0.2": ("attention dropout 0.2", "--attn-reg none --attention-dropout 0.2"),
    "attention_layer_drop": (
        "attention LayerDrop",
        "--attn-reg attention_layer_drop --attn-sites encoder.self --attention-layer-drop-p 0.2",
    ),
    "scheduled_dropout": (
        "scheduled dropout",
        "--attn-reg scheduled_dropout --attn-sites encoder.self "
        "--scheduled-dropout-schedule 'drop encoder.self: 0:0.3'",
    ),
}


@dataclass(frozen=True)
class Method:
    """One way to train: its name in the table of methods, its title, and its flags of fairseq-train."""

    name: str
    title: str
    flags: tuple[str, ...]


def split_flags(flag: str, text: str) -> list[str]:
    """The words of a text of flags, as a shell parts them.

    Raises:
        ValueError: a quote in it is not closed, or nothing follows a backslash; the sentence names `flag`.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        reason = {"No closing quotation": "a quote is not closed", "No escaped character": "it ends in a backslash"}
        raise ValueError(f"{flag} {text!r}: {reason.get(str(error), str(error))}") from None


def select_methods(
    names: Sequence[str], overrides: Sequence[str] = (), table: Mapping[str, tuple[str, str]] = METHODS
) -> list[Method]:
    """The methods of `table` called `names`, in that order.

    `overrides` are texts `NAME=FLAGS`; the flags are put after the method's own, so that they win.
    Raises ValueError for an unknown or repeated method, an override of a method not selected, and an open quote.
    """
    unknown = [name for name in names if name not in table]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; the methods are: {', '.join(table)}")
    if len(set(names)) != len(names):
        raise ValueError(f"--methods names a method twice: {','.join(names)}")
    if not names:
        raise ValueError(f"--methods is empty; the methods are: {', '.join(table)}")
    added: dict[str, list[str]] = {name: [] for name in names}
    for override in overrides:
        name, separator, flags = override.partition("=")
        if not separator:
            raise ValueError(f"--method-flags wants NAME=FLAGS, given {override!r}")
        if name not in added:
            raise ValueError(f"--method-flags names {name!r}, which is not among --methods {','.join(names)}")
        added[name] += split_flags("--method-flags", flags)
    return [Method(name, table[name][0], (*shlex.split(table[name][1]), *added[name])) for name in names]
