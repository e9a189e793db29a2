"""The steps of `attn-reg run FILE`: each section of the file is a command with its settings.

Values above the sections are what these refer to by `${name}`. Flags change both: `--pair en-ro` a value of that name,
`--lr 0.001` the setting of every step that has it. With `each` the steps are carried out several times, see `each.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attn_reg_plugin.configuration import (
    add_flags,
    flag_of,
    load,
    read,
    refers_to,
    refused,
    said_of,
    values_of,
    with_rest,
)
from attn_reg_plugin.experiments.each import EACH, Folders, all_names, combinations, names_of, of_section
from attn_reg_plugin.experiments.executing_before import RunError
from attn_reg_plugin.experiments.toy import aside, make_files, toy_of

#: of a section's settings, whether at toy size, and the task that the file fine-tunes on: what to call
CommandStep = Callable[[dict[str, Any], bool, Any], Callable[[], int]]
_COMPARISON = "carry_out"
#: section -> (module, the dataclass of its settings, the function that carries them out)
STEPS: dict[str, tuple[str, str, str]] = {
    "convert opus-mt": ("attn_reg_plugin.experiments.opus_mt_start", "OpusMTStart", "convert_once"),
    "prepare phrasebook": ("attn_reg_plugin.corpora.preparation", "PhrasebookOptions", "prepare"),
    "prepare wmt16": ("attn_reg_plugin.corpora.preparation", "Wmt16Options", "prepare"),
    "compare": ("attn_reg_plugin.experiments.translation", "TranslationComparison", _COMPARISON),
    "finetune": ("attn_reg_plugin.experiments.fine_tuning", "FineTuning", _COMPARISON),
    "sweep": ("attn_reg_plugin.experiments.sweep.settings", "Sweep", _COMPARISON),
}


def plan(
    path: Path, words: Sequence[str], commands: Mapping[str, CommandStep] = MappingProxyType({})
) -> list[Callable[[], int]]:
    """What to call, step by step; each gives an exit status.

    Args:
        path: of the file.
        words: flags, which win over it, and behind `--` those of fairseq-train.
        commands: further steps, by the names of their sections.

    Raises:
        ValueError: a setting that no step has, a value that isn't allowed, or one that is missing; two combinations of
            `each` with one folder.
        SystemExit: an unknown flag, or help was asked for.
    """
    content = load(path)
    sections = [str(name) for name in content if name in STEPS or name in commands]
    _check_sections(path, content, sections, commands)
    place = list(words).index("--") if "--" in words else len(words)
    given = _flags(path, content, [name for name in sections if name in STEPS], words[:place])
    if words[place + 1 :] and not any(_takes_rest(name) for name in sections):
        raise ValueError(f"{path} has no step that takes flags of fairseq-train, as those behind `--` are")
    toy = bool(given.pop("toy", False))
    steps, folders = [], Folders(path)
    for one in combinations(content, path, given, toy):
        values = {name: given[name] for name in values_of(one) if name in given and name not in content.get(EACH, {})}
        for name, value in values.items():
            one[name] = value
        for name in values_of(one):
            if OmegaConf.is_missing(one, name):
                raise ValueError(f"{flag_of(name)} is missing: {path} leaves it open")
        if toy and "out" in values_of(one):
            one["out"] = str(aside(Path(str(one["out"]))))
        planned = _Planned(path, toy, {name: given[name] for name in given if name not in one}, words[place + 1 :])
        for name in sections:
            for part in of_section(one, name, path, toy):
                steps.append(planned.command(part, name, commands) if name in commands else planned.step(part, name))
                if name in STEPS and STEPS[name][2] == _COMPARISON:
                    folders.give(name, steps[-1].args[1], {key: part[key] for key in all_names(content, name, path)})
    return steps


def _check_sections(path: Path, content: DictConfig, sections: list[str], commands: Iterable[str]) -> None:
    """Refuse a file without steps, and sections that are none."""
    known = ", ".join([*STEPS, *commands])
    if not sections:
        raise ValueError(f"{path} has no step; the steps are: {known}")
    values, text = [*values_of(content), *sections, EACH], OmegaConf.to_yaml(content)
    unknown = [str(name) for name in content if not (name in values or refers_to(text, str(name)))]
    if unknown:
        raise ValueError(f"{path}: unknown step {unknown[0]!r}; the steps are: {known}")


def _flags(path: Path, content: DictConfig, sections: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """The values of flags: of the values above the sections, and of the settings of all steps."""
    usage = f"attn-reg run {path} [--SETTING VALUE ...] [-- flags of fairseq-train]"
    parser = argparse.ArgumentParser(prog=f"attn-reg run {path}", usage=usage, allow_abbrev=False)
    add_toy(parser)
    for name in names_of(content, path):
        text = "carried out for each of these; one of the file's, or several with commas"
        parser.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, help=text)
    for name in values_of(content):
        parser.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, help="a value of the file")
    for name in sections:
        add_flags(parser, _settings_of(name))
    return vars(parser.parse_args(words))


def add_toy(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--toy`."""
    text = "try it out: a tiny random model, 50 made-up examples, one epoch, one seed; in a folder aside, OUT-toy"
    parser.add_argument("--toy", action="store_true", help=text)


def _settings_of(section: str) -> type:
    module, name, _ = STEPS[section]
    return getattr(importlib.import_module(module), name)


def _takes_rest(section: str) -> bool:
    """Whether a step takes the flags of fairseq-train behind `--`."""
    return section in STEPS and any(entry.metadata["rest"] for entry in dataclasses.fields(_settings_of(section)))


@dataclass(frozen=True)
class _Planned:
    """How the sections of a file become steps.

    Attributes:
        path: of the file.
        toy: at toy size.
        given: values of flags, of settings.
        rest: flags of fairseq-train.
    """

    path: Path
    toy: bool
    given: Mapping[str, Any]
    rest: Sequence[str]

    def step(self, content: DictConfig, name: str) -> Callable[[], int]:
        """A step with settings of its own."""
        settings = _settings_of(name)
        fields = {entry.name for entry in dataclasses.fields(settings)}
        found = read(settings, content, name, {key: self.given[key] for key in fields & set(self.given)}, self.path)
        found = with_rest(found, self.rest)
        module, _, function = STEPS[name]
        if function == _COMPARISON:
            return partial(compared, self.path, found, toy=self.toy)
        return partial(_done, getattr(importlib.import_module(module), function), found, toy=self.toy)

    def command(self, content: DictConfig, name: str, commands: Mapping[str, CommandStep]) -> Callable[[], int]:
        """A step that is a command with its flags."""
        part = content[name]
        if not isinstance(part, DictConfig):
            raise ValueError(f"{self.path}: {name} is {part!r}, but must be a mapping of settings")
        with refused(self.path):
            settings = OmegaConf.to_container(part, resolve=True)
            task = OmegaConf.select(content, "finetune.task")
        if self.toy and "out" not in content and {"run_folder", "runs", "run_log"} & set(settings):
            raise ValueError(f"{self.path}: with --toy, {name} needs a value `out` above the sections, and runs in it")
        with said_of(self.path, but=RunError):
            # YAML reads a bare `on` as true
            named = {"on" if key is True else str(key): value for key, value in settings.items()}
            return commands[name](named, self.toy, task)


def compared(path: Path | None, settings: Any, toy: bool = False) -> int:
    """Carry out a comparison; what is refused before anything runs is said of the file, too.

    Args:
        path: of the file with the settings, if there is one.
        toy: at toy size, see `toy.py`.
    """
    with said_of(path, but=RunError), _quickly(toy):
        return _sized(settings, toy).carry_out()


def _done(function: Callable[[Any], Any], settings: Any, toy: bool = False) -> int:
    """Carry out a step that ends in an exception or well."""
    function(_sized(settings, toy))
    return 0


def _quickly(toy: bool) -> contextlib.AbstractContextManager[None]:
    """Around a comparison: at toy size a training takes less time than its imports."""
    if not toy:
        return contextlib.nullcontext()
    from attn_reg_plugin.experiments.starting import quick_starts

    return quick_starts()


def _sized(settings: Any, toy: bool) -> Any:
    """The settings, or those at toy size, whose files are made."""
    if not toy:
        return settings
    small = toy_of(settings)
    make_files(small)
    return small
