"""The steps of `attn-reg run FILE`: each section of the file is a command with its settings.

Values above the sections are what these refer to by `${name}`. Flags change both: `--pair en-ro` a value of that name,
`--lr 0.001` the setting of every step that has it.

With `each` the steps are carried out for each combination of values:

    each: {task: [rte, cola], model: [bert-base-uncased, roberta-base]}
    out: runs/${task}-${model}
    finetune: {task: "${task}", model: "${model}", out: "${out}", data: hub}

are four comparisons. In a section `each` holds for that section alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attn_reg_plugin.configuration import (
    add_flags,
    check_values,
    flag_of,
    flagged,
    load,
    read,
    refers_to,
    refused,
    said_of,
    values_of,
    with_rest,
)
from attn_reg_plugin.experiments.executing import RunError
from attn_reg_plugin.experiments.flags import words_of

EACH, SCRIPT = "each", "script "
#: section -> (module, the dataclass of its settings, the function or the method that carries them out)
STEPS: dict[str, tuple[str, str, str]] = {
    "convert opus-mt": ("attn_reg_plugin.experiments.opus_mt_start", "OpusMTStart", "convert_once"),
    "prepare phrasebook": ("attn_reg_plugin.corpora.preparation", "PhrasebookOptions", "prepare"),
    "prepare text": ("attn_reg_plugin.corpora.preparation", "TextOptions", "prepare"),
    "prepare wmt16": ("attn_reg_plugin.corpora.preparation", "Wmt16Options", "prepare"),
    "compare": ("attn_reg_plugin.experiments.translation", "TranslationComparison", ".carry_out"),
    "finetune": ("attn_reg_plugin.experiments.fine_tuning", "FineTuning", ".carry_out"),
    "sweep": ("attn_reg_plugin.experiments.sweep.settings", "Sweep", ".carry_out"),
    "bench": ("attn_reg_plugin.bench.benchmark", "Settings", "publish"),
}
#: a section's settings -> those of a command, and what to call with them
Command = Callable[[dict[str, Any]], tuple[Any, Callable[[Any], int]]]


@dataclass
class Step:
    """A step, checked and not yet carried out.

    Attributes:
        section: of the file.
        settings: a dataclass; of a command its arguments, of a script its words.
        function: carries out the settings.
        path: of the file.
        values: of the names in `each`, in this combination.
    """

    section: str
    settings: Any
    function: Callable[[Any], Any]
    path: Path
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def carry_out(self) -> int:
        """Do it; the exit status."""
        with said_of(self.path, but=RunError):
            status = self.function(self.settings)
            return status if isinstance(status, int) else 0  # `prepare` gives a manifest


def plan(path: Path, words: Sequence[str], commands: Mapping[str, Command] = MappingProxyType({})) -> list[Step]:
    """The steps of a file, in its order.

    Args:
        path: of the file.
        words: flags, which win over it, and behind `--` those of fairseq-train.
        commands: further steps, by the names of their sections.

    Raises:
        ValueError: a setting that no step has, a value that isn't allowed, or that is missing; two combinations of
            `each` with one folder.
        SystemExit: an unknown flag, or help was asked for.
    """
    content = load(path)
    sections = [str(name) for name in content if name in STEPS or name in commands or str(name).startswith(SCRIPT)]
    settings = {name: _settings_of(name) for name in sections if name in STEPS}
    _check_sections(path, content, sections, settings, commands)
    place = list(words).index("--") if "--" in words else len(words)
    given, rest = _flags(path, content, settings, words[:place]), words[place + 1 :]
    if rest and not any(entry.metadata["rest"] for one in settings.values() for entry in dataclasses.fields(one)):
        raise ValueError(f"{path} has no step that takes flags of fairseq-train, as those behind `--` are")
    steps: list[Step] = []
    for one, values in _combinations(content, path, given):
        for name in values_of(one):
            if name in given and name not in values:
                one[name] = given[name]
            if OmegaConf.is_missing(one, name):
                raise ValueError(f"{flag_of(name)} is missing: {path} leaves it open")
        own = {name: value for name, value in given.items() if name not in one}
        for name in sections:
            for part, more in _of_section(one, name, path):
                steps.append(_step(path, part, name, settings.get(name), own, rest, commands))
                steps[-1].values = {**values, **more}
    _check_folders(path, steps)
    return steps


def _check_sections(
    path: Path, content: DictConfig, sections: list[str], settings: Mapping[str, type], commands: Mapping[str, Command]
) -> None:
    """Refuse a file without steps, sections that are none, and what would do nothing above them."""
    known = ", ".join([*STEPS, *commands, f"{SCRIPT}FILE.py"])
    if not sections:
        raise ValueError(f"{path} has no step; the steps are: {known}")
    text = OmegaConf.to_yaml(content)
    above = [str(name) for name in content if name not in (*sections, EACH)]
    if unknown := [name for name in above if not (name in values_of(content) or refers_to(text, name))]:
        raise ValueError(f"{path}: unknown step {unknown[0]!r}; the steps are: {known}")
    flags = {name for one in settings.values() for name in flagged(one)}
    check_values(
        OmegaConf.masked_copy(content, [name for name in above if name not in values_of(content)]), path, flags
    )


def _flags(path: Path, content: DictConfig, settings: Mapping[str, type], words: Sequence[str]) -> dict[str, Any]:
    """The values of flags: of the values above the sections, and of the settings of all steps."""
    usage = f"attn-reg run {path} [--SETTING VALUE ...] [-- flags of fairseq-train]"
    parser = argparse.ArgumentParser(prog=f"attn-reg run {path}", usage=usage, allow_abbrev=False)
    file = parser.add_argument_group("the file")
    for name in _names_of(content, path):
        text = "carried out for each of these; a value of the file's, or several with commas"
        file.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, help=text)
    for name in values_of(content):
        file.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, help="a value of the file")
    for one in settings.values():
        add_flags(parser, one)
    return vars(parser.parse_args(words))


def _settings_of(section: str) -> type:
    module, name, _ = STEPS[section]
    return getattr(importlib.import_module(module), name)


def _step(
    path: Path,
    content: DictConfig,
    name: str,
    settings: type | None,
    given: Mapping[str, Any],
    rest: Sequence[str],
    commands: Mapping[str, Command],
) -> Step:
    """The step of a section.

    Args:
        given: values of flags, of settings.
        rest: flags of fairseq-train.
    """
    if settings is not None:
        fields = {entry.name for entry in dataclasses.fields(settings)}
        found = read(settings, content, name, {key: given[key] for key in fields & set(given)}, path)
        module, _, function = STEPS[name]
        owner = settings if function.startswith(".") else importlib.import_module(module)
        return Step(name, with_rest(found, rest), getattr(owner, function.removeprefix(".")), path)
    part = content[name]
    if not isinstance(part, DictConfig):
        raise ValueError(f"{path}: {name} is {part!r}, but must be a mapping of settings")
    with refused(path):
        values = OmegaConf.to_container(part, resolve=True)
    with said_of(path, but=RunError):
        # YAML reads a bare `on` as true
        named = {"on" if key is True else str(key): value for key, value in values.items()}
        return Step(name, *(commands[name](named) if name in commands else _script(path, name, named)), path)


def _script(path: Path, section: str, settings: Mapping[str, Any]) -> tuple[list[str], Callable[[Any], int]]:
    """The words of a program of Python's, whose place is relative to the file's; `words` are those without a flag."""
    file = path.parent / section.removeprefix(SCRIPT)
    if not file.is_file():
        raise ValueError(f"{section}: there is no file {file}")
    words = [str(word) for word in settings.get("words", ())]
    flags = {name.replace("_", "-"): value for name, value in settings.items() if name != "words"}
    return [str(file), *words, *words_of(flags)], lambda words: subprocess.run([sys.executable, *words]).returncode


# -- each -------------------------------------------------------------------------------------------------------------


def _names_of(content: DictConfig, path: Path) -> dict[str, list[Any]]:
    """The names of `each` with their values, of a file or a section of it."""
    given = OmegaConf.to_container(content[EACH]) if OmegaConf.is_config(content.get(EACH)) else content.get(EACH, {})
    if not isinstance(given, dict) or not all(isinstance(values, list) and values for values in given.values()):
        raise ValueError(f"{path}: each is {given!r}, but must be a mapping of names to lists, {{task: [rte, cola]}}")
    return {str(name): values for name, values in given.items()}


def _combinations(
    content: DictConfig, path: Path, given: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[DictConfig, dict[str, Any]]]:
    """The content once for each combination, with the names' values above the sections; and these values.

    Args:
        given: values of flags, several with commas, which take the place of the file's.
    """
    names = _names_of(content, path)
    names |= {name: [word.strip() for word in given[name].split(",")] for name in names if name in given}
    for values in itertools.product(*names.values()):
        one, chosen = content.copy(), dict(zip(names, values, strict=True))
        one.pop(EACH, None)
        for name, value in chosen.items():
            one[name] = value
        yield one, chosen


def _of_section(content: DictConfig, section: str, path: Path) -> Iterator[tuple[DictConfig, dict[str, Any]]]:
    """The content once for each combination of a section's own `each`, in which the section has none."""
    part = content.get(section)
    if not isinstance(part, DictConfig) or EACH not in part:
        yield content, {}
        return
    outer = content.copy()
    outer[EACH] = part[EACH]
    outer[section].pop(EACH)
    yield from _combinations(outer, path)


def _check_folders(path: Path, steps: Sequence[Step]) -> None:
    """Refuse combinations whose tables would take each other's place."""
    given: dict[tuple[str, Path], Step] = {}
    for step in steps:
        if step.section in STEPS and STEPS[step.section][2] == ".carry_out":
            there = given.setdefault((step.section, step.settings.out), step)
            if step.settings != there.settings:
                missing = " and ".join(
                    f"${{{name}}}" for name, value in step.values.items() if value != there.values[name]
                )
                said = f"{path}: combinations of each have one folder for {step.section}, {step.settings.out}"
                raise ValueError(f"{said}; put {missing} into out")
