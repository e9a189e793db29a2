"""All runs of a fine-tuning on data of another distribution: a table with a row per method.

What is measured of a run is kept in a folder of its own beside the table, with its decisions, example by example. It is
measured again when its checkpoint or the test's data have changed, and else is not.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from attn_reg_plugin.checkpoints import find_checkpoint
from attn_reg_plugin.experiments.comparison import RESULTS_LOCK, publish, seeds_of
from attn_reg_plugin.experiments.differences import differences
from attn_reg_plugin.experiments.example_scores import Examples, of_predictions
from attn_reg_plugin.experiments.labelled_runs import digest_of
from attn_reg_plugin.experiments.methods import Method, known_methods
from attn_reg_plugin.experiments.predicted import ALL, files_of_test, read_predictions, write_decisions
from attn_reg_plugin.experiments.report_folders import folders_in, named, titles_in
from attn_reg_plugin.experiments.robustness import folding, predict, read_test
from attn_reg_plugin.experiments.run_settings import differing, flags_of, values_of
from attn_reg_plugin.experiments.table import (
    DIFFERENCE,
    Differences,
    Figure,
    difference_text,
    figure_of,
    statistics_notes,
)
from attn_reg_plugin.experiments.trained import load_trained
from attn_reg_plugin.experiments.training_part import PART_FLAGS
from attn_reg_plugin.files import alone_in, read_json, write_json
from attn_reg_plugin.labelled import LabelledTask, find_split, find_task, is_hub
from attn_reg_plugin.labelled.metrics import SCORES
from attn_reg_plugin.terminal import say


@dataclass(frozen=True)
class TestedRun:
    """A finished run of `attn-reg finetune`, and where what is measured of it stands.

    Attributes:
        method, seed: of the training.
        trained: the run's folder.
        settings: of the training, as `run.json` has them.
        folder: of what is measured.
        test: the test's row of the table of tasks.
    """

    method: Method
    seed: int
    trained: Path
    settings: Mapping[str, Any]
    folder: Path
    test: LabelledTask

    def shared_settings(self) -> dict[str, Any]:
        """The settings that runs which differ in the seed alone have in common."""
        others = {name: value for name, value in self.settings.items() if name not in ("seed", "flags")}
        return {**others, **flags_of(str(self.settings.get("flags", "")))}

    def result(self) -> dict[str, Any]:
        """What is measured; empty if nothing is yet."""
        path = self.folder / "result.json"
        return read_json(path).get("evaluation", {}) if path.is_file() else {}

    def figures(self) -> dict[str, dict[str, float]]:
        """The metrics in percent, of all examples and of each group."""
        return self.result()["figures"]

    def examples(self) -> dict[str, dict[str, Examples]]:
        """The metrics as functions of the examples, of all and of each group."""
        return {
            subset: of_predictions(self.test.kind, _metrics(self.test, subset), *both)
            for subset, both in self._decisions(self.result()["groups"]).items()
        }

    def _decisions(self, groups: Sequence[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Decisions and gold labels that are kept; of a group also those of each gold label alone."""
        found = {}
        for subset, path in files_of_test(self.folder, groups).items():
            if not path.is_file():
                continue
            predicted, gold = found[subset] = read_predictions(path, self.test)
            for index, label in enumerate(self.test.labels or ()):
                if subset != ALL and (part := gold == index).any():
                    found[f"{subset}, {label}"] = predicted[part], gold[part]
        return found

    def measure(self, examples: Sequence[Any], data: str, split: str, batch_size: int, cpu: bool) -> bool:
        """Measure, unless that is done; True where it was.

        Args:
            examples: of the test.
            data: their digest.
            split: their name.
        """
        names = ("seed", "model", "flags")
        wanted = {"task": self.test.name, "data": data, "split": split, "trained_on": self.settings["task"]}
        wanted |= {"checkpoint": digest_of([find_checkpoint(self.trained)])}
        wanted |= {name: self.settings[name] for name in names if name in self.settings}
        path = self.folder / "run.json"
        if self.result() and path.is_file() and read_json(path) == wanted:
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        write_json(path, wanted)
        self._write(examples, predict(load_trained(self.trained, cpu), self.test, examples, batch_size))
        return False

    def _write(self, examples: Sequence[Any], predicted: np.ndarray) -> None:
        gold = np.array([example.label for example in examples])
        groups = np.array([example.groups[0] if example.groups else "" for example in examples])
        names = sorted(set(groups.tolist()) - {""})
        for subset, path in files_of_test(self.folder, names).items():
            inside = (groups == subset) | (subset == ALL)
            write_decisions(path, self.test, predicted[inside], gold[inside])
        scores = SCORES[self.test.kind]
        figures = {
            subset: {name: scores[name](*both) for name in _metrics(self.test, subset)}
            for subset, both in self._decisions(names).items()
        }
        shown = {title: figures[subset][name] for subset, name, title in columns(self.test, names)}
        content = {"examples": len(examples), "groups": names, "figures": figures, "scores": shown}
        write_json(self.folder / "result.json", {"evaluation": content})


def _metrics(test: LabelledTask, subset: str) -> tuple[str, ...]:
    return test.metrics if subset == ALL else ("accuracy",)


def columns(test: LabelledTask, groups: Sequence[str]) -> list[tuple[str, str, str]]:
    """What a table shows: subset, metric and title of each column."""
    whole = [(ALL, name, name) for name in test.metrics]
    return whole + [(group, "accuracy", f"accuracy {group}") for group in groups]


# -- which runs -------------------------------------------------------------------------------------------------------


def is_comparison(path: Path) -> bool:
    """Whether a folder holds runs of a comparison, and is none itself."""
    return path.is_dir() and not (path / "run.json").is_file() and bool(_inner(path))


def _inner(path: Path) -> list[Path]:
    return [folder for folder in folders_in(path) if (folder / "run.json").is_file()]


def find_runs(paths: Sequence[Path], test: LabelledTask, out: Path | None) -> tuple[list[TestedRun], Path, list[Path]]:
    """The finished runs in some folders, all of one task, data and pretrained model.

    Args:
        paths: runs of `attn-reg finetune`, or folders of its runs.
        out: folder of the table; None: that of the test in the folder of the runs.

    Returns:
        the runs, the folder of the table, and the runs that are not finished, which are left out.

    Raises:
        ValueError: a path without such runs, one that is named and not finished, no place for the table, a method and
            seed that come twice, runs that cannot be compared, or a model that does not fit the test.
    """
    folders, left_out = [], []
    for path in paths:
        inner = _inner(path) if is_comparison(path) else [path]
        finished = [folder for folder in inner if _is_finished(folder)]
        if not finished:
            raise ValueError(f"{path} is no finished run of attn-reg finetune, and no folder with such runs in it")
        folders += finished
        left_out += [folder for folder in inner if folder not in finished]
    parents = {folder.resolve().parent for folder in folders}
    if out is None and len(parents) > 1:
        raise ValueError("--out is missing: the runs lie in several folders, so say in which one the table is to be")
    place = out or folders[0].parent / test.name
    if place.is_file() or place.suffix == ".json":
        raise ValueError(f"--out is {place}, but the table of several runs is a folder")
    runs = [_tested(folder, place, test) for folder in folders]
    _check(runs, test)
    return runs, place, left_out


def _is_finished(folder: Path) -> bool:
    files = [folder / name for name in ("run.json", "result.json")]
    return all(path.is_file() for path in files) and "training" in read_json(files[1])


def _tested(folder: Path, out: Path, test: LabelledTask) -> TestedRun:
    settings = read_json(folder / "run.json")
    name, seed = named(folder.resolve().name)
    seed = settings.get("seed", seed)
    known = known_methods()
    title = titles_in(folder.parent).get(name) or (known[name].title if name in known else name)
    return TestedRun(Method(name, title, ()), seed, folder, settings, out / f"{name}-seed{seed}", test)


def _check(runs: Sequence[TestedRun], test: LabelledTask) -> None:
    first, places, of_method = runs[0], {}, {}
    flags = [f"--{name}" for name in PART_FLAGS if name != "train-sample-seed"]  # of a fraction every seed has its own
    for one in runs:
        try:
            folding(find_task(str(one.settings.get("task"))), test)
            find_checkpoint(one.trained)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{one.trained}: {error}") from None
        for name in ("task", "data", "model"):
            if one.settings.get(name) != first.settings.get(name):
                what = "pretrained model" if name == "model" else name
                raise ValueError(f"{first.trained} and {one.trained} differ in the {what}, so no table compares them")
        theirs, own = (values_of(shlex.split(str(run.settings.get("flags", "")))) for run in (first, one))
        if flag := next((flag for flag in flags if theirs.get(flag) != own.get(flag)), None):
            raise ValueError(f"{first.trained} and {one.trained} differ in {flag}, so no table compares them")
        alike = of_method.setdefault(one.method.name, one)
        if different := next(iter(differing(alike.shared_settings(), one.shared_settings())), None):
            raise ValueError(f"{alike.trained} and {one.trained} differ in {different}, so no row averages them")
        if one.folder in places:
            raise ValueError(f"{places[one.folder]} and {one.trained} are the same method and seed; give one of them")
        places[one.folder] = one.trained


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A method on a test: figures by subset and metric, and their differences to plain training."""

    method: str
    title: str
    seeds: int
    figures: dict[str, dict[str, Figure]]
    differences: Differences = field(default_factory=dict)


def evaluate_all(
    paths: Sequence[Path], test: str, source: str, split: str, out: Path | None, batch_size: int, cpu: bool
) -> int:
    """Measure what is not measured yet of some runs, and publish the table: 0, or 130 when interrupted.

    Args:
        paths, out: see `find_runs`.
        test, source, split: see `robustness.evaluate`.

    Raises:
        ValueError: see `find_runs`; or the test's data has no labels or cannot be read.
    """
    task, console = find_task(test), Console()
    runs, out, left_out = find_runs(paths, task, out)
    examples, data = read_test(task, source, split), _digest(task, source, split)
    for folder in left_out:
        say(console, f"{folder} is not finished, so it is left out")
    with alone_in(out, RESULTS_LOCK):
        for number, one in enumerate(runs, start=1):
            try:
                known = one.measure(examples, data, split, batch_size, cpu)
            except KeyboardInterrupt:
                console.print("interrupted; the same command goes on from the last run", highlight=False)
                return 130
            said = ", ".join(f"{name} {value:.2f}" for name, value in one.figures()[ALL].items())
            done = " (was done)" if known else ""
            console.print(f"{number}/{len(runs)} {one.method.title}, seed {one.seed}: {said}{done}", highlight=False)
        _publish(console, task, runs, out)
    return 0


def _digest(task: LabelledTask, source: str, split: str) -> str:
    """A digest of the test's data; of the hub, its name."""
    if is_hub(source):
        return source
    path = Path(source)
    return digest_of([path if path.is_file() else find_split(task, path, split)])


def _publish(console: Console, task: LabelledTask, runs: Sequence[TestedRun], out: Path) -> None:
    trained_on, found = str(runs[0].settings["task"]), differences(runs)
    methods = {one.method.name: one.method for one in reversed(runs)}  # of several titles the first one's
    names = dict.fromkeys(one.method.name for one in runs)
    rows = [_row(methods[name], runs, found.get(name, {})) for name in names]
    first = runs[0].result()
    notes = [f"trained on {trained_on}, tested on {task.name}, {first['examples']} examples, seeds {seeds_of(runs)}"]
    if len(find_task(trained_on).labels or ()) > len(task.labels or ()):
        notes.append("three labels are folded to two: neutral and contradiction are non-entailment")
    content = {"task": task.name, "pair": [trained_on, task.name], "methods": [asdict(row) for row in rows]}
    content["runs"] = {
        one.folder.name: {**read_json(one.folder / "run.json"), "reported": {"scores": one.figures()}} for one in runs
    }
    publish(out, console, cells(rows, task, first["groups"]), [*notes, *statistics_notes(rows)], content)
    say(console, f"table: {out / 'results.md'}")


def _row(method: Method, runs: Sequence[TestedRun], found: Differences) -> Row:
    figures = [one.figures() for one in runs if one.method.name == method.name]
    means = {
        subset: {name: figure_of([one[subset][name] for one in figures]) for name in names}
        for subset, names in figures[0].items()
    }
    return Row(method.name, method.title, len(figures), means, found)


def cells(rows: Sequence[Row], task: LabelledTask, groups: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts."""
    shown, compared = columns(task, groups), any(row.differences for row in rows)
    header = ["method"]
    for number, (_, _, title) in enumerate(shown):
        header += [title, *([DIFFERENCE.format(title)] if compared and not number else [])]
    body = []
    for row in rows:
        line = [row.title]
        for number, (subset, metric, _) in enumerate(shown):
            line.append(row.figures[subset][metric].text(2))
            line += [difference_text(row.differences, subset, metric, 2)] if compared and not number else []
        body.append([*line, str(row.seeds)])
    return [*header, "seeds"], body
