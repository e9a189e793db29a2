"""The same tasks through the `datasets` library."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attn_reg_plugin.labelled.columns import example_of
from attn_reg_plugin.labelled.examples import Example, TaggedSentence
from attn_reg_plugin.labelled.labels import LabelReader
from attn_reg_plugin.labelled.task_table import HUB_SPLITS, REGRESSION, TAGGING, Hub, LabelledTask

logger = logging.getLogger(__name__)

#: what the hub writes where a test set has no labels
NO_LABEL = -1


def read_hub(
    task: LabelledTask,
    split: str,
    labels_needed: bool = True,
    hub: Hub | None = None,
    load_dataset: Callable[..., Any] | None = None,
) -> Iterator[Example]:
    """The examples of a split from the hub.

    Args:
        task: its row says where the hub has it.
        split: fairseq's name of the split.
        labels_needed: refuse rows without a label.
        hub: in place of the row's.
        load_dataset: `datasets.load_dataset`, or a function in its place.

    Raises:
        ValueError: the hub does not have the task, or it cannot be loaded; a missing column or an unknown label.
    """
    hub = hub or task.hub
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
            raise ValueError(
                f"{place} has no column {columns[needed]!r} for task {task.name}; it has: "
                f"{', '.join(rows.column_names)}"
            )
    names, labels = _label_names(rows.features.get(columns[task.label])), LabelReader(task)
    for number, row in enumerate(rows, start=1):
        where = f"{place}, row {number}"
        if task.kind == TAGGING:
            yield _tagged(task, number, row, columns, names, labels, where)
            continue
        label = _label(task, row.get(columns[task.label]), names, labels, labels_needed, where)
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


def _label_names(feature: Any) -> list[str] | None:
    """The names of a label column's numbers, where the data set says them."""
    return getattr(getattr(feature, "feature", feature), "names", None)


def _label(
    task: LabelledTask, value: Any, names: list[str] | None, labels: LabelReader, labels_needed: bool, where: str
) -> int | float | None:
    """A row's label. A number is read by its name where the names are the task's, else in the official order."""
    value_of_regression = task.kind == REGRESSION and labels_needed
    if value is None or value == "" or (value == NO_LABEL and not value_of_regression):
        if labels_needed:
            raise ValueError(f"{where}: there is no label, and training and validation need one")
        return None
    if task.kind == REGRESSION:
        return labels.read(str(value), where)
    if isinstance(value, str):
        return labels.read(value, where)
    if names and 0 <= value < len(names) and all(name in labels.indices for name in names):
        return labels.read(names[value], where)
    if not 0 <= value < len(task.labels or ()):
        raise ValueError(f"{where}: the label is {value}, but task {task.name} has {len(task.labels or ())} labels")
    return int(value)


def _tagged(
    task: LabelledTask,
    number: int,
    row: Mapping[str, Any],
    columns: Mapping[str, str],
    names: list[str] | None,
    labels: LabelReader,
    where: str,
) -> TaggedSentence:
    words, tags = row[columns[task.text[0]]], row.get(columns[task.label])
    if tags is None:
        raise ValueError(f"{where}: no column {columns[task.label]!r} with the labels of task {task.name}")
    if len(words) != len(tags):
        raise ValueError(f"{where}: {len(words)} words, but {len(tags)} labels")
    written = [tag if isinstance(tag, str) else (names or task.labels)[tag] for tag in tags]
    return TaggedSentence(number, tuple(words), tuple(int(labels.read(tag, where)) for tag in written))
