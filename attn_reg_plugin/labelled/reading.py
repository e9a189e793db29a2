"""One way in: the examples of a task's split, from a folder, a file or the hub.

task = with_labels(find_task("rte"), "data/RTE")
examples = read_split(task, "data/RTE", "train")
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attn_reg_plugin.files import find_text, read_lines
from attn_reg_plugin.labelled.conll import read_tagged, read_words
from attn_reg_plugin.labelled.examples import Example, TaggedSentence, TextExample
from attn_reg_plugin.labelled.tables import LabelReader, example_of, label_of, read_rows, read_table
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, HUB_SPLITS, REGRESSION, TAGGING, Hub, LabelledTask

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


def read_split(
    task: LabelledTask, source: str | Path, split: str, load_dataset: Callable[..., Any] | None = None
) -> list[Example]:
    """Read all examples of a split.

    Args:
        task: its labels must be known, see `with_labels`.
        source: a folder of the official files, or `hub`, `hub:PATH`, `hub:PATH:NAME`.
        split: fairseq's name, such as `train`, `valid`, `valid1`, `test`.
        load_dataset: used in place of `datasets.load_dataset`.

    Raises:
        ValueError: anything that is wrong with the source, in one sentence with file and line.
    """
    if is_hub(source):
        return list(_read_hub(task, str(source), split, load_dataset))
    return list(read_file(task, find_split(task, Path(source), split), labels_needed(split)))


def read_file(task: LabelledTask, path: Path, needed: bool = True, ignored: bool = False) -> Iterator[Example]:
    """Read the examples of one file, or of a folder of documents.

    Args:
        task: says how to read it.
        path: plain or `.gz`.
        needed: refuse a file without labels.
        ignored: read no label of the file, whatever it holds.

    Raises:
        ValueError: see `read_table`, `read_tagged`, `_read_documents`.
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        return _read_documents(path, task)
    if task.kind == TAGGING:
        return read_tagged(path, task, ignored)
    return read_table(path, task, needed, ignored)


def sample_of(examples: Sequence[Example], count: int, seed: int = 1) -> list[Example]:
    """Draw that many of the examples at random, in their order; all if there aren't more.

    Files may be sorted by label or by genre, so the first ones would not represent all.
    """
    chosen = random.Random(seed).sample(range(len(examples)), min(count, len(examples)))
    return [examples[index] for index in sorted(chosen)]


def with_labels(task: LabelledTask, source: str | Path, split: str = "train") -> LabelledTask:
    """Give the task its label set: its own, or else that of a split of a folder, sorted (numbers by value).

    Raises:
        ValueError: the labels are to be collected from the hub, or the split cannot be read.
    """
    if task.labels is not None:
        return task
    if is_hub(source):
        raise ValueError(f"task {task.name} takes its labels from the training file, so it needs a folder, not the hub")
    path = find_split(task, Path(source), split)
    if task.kind == TAGGING:
        found = {label for sentence in read_words(path, task) for _, _, label in sentence}
    else:
        found = set()
        for line, row in read_rows(path, task):
            found.add(label_of(path, line, task, row))
            if "" in found:
                raise ValueError(f"{path}, line {line}: the label is empty")
    ordered = sorted(found, key=lambda label: (0, int(label), label) if label.isdecimal() else (1, 0, label))
    return dataclasses.replace(task, labels=tuple(ordered))


# -- the files of a folder --------------------------------------------------------------------------------------------


def find_split(task: LabelledTask, folder: Path, split: str) -> Path:
    """Find the file of a split, or the folder of its documents.

    Args:
        folder: the task's folder.
        split: fairseq's name, such as `train`, `valid`, `valid1`, `test`.

    Raises:
        ValueError: there is no such folder, or nothing of that split in it (lists what is there).
    """
    if not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist; give the one with the files of task {task.name}")
    found = _look_for(task, folder, split)
    if found is None and split == "valid" and task.valid_is_test:
        found = _look_for(task, folder, "test")
        if found is not None:
            logger.info(f"{folder} has no validation set; as in the papers, {found.name} is taken for it")
    if found is not None:
        return found
    there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(
        f"{folder} has no {' and no '.join(_names(task, split))} (plain or .gz) for the split {split!r} of task "
        f"{task.name}; it has: {there}"
    )


def _names(task: LabelledTask, split: str) -> tuple[str, ...]:
    return task.files.get(split, (f"{split}.{task.format}",))


def _look_for(task: LabelledTask, folder: Path, split: str) -> Path | None:
    labels = task.labels or () if task.kind == CLASSIFICATION and len(task.text) == 1 else ()
    if any((folder / split / label).is_dir() for label in labels):
        return folder / split
    for name in _names(task, split):
        if "*" in name:
            found = sorted([*folder.glob(name), *folder.glob(f"{name}.gz")])
            if len(found) > 1:
                raise ValueError(f"{folder} has {len(found)} files {name}: {', '.join(path.name for path in found)}")
        else:
            found = [path for path in [find_text(folder, name)] if path is not None]
        if found:
            return found[0]
    return None


def _read_documents(folder: Path, task: LabelledTask) -> Iterator[TextExample]:
    """Read the documents `LABEL/*.txt` of a folder, as the IMDB reviews come: label by label, each by name.

    Line breaks become spaces.

    Raises:
        ValueError: a label's folder is missing or empty; a document is empty or not UTF-8.
    """
    number = 0
    for index, label in enumerate(task.labels or ()):
        if not (folder / label).is_dir():
            raise ValueError(f"{folder} has no folder {label!r} for a label of task {task.name}")
        paths = sorted([*(folder / label).glob("*.txt"), *(folder / label).glob("*.txt.gz")])
        if not paths:
            raise ValueError(f"{folder / label} has no document (*.txt or *.txt.gz)")
        for path in paths:
            number += 1
            text = " ".join(read_lines(path))
            if not text.strip():
                raise ValueError(f"{path}, line 1: the document is empty")
            yield TextExample(number, text, None, index)


# -- the hub ----------------------------------------------------------------------------------------------------------


def _read_hub(
    task: LabelledTask, source: str, split: str, load_dataset: Callable[..., Any] | None
) -> Iterator[Example]:
    """Read the examples of a split through the `datasets` library.

    Raises:
        ValueError: the hub does not have the task, or it cannot be loaded; a missing column or an unknown label.
    """
    path, _, name = source.removeprefix(HUB).removeprefix(":").partition(":")
    hub = dataclasses.replace(task.hub or Hub(path), path=path, name=name or None) if path else task.hub
    if hub is None:
        raise ValueError(f"task {task.name} is not read from the hub; give a folder")
    name = hub.splits.get(split, HUB_SPLITS.get(split, split))
    place = " ".join(part for part in (hub.path, hub.name, name) if part)
    rows = _load(hub, name, place, load_dataset)
    if split == "valid" and name == HUB_SPLITS["test"]:
        logger.info(f"{hub.path} has no validation set; as in the papers, {name} is taken for it")
    columns = {column: hub.columns.get(column, column) for column in (*task.text, task.label, *task.groups)}
    for needed in task.text:
        if columns[needed] not in rows.column_names:
            there = ", ".join(rows.column_names)
            raise ValueError(f"{place} has no column {columns[needed]!r} for task {task.name}; it has: {there}")
    feature = rows.features.get(columns[task.label])
    names, labels = getattr(getattr(feature, "feature", feature), "names", None), LabelReader(task)
    for number, row in enumerate(rows, start=1):
        where = f"{place}, row {number}"
        if task.kind == TAGGING:
            words, tags = row[columns[task.text[0]]], row.get(columns[task.label])
            yield TaggedSentence(number, tuple(words), _tags(words, tags, names, labels, where))
            continue
        label = _hub_label(row.get(columns[task.label]), names, labels, labels_needed(split), where)
        yield example_of(task, number, {key: row.get(column, "") for key, column in columns.items()}, label)


def _load(hub: Hub, split: str, place: str, load_dataset: Callable[..., Any] | None) -> Any:
    if load_dataset is None:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ValueError("reading from the hub needs the datasets library: pip install datasets") from None
    try:
        return load_dataset(hub.path, hub.name, split=split)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{place} could not be read through the datasets library ({type(error).__name__}: {reason}): give a "
            "folder instead"
        ) from error


def _hub_label(
    value: Any, names: Sequence[str] | None, labels: LabelReader, needed: bool, where: str
) -> int | float | None:
    """Read a row's label. A number is read by its name where the names are the task's, else in the official order."""
    task = labels.task
    if value is None or value == "" or (value == NO_LABEL and not (task.kind == REGRESSION and needed)):
        if needed:
            raise ValueError(f"{where}: there is no label, and training and validation need one")
        return None
    if task.kind == REGRESSION or isinstance(value, str):
        return labels.read(str(value), where)
    if names and 0 <= value < len(names) and all(name in labels.indices for name in names):
        return labels.read(names[value], where)
    if not 0 <= value < len(task.labels or ()):
        raise ValueError(f"{where}: the label is {value}, but task {task.name} has {len(task.labels or ())} labels")
    return int(value)


def _tags(
    words: Sequence[str], tags: Sequence[Any] | None, names: Sequence[str] | None, labels: LabelReader, where: str
) -> tuple[int, ...]:
    if tags is None:
        raise ValueError(f"{where}: no column with the labels of task {labels.task.name}")
    if len(words) != len(tags):
        raise ValueError(f"{where}: {len(words)} words, but {len(tags)} labels")
    written = [tag if isinstance(tag, str) else (names or labels.task.labels or ())[tag] for tag in tags]
    return tuple(int(labels.read(tag, where)) for tag in written)
