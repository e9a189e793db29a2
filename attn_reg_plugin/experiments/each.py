"""`each` in a configuration: names with several values, for each combination of which the steps are carried out.

    each: {task: [rte, cola], model: [bert-base-uncased, roberta-base]}
    out: runs/${task}-${model}
    finetune: {task: "${task}", model: "${model}", out: "${out}", data: hub}

are four comparisons. In a section `each` holds for that section alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

EACH = "each"


def names_of(content: DictConfig, path: Path) -> dict[str, list[Any]]:
    """The names with their values.

    Args:
        content: of a file, or a section of it.
        path: of the file, for messages.

    Raises:
        ValueError: it isn't a mapping of names to lists of values.
    """
    given = OmegaConf.to_container(content[EACH]) if OmegaConf.is_config(content.get(EACH)) else content.get(EACH, {})
    if not isinstance(given, dict) or not all(isinstance(values, list) and values for values in given.values()):
        raise ValueError(f"{path}: each is {given!r}, but must be a mapping of names to lists, {{task: [rte, cola]}}")
    return {str(name): values for name, values in given.items()}


def combinations(
    content: DictConfig, path: Path, given: Mapping[str, str] | None = None, first: bool = False
) -> Iterator[DictConfig]:
    """The content once for each combination, with the names' values above the sections and without `each`.

    Args:
        given: values of flags, several with commas, which take the place of the file's.
        first: the first value of each name alone, unless a flag says which.

    Raises:
        ValueError: see `names_of`.
    """
    names = {name: values[:1] if first else values for name, values in names_of(content, path).items()}
    given = given or {}
    names |= {name: [word.strip() for word in given[name].split(",")] for name in names if name in given}
    for values in itertools.product(*names.values()):
        one = content.copy()
        one.pop(EACH, None)
        for name, value in zip(names, values, strict=True):
            one[name] = value
        yield one


def of_section(content: DictConfig, section: str, path: Path, first: bool = False) -> Iterator[DictConfig]:
    """The content once for each combination of a section's own `each`, in which the section has none.

    Args:
        first: as in `combinations`.

    Raises:
        ValueError: see `names_of`.
    """
    part = content.get(section)
    if not isinstance(part, DictConfig) or EACH not in part:
        yield content
        return
    outer = content.copy()
    outer[EACH] = part[EACH]
    outer[section].pop(EACH)
    yield from combinations(outer, path, first=first)


def all_names(content: DictConfig, section: str, path: Path) -> list[str]:
    """The names of a file and those of one of its sections.

    Raises:
        ValueError: see `names_of`.
    """
    part = content.get(section)
    return [*names_of(content, path), *(names_of(part, path) if isinstance(part, DictConfig) else ())]


@dataclass(frozen=True)
class Folders:
    """Which combination of `each` a comparison's folder belongs to: the table of a second one would replace its.

    Attributes:
        path: of the file.
    """

    path: Path
    _given: dict[tuple[str, Path], tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)

    def give(self, section: str, settings: Any, values: Mapping[str, Any]) -> None:
        """A comparison has the folder `settings.out`.

        Args:
            values: of the names in its combination.

        Raises:
            ValueError: one of the same section with other settings has it.
        """
        there, others = self._given.setdefault((section, settings.out), (settings, values))
        if settings != there:
            missing = " and ".join(f"${{{name}}}" for name in values if values[name] != others[name])
            said = f"{self.path}: combinations of each have one folder for {section}, {settings.out}"
            raise ValueError(f"{said}; put {missing} into out")
