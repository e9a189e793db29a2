"""The steps of `attn-reg run FILE`: each section of the file is a command with its settings.

Values above the sections are what these refer to by `${name}`. Flags change both: `--pair en-ro` a value of that name,
`--lr 0.001` the setting of every step that has it. `attn-reg compare FILE` carries out the section `compare` alone:

    out: runs/demo
    prepare phrasebook: {pair: en-ro, out: "${out}/data"}
    compare: {data: "${out}/data", out: "${out}", methods: "plain,ad_drop"}

With `each` the steps are carried out for each combination of values:

    each: {task: [rte, cola], model: [bert-base-uncased, roberta-base]}
    out: runs/${task}-${model}
    finetune: {task: "${task}", model: "${model}", out: "${out}", data: hub}
"""

import argparse
import dataclasses
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attn_reg_plugin.configuration import T, add_flags, flag_of, flagged, kind_of, load, read, resolved, said_of
from attn_reg_plugin.experiments.running.executor import RunError
from attn_reg_plugin.experiments.running.flags import words_of

#: section -> module and dataclass of its settings, which `carry_out` carries out
STEPS: dict[str, tuple[str, str]] = {
    "convert opus-mt": ("attn_reg_plugin.experiments.converting", "Conversion"),
    "prepare phrasebook": ("attn_reg_plugin.corpora.options", "PhrasebookOptions"),
    "prepare text": ("attn_reg_plugin.corpora.options", "TextOptions"),
    "prepare wmt16": ("attn_reg_plugin.corpora.options", "Wmt16Options"),
    "compare": ("attn_reg_plugin.experiments.translation", "TranslationComparison"),
    "finetune": ("attn_reg_plugin.experiments.fine_tuning", "FineTuning"),
    "sweep": ("attn_reg_plugin.experiments.sweep.settings", "Sweep"),
    "export": ("attn_reg_plugin.experiments.converting", "Export"),
    "report": ("attn_reg_plugin.experiments.report.settings", "Report"),
    "bench": ("attn_reg_plugin.bench.settings", "Settings"),
}
#: how the name of a file of settings ends
FILES = (".yaml", ".yml")
#: a file may also have sections `script FILE.py`, and one `each`
EACH, SCRIPT = "each", "script "
#: more combinations of the values in `each` are refused
MOST_COMBINATIONS = 1_000


def settings_of(section: str) -> Any:
    """The dataclass of a step's settings."""
    module, name = STEPS[section]
    return getattr(importlib.import_module(module), name)


@dataclass
class Step:
    """A section of a file, checked and not yet carried out.

    Attributes:
        settings: a dataclass; of a script its words.
        values: of the names in `each`, in this combination.
    """

    section: str
    settings: Any
    path: Path | None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def carry_out(self) -> int:
        """Do it; the exit status."""
        with said_of(self.path, unless=lambda error: isinstance(error, RunError)):
            if self.section.startswith(SCRIPT):
                return subprocess.run([sys.executable, *self.settings]).returncode
            return self.settings.carry_out() or 0


def from_arguments(settings: type[T], arguments: argparse.Namespace) -> T:
    """The settings that a parsed command line gives, with those of its file under them, see `read`."""
    entries = dataclasses.fields(settings)  # type: ignore[arg-type]
    given = {entry.name: vars(arguments)[entry.name] for entry in entries if entry.name in arguments}
    words, config = list(arguments.words), None
    if words and words[0].endswith(FILES) and not os.path.isdir(words[0]):
        config = Path(words.pop(0))
    places = [entry.name for entry in entries if entry.metadata["positional"]]
    if places and typing.get_origin(kind_of(settings, places[-1])) is tuple and len(words) >= len(places):
        words[len(places) - 1 :] = [words[len(places) - 1 :]]
    if len(words) > len(places):
        raise ValueError(f"unrecognized arguments: {' '.join(words[len(places) :])}")
    given |= dict(zip(places, words, strict=False))
    arguments.config, content = config, load(config)
    part = content.get(arguments.command)
    if isinstance(part, DictConfig):
        sections_of(content, config, flagged(settings))
        content.update({name: value for name, value in given.items() if name in values_of(content)})
    part = part if isinstance(part, DictConfig) else content
    return read(settings, part, given, config, getattr(arguments, "rest", ()))


def plan(path: Path, words: Sequence[str]) -> list[Step]:
    """The steps of a file, in its order.

    Args:
        path: of the file.
        words: flags, which win over it, and behind `--` those of fairseq-train.

    Raises:
        ValueError: what `read` refuses, or two combinations of `each` with one folder.
        SystemExit: an unknown flag, or help was asked for.
    """
    content = load(path)
    settings = {name: settings_of(name) for name in content if name in STEPS}
    sections = sections_of(content, path, [name for one in settings.values() for name in flagged(one)])
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
            part = one[name]
            if not isinstance(part, DictConfig):
                raise ValueError(f"{path}: {name} is {part!r}, but must be a mapping of settings")
            if name in settings:
                fields = {entry.name for entry in dataclasses.fields(settings[name])}
                of_step = {key: own[key] for key in fields & set(own)}
                steps.append(Step(name, read(settings[name], part, of_step, path, rest), path, values))
            else:
                steps.append(Step(name, _script(path, name, part), path, values))
    _check_folders(path, steps)
    return steps


def _flags(path: Path, content: DictConfig, settings: Mapping[str, type], words: Sequence[str]) -> dict[str, Any]:
    """The values of flags: of the values above the sections, and of the settings of all steps."""
    usage = f"attn-reg run {path} [--SETTING VALUE ...] [-- flags of fairseq-train]"
    parser = argparse.ArgumentParser(prog=f"attn-reg run {path}", usage=usage, allow_abbrev=False)
    file = parser.add_argument_group("the file")
    helped = dict.fromkeys(_names_of(content, path), "carried out for each of these; one, or several with commas")
    for name, text in {**helped, **dict.fromkeys(values_of(content), "a value of the file")}.items():
        file.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, help=text)
    for one in settings.values():
        add_flags(parser, one)
    return vars(parser.parse_args(words))


def _script(path: Path, section: str, content: DictConfig) -> list[str]:
    """The words of a program of Python's, whose place is relative to the file's; `words` are those without a flag."""
    file = path.parent / section.removeprefix(SCRIPT)
    if not file.is_file():
        raise ValueError(f"{path}: {section}: there is no file {file}")
    # YAML reads a bare `on` as true
    settings = {"on" if key == "True" else key: value for key, value in resolved(content, path).items()}
    given = settings.pop("words", [])
    words = [str(word) for word in (given if isinstance(given, list) else [given])]
    flags = {name.replace("_", "-"): value for name, value in settings.items()}
    return [str(file), *words, *words_of(flags)]


def sections_of(content: DictConfig, path: Path | None, settings: Collection[str]) -> list[str]:
    """The names of a file's sections; what stands above them and would do nothing is refused.

    So is a mapping with the name of one of the sections' `settings`, whose flag would not reach the values in it.
    """
    text, values = OmegaConf.to_yaml(content), values_of(content)
    sections = [str(name) for name in content if name in STEPS or str(name).startswith(SCRIPT)]
    known = f"the steps are: {', '.join(STEPS)}, {SCRIPT}FILE.py"
    if not sections:
        raise ValueError(f"{path} has no step; {known}")
    for name in [str(name) for name in content if name not in (*sections, EACH)]:
        if not re.search(r"\$\{" + re.escape(name) + r"[.}\[]", text):
            unused = f"unknown key {name!r}: it is in no section, and none refers to ${{{name}}}"
            raise ValueError(f"{path}: {unused if name in values else f'unknown step {name!r}; {known}'}")
        if name in settings and name not in values:
            said = f"the mapping {name!r} above the sections has the name of a setting"
            raise ValueError(f"{path}: {said}, and {flag_of(name)} would not reach it; give it another name")
    return sections


def values_of(content: DictConfig) -> list[str]:
    """The names of the values above the sections."""
    return [str(name) for name in content if not OmegaConf.is_config(content._get_node(name))]


# -- each -------------------------------------------------------------------------------------------------------------


def _names_of(content: DictConfig, path: Path) -> dict[str, list[Any]]:
    """The names of `each` with their values."""
    given = OmegaConf.to_container(content[EACH]) if OmegaConf.is_config(content.get(EACH)) else content.get(EACH, {})
    if not isinstance(given, dict) or not all(isinstance(values, list) and values for values in given.values()):
        raise ValueError(f"{path}: each is {given!r}, but must be a mapping of names to lists, {{task: [rte, cola]}}")
    return {str(name): values for name, values in given.items()}


def _combinations(
    content: DictConfig, path: Path, given: Mapping[str, str]
) -> Iterator[tuple[DictConfig, dict[str, Any]]]:
    """The content once for each combination, with the names' values above the sections; and these values.

    Args:
        given: values of flags, several with commas, which take the place of the file's.
    """
    names = _names_of(content, path)
    names |= {name: [word.strip() for word in given[name].split(",")] for name in names if name in given}
    if (count := math.prod(map(len, names.values()))) > MOST_COMBINATIONS:
        raise ValueError(f"{path}: each has {count:,} combinations, but at most {MOST_COMBINATIONS:,} are possible")
    for values in itertools.product(*names.values()):
        chosen = dict(zip(names, values, strict=True))
        one = OmegaConf.masked_copy(content, [name for name in content if name != EACH])
        one.update(chosen)
        yield one, chosen


def _check_folders(path: Path, steps: Sequence[Step]) -> None:
    """Refuse combinations whose results would take each other's place."""
    given: dict[tuple[str, Path], Step] = {}
    for step in steps:
        if getattr(step.settings, "out", None) is not None:
            there = given.setdefault((step.section, step.settings.out), step)
            if step.settings != there.settings:
                missing = [f"${{{name}}}" for name, value in step.values.items() if value != there.values[name]]
                said = f"{path}: combinations of each have one folder for {step.section}, {step.settings.out}"
                raise ValueError(f"{said}; put {' and '.join(missing)} into out")
