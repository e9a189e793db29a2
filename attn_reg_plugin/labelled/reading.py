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

from attn_reg_plugin.files import find_text
from attn_reg_plugin.labelled.columns import read_rows, read_table
from attn_reg_plugin.labelled.conll import read_tagged, read_words
from attn_reg_plugin.labelled.examples import Example
from attn_reg_plugin.labelled.folders import is_document_folder, read_documents
from attn_reg_plugin.labelled.hub import read_hub
from attn_reg_plugin.labelled.task_table import TAGGING, Hub, LabelledTask

logger = logging.getLogger(__name__)

#: a source that is not a folder: `hub`, `hub:PATH` or `hub:PATH:NAME`
HUB = "hub"


def labels_needed(split: str) -> bool:
    """Whether a split must have labels: all but test sets."""
    return not split.startswith("test")


def find_split(task: LabelledTask, folder: Path, split: str) -> Path:
    """The file of a split, or the folder of its documents.

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
    names = _names(task, split)
    there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(
        f"{folder} has no {' and no '.join(names)} (plain or .gz) for the split {split!r} of task {task.name}; it "
        f"has: {there}"
    )


def _names(task: LabelledTask, split: str) -> tuple[str, ...]:
    return task.files.get(split, (f"{split}.{task.format}",))


def _look_for(task: LabelledTask, folder: Path, split: str) -> Path | None:
    if is_document_folder(folder / split, task):
        return folder / split
    for name in _names(task, split):
        if "*" in name:
            found = sorted([*folder.glob(name), *folder.glob(f"{name}.gz")])
            if len(found) > 1:
                raise ValueError(f"{folder} has {len(found)} files {name}: {', '.join(path.name for path in found)}")
        else:
            path = find_text(folder, name)
            found = [] if path is None else [path]
        if found:
            return found[0]
    return None


def read_file(task: LabelledTask, path: Path, needed: bool = True, ignored: bool = False) -> Iterator[Example]:
    """The examples of one file, or of a folder of documents.

    Args:
        task: says how to read it.
        path: plain or `.gz`.
        needed: refuse a file without labels.
        ignored: read no label of the file, whatever it holds.

    Raises:
        ValueError: see `read_table`, `read_tagged`, `read_documents`.
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        return read_documents(path, task)
    if task.kind == TAGGING:
        return read_tagged(path, task, ignored)
    return read_table(path, task, needed, ignored)


def read_split(
    task: LabelledTask, source: str | Path, split: str, load_dataset: Callable[..., Any] | None = None
) -> list[Example]:
    """All examples of a split.

    Args:
        task: its labels must be known, see `with_labels`.
        source: a folder of the official files, or `hub`, `hub:PATH`, `hub:PATH:NAME`.
        split: fairseq's name, such as `train`, `valid`, `valid1`, `test`; a path of a file is read as it is.
        load_dataset: used in place of `datasets.load_dataset`.

    Raises:
        ValueError: anything that is wrong with the source, in one sentence with file and line.
    """
    if is_hub(source):
        return list(read_hub(task, split, labels_needed(split), _hub(task, str(source)), load_dataset))
    return list(read_file(task, find_split(task, Path(source), split), labels_needed(split)))


def sample_of(examples: Sequence[Example], count: int, seed: int = 1) -> list[Example]:
    """That many of the examples, drawn at random, in their order; all if there aren't more.

    Files may be sorted by label or by genre, so the first ones would not represent all.
    """
    chosen = random.Random(seed).sample(range(len(examples)), min(count, len(examples)))
    return [examples[index] for index in sorted(chosen)]


def with_labels(task: LabelledTask, source: str | Path, split: str = "train") -> LabelledTask:
    """The task with its label set: its own, or else that of a split of a folder, sorted (numbers by value).

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
        rows = read_rows(path, task)
        found = set()
        for line, row in rows:
            found.add(_label_column(path, task, row))
            if "" in found:
                raise ValueError(f"{path}, line {line}: the label is empty")
    return dataclasses.replace(task, labels=tuple(sorted(found, key=_sort_key)))


def is_hub(source: str | Path) -> bool:
    """Whether a source names the hub."""
    return str(source) == HUB or str(source).startswith(f"{HUB}:")


def _hub(task: LabelledTask, source: str) -> Hub | None:
    path, _, name = source.removeprefix(HUB).removeprefix(":").partition(":")
    if not path:
        return task.hub
    return dataclasses.replace(task.hub or Hub(path), path=path, name=name or None)


def _label_column(path: Path, task: LabelledTask, row: dict[str, str]) -> str:
    if task.label not in row:
        raise ValueError(
            f"{path}, line 1: no column {task.label!r} with the labels of task {task.name}; the columns are: "
            f"{', '.join(row)}"
        )
    return row[task.label]


def _sort_key(label: str) -> tuple[int, int, str]:
    return (0, int(label), label) if label.isdecimal() else (1, 0, label)
