"""The examples of a task's split, from a folder, a file or the hub.

task = with_labels(find_task("rte"), "data/RTE")
examples = read_split(task, "data/RTE", "train")
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attn_reg_plugin.files import find_text, names_in, reason_of
from attn_reg_plugin.labelled.examples import ChoiceExample, Example, TaggedSentence, TextExample
from attn_reg_plugin.labelled.rows import Row, read_rows
from attn_reg_plugin.labelled.task_table import (
    CLASSIFICATION,
    HUB_SPLITS,
    MULTIPLE_CHOICE,
    REGRESSION,
    TAGGING,
    Hub,
    LabelledTask,
)

logger = logging.getLogger(__name__)

#: a source that is not a folder: `hub`, `hub:PATH` or `hub:PATH:NAME`
HUB = "hub"
#: the hub's label where a test set has none
NO_LABEL = -1


def labels_needed(split: str) -> bool:
    """Tell whether a split must have labels: all but test sets."""
    return not split.startswith("test")


def is_hub(source: str | Path) -> bool:
    """Tell whether a source names the hub."""
    return str(source) == HUB or str(source).startswith(f"{HUB}:")


def read_split(task: LabelledTask, source: str | Path, split: str) -> list[Example]:
    """Read all examples of a split.

    Args:
        task: its labels must be known, see `with_labels`.
        source: a folder of the official files, or `hub`, `hub:PATH`, `hub:PATH:NAME`.
        split: fairseq's name, such as `train`, `valid1`, `test`.

    Raises:
        ValueError: anything that is wrong with the source, in one sentence with file and line.
    """
    if is_hub(source):
        place, rows = _hub_rows(task, str(source), split)
        return list(_examples(rows, task, f"{place}, row"))
    return read_file(task, find_split(task, Path(source), split), labels_needed(split))


def read_file(task: LabelledTask, path: Path, needed: bool = True) -> list[Example]:
    """Read the examples of one file; arguments and errors as of `read_rows`."""
    return list(_examples(read_rows(path, task, needed), task, f"{path}, line"))


#: within words of Persian and of India's languages
_JOINERS = {0x200C: None, 0x200D: None}


def with_labels(task: LabelledTask, source: str | Path) -> LabelledTask:
    """Give the task its label set: its own, or else that of a folder's training file, sorted (numbers by value).

    Raises:
        ValueError: the labels are to be collected from the hub, or the file cannot be read.
    """
    if task.labels is not None:
        return task
    if is_hub(source):
        raise ValueError(f"task {task.name} takes its labels from the training file, so it needs a folder, not the hub")
    path, found = find_split(task, Path(source), "train"), set[str]()
    for row in read_rows(path, task):
        for label in {*(row.labels or ())} - found:
            if not label or label != label.strip() or not label.translate(_JOINERS).isprintable():
                what = "has blanks around it, or a character that isn't one" if label else "is empty"
                raise ValueError(f"{path}, line {row.line}: the label {label!r} {what}")
        found.update(row.labels or ())
    if task.kind == CLASSIFICATION and len(found) < 2:
        raise ValueError(f"{path}: all examples have the label {found.pop()!r}, but there must be at least two")
    ordered = sorted(found, key=lambda label: (0, int(label), label) if label.isdecimal() else (1, 0, label))
    return dataclasses.replace(task, labels=tuple(ordered))


def _examples(rows: Iterable[Row], task: LabelledTask, place: str) -> Iterator[Example]:
    read = _label_reader(task)
    for row in rows:
        try:
            "".join(row.texts).encode()
        except (TypeError, UnicodeEncodeError):
            raise ValueError(f"{place} {row.line}: a text is missing, or holds half a character") from None
        labels = None
        if row.labels is not None:
            labels = tuple(read(text, f"{place} {line}") for text, line in zip(row.labels, row.lines, strict=True))
        if task.kind == TAGGING:
            yield TaggedSentence(row.line, row.texts, labels)
            continue
        label, (first, *rest) = None if labels is None else labels[0], row.texts
        if task.kind == MULTIPLE_CHOICE:
            yield ChoiceExample(row.line, first, tuple(rest), label)
        else:
            yield TextExample(row.line, first, rest[0] if rest else None, label)


def _label_reader(task: LabelledTask) -> Callable[[str, str], Any]:
    """Make a function of a label as it is written, and its place: the index of the class, or the value.

    The function raises a ValueError where the label is not in the set, or no finite number inside the task's bounds.
    """
    if task.kind != REGRESSION and task.labels is None:
        raise ValueError(f"task {task.name} takes its labels from the training file: call with_labels first")
    indices = {label: index for index, label in enumerate(task.labels or ())}
    indices = {alias: indices[label] for alias, label in task.aliases.items()} | indices
    low, high = task.bounds or (-math.inf, math.inf)

    def read_class(text: str, place: str) -> int:
        if text not in indices:
            raise ValueError(f"{place}: the label is {text!r}, but must be one of {', '.join(task.labels or ())}")
        return indices[text]

    def read_value(text: str, place: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            allowed = "a number" if task.bounds is None else f"a number from {low:g} to {high:g}"
            raise ValueError(f"{place}: the value is {text!r}, but must be {allowed}")
        return value

    return read_value if task.kind == REGRESSION else read_class


# -- the files of a folder --------------------------------------------------------------------------------------------


class MissingSplit(ValueError):
    """A folder without a file of a split."""


def find_split(task: LabelledTask, folder: Path, split: str) -> Path:
    """Find the file of a split.

    Raises:
        MissingSplit: nothing of that split is in the folder (lists what is there).
        ValueError: there is no such folder, or a split is there twice.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the one with the files of task {task.name}")
    names = task.files.get(split, (f"{split}.{task.format}",))
    instead = task.files["test"] if split == "valid" and task.valid_is_test else ()
    for name in (*names, *instead):
        whole = [find_text(folder, name)] if "*" not in name else [*folder.glob(name), *folder.glob(f"{name}.gz")]
        found = sorted(path for path in whole if path is not None)
        if len(found) > 1:
            raise ValueError(f"{folder} has {len(found)} files {name}: {', '.join(path.name for path in found)}")
        if found and name in instead:
            logger.info(f"{folder} has no validation set; as in the papers, {found[0].name} is taken for it")
        if found:
            return found[0]
    raise MissingSplit(
        f"{folder} has no {' and no '.join(names)} (plain or .gz) for the split {split!r} of task {task.name}; it has: "
        f"{names_in(folder)}"
    )


# -- the hub ----------------------------------------------------------------------------------------------------------


def _hub_rows(task: LabelledTask, source: str, split: str) -> tuple[str, list[Row]]:
    """Read a split through the `datasets` library: how messages name it, and its rows.

    Raises:
        ValueError: the hub does not have the task, it cannot be loaded, or a column or a label is missing.
    """
    path, _, name = source.removeprefix(HUB).removeprefix(":").partition(":")
    hub = dataclasses.replace(task.hub or Hub(path), path=path, name=name or None) if path else task.hub
    if hub is None:
        raise ValueError(f"task {task.name} is not read from the hub; give a folder")
    name, needed = hub.splits.get(split, HUB_SPLITS.get(split, split)), labels_needed(split)
    place = " ".join(part for part in (hub.path, hub.name, name) if part)
    try:
        import datasets

        data = datasets.load_dataset(hub.path, hub.name, split=name)
    except Exception as error:
        raise ValueError(
            f"{place} could not be read through the datasets library ({reason_of(error)}): give a folder instead"
        ) from error
    if split == "valid" and name == HUB_SPLITS["test"]:
        logger.info(f"{hub.path} has no validation set; as in the papers, {name} is taken for it")
    *columns, label = (hub.columns.get(name, name) for name in (*task.text, task.label))
    for column in (*columns, label) if needed else columns:
        if column not in data.column_names:
            there = ", ".join(data.column_names)
            raise ValueError(f"{place} has no column {column!r} for task {task.name}; it has: {there}")
    feature = data.features.get(label)
    names, rows = getattr(getattr(feature, "feature", feature), "names", None), []
    known = {*(task.labels or ()), *task.aliases}
    written = not names and label in data.column_names and _are_labels(data[label], known)
    if not names or not (task.kind == TAGGING or known.issuperset(names)):
        names = task.labels or ()  # numbers are in the official order, unless the data set's names are the task's
    is_label = (task.kind == REGRESSION and needed) or (written and str(NO_LABEL) in known)
    for number, row in enumerate(data, start=1):
        where, given, texts = f"{place}, row {number}", row.get(label), tuple(row[name] for name in columns)
        texts = tuple(texts[0] or ()) if task.kind == TAGGING else texts
        labels = None
        if given not in (None, "") and (given != NO_LABEL or is_label):
            given = given if task.kind == TAGGING else [given]
            labels = tuple(_as_written(one, task, None if written else names, where) for one in given)
        elif needed:
            raise ValueError(f"{where}: there is no label, and training and validation need one")
        if labels is not None and task.kind == TAGGING and len(texts) != len(labels):
            raise ValueError(f"{where}: {len(texts)} words, but {len(labels)} labels")
        rows.append(Row(number, texts, labels, [number] * len(labels or ())))
    return place, rows


def _whole(label: Any) -> Any:
    """A whole number as one: beside a missing label it is a float."""
    return int(label) if isinstance(label, float) and label.is_integer() else label


def _are_labels(column: Iterable[Any], known: set[str]) -> bool:
    """Whether the numbers of a column are labels themselves, and not places among them: all of them, or none."""
    given = (one for label in column for one in (label if isinstance(label, list) else [label]))
    return all(str(_whole(one)) in known for one in given if one not in (None, "", NO_LABEL))


def _as_written(label: Any, task: LabelledTask, names: Sequence[str] | None, place: str) -> str:
    """Give a label of the hub as a file has it: itself, or the name at its place."""
    if task.kind == REGRESSION or isinstance(label, str):
        return str(label)
    label = _whole(label)
    if not isinstance(label, int):
        raise ValueError(f"{place}: the label is {label!r}, but must be a class")
    if names is None:
        return str(label)
    if not 0 <= label < len(names):
        raise ValueError(f"{place}: the label is {label}, but task {task.name} has {len(names)} labels")
    return names[label]
