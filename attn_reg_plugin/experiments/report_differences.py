"""The paired differences of a report, computed from the runs' folders: with 95 % intervals, as comparisons have them.

What the draws need is in the folder of a run: of encoders `predictions/`, of translations `translations/` and the
references of the data folder that it was trained on, where that is still there. Else only seeds are drawn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.data_folder import DataFolder, raw_lines
from attn_reg_plugin.experiments.differences import Difference, paired
from attn_reg_plugin.experiments.example_scores import Examples, of_predictions, of_translations
from attn_reg_plugin.experiments.predicted import ALL, files_of_test, labels_in, read_predictions
from attn_reg_plugin.experiments.report_logs import TRANSLATION
from attn_reg_plugin.files import read_json
from attn_reg_plugin.labelled import TASKS, LabelledTask

#: how much of a log is looked through for its configuration
_HEAD = 200_000
_DATA = re.compile(r"'data': '([^']+)'")


@dataclass(frozen=True)
class Scored:
    """A run as `differences.py` looks at it: its scores, and those that are functions of its examples."""

    scores: Mapping[str, float]
    by_example: Mapping[str, Examples] = field(default_factory=dict)

    def figures(self) -> dict[str, Mapping[str, float]]:
        """The scores; a report tells subsets apart by their names."""
        return {"": self.scores}

    def examples(self) -> dict[str, Mapping[str, Examples]]:
        """Those as functions of the examples."""
        return {"": self.by_example}


class Differences:
    """Reads what differences are drawn from, each folder once."""

    def __init__(self) -> None:
        self._examples: dict[Path, dict[str, Examples]] = {}
        self._data: dict[tuple[Path, str, str | None], DataFolder | None] = {}

    def of(self, pairs: Sequence[tuple[Any, Any]]) -> dict[str, tuple[list[float], Difference]]:
        """The differences of a method's runs to the baseline's, by score: of each pair that has it, and their mean.

        Args:
            pairs: of each seed the method's run and the baseline's, with `folder` and `figures.scores`.
        """
        having: dict[tuple[tuple[int, ...], int], list[str]] = {}
        for name in dict.fromkeys(name for ours, _ in pairs for name in ours.figures.scores):
            both = tuple(i for i, pair in enumerate(pairs) if all(name in run.figures.scores for run in pair))
            if both:  # scores of as many examples are drawn together
                examples = self._read(pairs[both[0]][0].folder)
                having.setdefault((both, len(examples[name]) if name in examples else 0), []).append(name)
        found = {}
        for (which, _), names in having.items():
            scored = [tuple(self._scored(run, names) for run in pairs[i]) for i in which]
            for name, difference in paired(scored)[""].items():  # type: ignore[arg-type]
                found[name] = ([ours.scores[name] - theirs.scores[name] for ours, theirs in scored], difference)
        return found

    def _scored(self, run: Any, names: Sequence[str]) -> Scored:
        return Scored({name: run.figures.scores[name] for name in names}, self._read(run.folder))

    def _read(self, folder: Path) -> dict[str, Examples]:
        if folder not in self._examples:
            try:
                self._examples[folder] = self._examples_of(folder)
            except (ValueError, OSError, ImportError, KeyError):  # what cannot be read is not drawn
                self._examples[folder] = {}
        return self._examples[folder]

    def _examples_of(self, folder: Path) -> dict[str, Examples]:
        """The scores of a run's folder as functions of its examples, by their names in a report."""
        if not (folder / "run.json").is_file():
            return {}
        settings = read_json(folder / "run.json")
        if settings.get("task") in TASKS:
            return _of_encoder(folder, str(settings["task"]))
        return self._of_translation(folder, settings)

    def _of_translation(self, folder: Path, settings: Mapping[str, Any]) -> dict[str, Examples]:
        beside = [folder.parent, *sorted(folder.parent.glob("*/")), *sorted(folder.parent.parent.glob("*/"))]
        digests = str(settings.get("data", "")), settings.get("references")
        opened = (self._opened(place, *digests) for place in [*_logged(folder), *beside])
        data = next((one for one in opened if one is not None), None)
        found: dict[str, Examples] = {}
        for subset in () if data is None else data.subsets:
            path = folder / "translations" / f"{subset}.{data.target}"
            if path.is_file():
                ending = "" if len(data.subsets) == 1 else f" {subset}"
                scores = of_translations(raw_lines(path), data.references(subset))
                found |= {f"{TRANSLATION[metric]}{ending}": one for metric, one in scores.items()}
        return found

    def _opened(self, place: Path, digest: str, references: str | None) -> DataFolder | None:
        """The data folder at a place, if it has these digests; earlier versions recorded none of the references."""
        key = place, digest, references
        if key not in self._data:
            data = None
            if (place / "bin").is_dir():
                try:
                    data = DataFolder.open(place)
                except (OSError, ValueError):
                    data = None
            same = data is not None and data.digest() == digest
            same = same and references in (None, data.digest_of_references())
            self._data[key] = data if same else None
        return self._data[key]


def _of_encoder(folder: Path, name: str) -> dict[str, Examples]:
    """Of every validation set that was predicted; those of further ones have its name."""
    result = read_json(folder / "result.json")
    if "evaluation" in result:
        return _of_evaluation(folder, TASKS[name], result["evaluation"])
    metrics, found = list(result["training"]["scores"]), {}
    for path in sorted((folder / "predictions").glob("*.tsv")):
        task, subset = TASKS[name], path.stem
        if task.labels is None:
            task = dataclasses.replace(task, labels=labels_in(path))
        scores = of_predictions(task.kind, metrics, *read_predictions(path, task))
        found |= {metric if subset == "valid" else f"{metric} {subset}": one for metric, one in scores.items()}
    return found


def _of_evaluation(folder: Path, test: LabelledTask, evaluation: Mapping[str, Any]) -> dict[str, Examples]:
    """Of all examples of a test of `attn-reg evaluate`, and of each group, by the names in its table."""
    found = {}
    for subset, path in files_of_test(folder, evaluation["groups"]).items():
        if path.is_file():
            scores = of_predictions(test.kind, list(evaluation["figures"][subset]), *read_predictions(path, test))
            found |= {name if subset == ALL else f"{name} {subset}": one for name, one in scores.items()}
    return found


def _logged(folder: Path) -> Iterator[Path]:
    """The data folder that a run's log names."""
    log = folder / "train.log"
    if log.is_file():
        with log.open(encoding="utf-8", errors="replace") as file:
            yield from (Path(found[1]).parent for found in _DATA.finditer(file.read(_HEAD)))
