"""The steps of `attn-reg run FILE`: each section of the file is a command with its settings.

Values above the sections are what these refer to by `${name}`. Flags change both: `--pair en-ro` a value of that name,
`--lr 0.001` the setting of every step that has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from attn_reg_plugin.configuration import (
    add_flags,
    flag_of,
    load,
    read,
    refers_to,
    said_of,
    setting,
    values_of,
    with_rest,
)
from attn_reg_plugin.experiments.runs import RunError
from attn_reg_plugin.files import write_text

_COMPARISON = "carry_out"
#: section -> (module, the dataclass of its settings, the function that carries them out)
STEPS: dict[str, tuple[str, str, str]] = {
    "convert opus-mt": (__name__, "OpusMTStart", "convert_once"),
    "prepare phrasebook": ("attn_reg_plugin.corpora.preparation", "PhrasebookOptions", "prepare"),
    "prepare wmt16": ("attn_reg_plugin.corpora.preparation", "Wmt16Options", "prepare"),
    "compare": ("attn_reg_plugin.experiments.translation", "TranslationComparison", _COMPARISON),
    "finetune": ("attn_reg_plugin.experiments.fine_tuning", "FineTuning", _COMPARISON),
    "sweep": ("attn_reg_plugin.experiments.sweep_settings", "Sweep", _COMPARISON),
}


@dataclass(frozen=True, kw_only=True)
class OpusMTStart:
    """The settings of the step `convert opus-mt`."""

    model: str = setting("folder of an OPUS-MT model, or its name on the Hugging Face hub")
    languages: str = setting("names of the languages in fairseq", metavar="SOURCE-TARGET")
    out: Path = setting("folder to write", metavar="DIR")


def convert_once(start: OpusMTStart) -> None:
    """Convert the model, unless that is done.

    Raises:
        ValueError: another model was converted there, or this one cannot be.
    """
    from attn_reg_plugin.opus_mt.conversion import to_fairseq
    from attn_reg_plugin.opus_mt.download import download
    from attn_reg_plugin.opus_mt.marian_folder import MarianFolder

    record = start.out.with_name(f"{start.out.name}.name")
    before = record.read_text(encoding="utf-8").strip() if record.is_file() else start.model
    if start.out.is_dir():
        if before != start.model:
            raise ValueError(f"{start.out} was converted from {before}, not from {start.model}; give another --out")
        return
    folder = Path(start.model) if Path(start.model).is_dir() else download(start.model)
    start.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(record, f"{start.model}\n")
    source, _, target = start.languages.partition("-")
    to_fairseq(MarianFolder.open(folder), start.out, (source, target))


def plan(path: Path, words: Sequence[str]) -> list[Callable[[], int]]:
    """What to call, step by step; each gives an exit status.

    Args:
        path: of the file.
        words: flags, which win over it, and behind `--` those of fairseq-train.

    Raises:
        ValueError: a setting that no step has, a value that isn't allowed, or one that is missing.
        SystemExit: an unknown flag, or help was asked for.
    """
    content = load(path)
    names = [str(name) for name in content if name in STEPS]
    if not names:
        raise ValueError(f"{path} has no step; the steps are: {', '.join(STEPS)}")
    values, text = values_of(content), OmegaConf.to_yaml(content)
    unknown = [str(name) for name in content if not (name in STEPS or name in values or refers_to(text, str(name)))]
    if unknown:
        raise ValueError(f"{path}: unknown step {unknown[0]!r}; the steps are: {', '.join(STEPS)}")
    modules = {name: importlib.import_module(STEPS[name][0]) for name in names}
    settings = {name: getattr(modules[name], STEPS[name][1]) for name in names}

    place = list(words).index("--") if "--" in words else len(words)
    usage = f"attn-reg run {path} [--SETTING VALUE ...] [-- flags of fairseq-train]"
    parser = argparse.ArgumentParser(prog=f"attn-reg run {path}", usage=usage, allow_abbrev=False)
    for name in values:
        parser.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, help="a value of the file")
    for name in names:
        add_flags(parser, settings[name])
    given = vars(parser.parse_args(words[:place]))
    for name in values:
        if name in given:
            content[name] = given.pop(name)
        if OmegaConf.is_missing(content, name):
            raise ValueError(f"{flag_of(name)} is missing: {path} leaves it open")

    steps = []
    for name in names:
        fields = {entry.name for entry in dataclasses.fields(settings[name])}
        found = read(settings[name], content, name, {key: given[key] for key in fields & set(given)}, path)
        function = STEPS[name][2]
        found = with_rest(found, words[place + 1 :])
        if function == _COMPARISON:
            steps.append(partial(compared, path, found))
        else:
            steps.append(partial(_done, getattr(modules[name], function), found))
    return steps


def compared(path: Path | None, settings: Any) -> int:
    """Carry out a comparison; what is refused before anything runs is said of the file, too.

    Args:
        path: of the file with the settings, if there is one.
    """
    with said_of(path, but=RunError):
        return settings.carry_out()


def _done(function: Callable[[Any], Any], settings: Any) -> int:
    """Carry out a step that ends in an exception or well."""
    function(settings)
    return 0
