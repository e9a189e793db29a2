"""Readers of rows with named columns: TSV, CSV and JSON lines; and of labels.

In TSV a quote is a character like any other (the official files are full of single ones), in CSV fields are quoted. A
line of a JSON file is an object. Files may be gzipped. Whatever is wrong is refused in one sentence with file and line,
which `datasets` and pandas, that read such files too, do not say.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_reg_plugin.files import read_lines
from attn_reg_plugin.labelled.examples import ChoiceExample, TextExample
from attn_reg_plugin.labelled.task_table import MULTIPLE_CHOICE, REGRESSION, LabelledTask

logger = logging.getLogger(__name__)

Record = tuple[int, list[str]]
_DIALECTS: dict[str, Any] = {"csv": {}, "tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}
_LONGEST_FIELD = 2**31 - 1


class LabelReader:
    """Reads the labels of one task.

    Raises:
        ValueError: the label set is still to be taken from the training file.
    """

    def __init__(self, task: LabelledTask) -> None:
        self.task = task
        if task.kind != REGRESSION and task.labels is None:
            raise ValueError(f"task {task.name} takes its labels from the training file: call with_labels first")
        self.indices = {label: index for index, label in enumerate(task.labels or ())}
        self.indices |= {
            alias: self.indices[label] for alias, label in task.aliases.items() if alias not in self.indices
        }

    def read(self, text: str, place: str) -> int | float:
        """Find the index of a class or tag, or the value of a regression.

        Args:
            text: as it is in the file.
            place: file and line, for the message.

        Raises:
            ValueError: not in the label set; not a finite number, or outside the task's bounds.
        """
        if self.task.kind == REGRESSION:
            return self._value(text, place)
        if text not in self.indices:
            raise ValueError(f"{place}: the label is {text!r}, but must be one of {', '.join(self.task.labels or ())}")
        return self.indices[text]

    def _value(self, text: str, place: str) -> float:
        low, high = self.task.bounds or (-math.inf, math.inf)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            allowed = "a number" if self.task.bounds is None else f"a number from {low:g} to {high:g}"
            raise ValueError(f"{place}: the value is {text!r}, but must be {allowed}")
        return value


def read_records(path: Path, format: str) -> Iterator[Record]:
    """Split the lines of a TSV or CSV file into fields; empty lines at the end are left out.

    Args:
        path: plain or `.gz`.
        format: `tsv` or `csv`.

    Yields:
        (line of the record's start, counted from 1; its fields)

    Raises:
        ValueError: not UTF-8, not a whole gzip file, or broken quotes.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader((f"{line}\n" for line in read_lines(path)), strict=True, **_DIALECTS[format])
    waiting: list[Record] = []
    number = 1
    try:
        for fields in reader:
            waiting.append((number, fields))
            if fields not in ([], [""]):
                yield from waiting
                waiting = []
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {number}: not {format.upper()} ({error})") from None


def read_rows(path: Path, task: LabelledTask) -> Iterator[tuple[int, dict[str, str]]]:
    """Read the rows of a file by column name.

    A file whose first line does not name the text's columns has no header, where the task allows that.

    Raises:
        ValueError: an empty file, a missing text column, a column that stands twice, the wrong number of fields, or
            what `read_records` refuses.
    """
    if task.format == "jsonl":
        yield from _json_rows(path, task)
        return
    records = read_records(path, task.format)
    first = next(records, None)
    if first is None:
        raise ValueError(f"{path}, line 1: the file is empty")
    columns = first[1]
    if task.headerless and not set(task.text) <= set(columns):
        columns = list(task.headerless)
        yield first[0], _row(path, first, columns)
    _check_columns(path, 1, task, columns)
    for name in columns:
        if columns.count(name) > 1 and name in (*task.text, task.label, *task.groups):
            raise ValueError(f"{path}, line 1: there are {columns.count(name)} columns {name!r}")
    skipped: list[int] = []
    for record in records:
        if task.skip_broken and len(record[1]) != len(columns):
            skipped.append(record[0])
            continue
        yield record[0], _row(path, record, columns)
    if skipped:
        logger.warning(
            f"{path}: {len(skipped)} rows without {len(columns)} fields were left out, the first in line {skipped[0]}"
        )


def _check_columns(path: Path, line: int, task: LabelledTask, columns: Sequence[str]) -> None:
    for name in task.text:
        if name not in columns:
            raise ValueError(
                f"{path}, line {line}: no column {name!r} for task {task.name}; the columns are: {', '.join(columns)}"
            )


def _row(path: Path, record: Record, columns: Sequence[str]) -> dict[str, str]:
    number, fields = record
    if len(fields) != len(columns):
        raise ValueError(
            f"{path}, line {number}: {len(fields)} field{'s' * (len(fields) != 1)}, but the file's columns are "
            f"{len(columns)} ({', '.join(columns)})"
        )
    return dict(zip(columns, fields, strict=True))


def _json_rows(path: Path, task: LabelledTask) -> Iterator[tuple[int, dict[str, str]]]:
    """Read a JSON object a line; numbers are read as they are written."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_int=str, parse_float=str)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object; each line must hold one")
        row = {name: value for name, value in row.items() if value is not None}
        _check_columns(path, number, task, list(row))
        for name in task.text:
            if not isinstance(row[name], str):
                raise ValueError(f"{path}, line {number}: {name!r} is {type(row[name]).__name__}, but must be text")
        yield number, {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}


def read_table(
    path: Path, task: LabelledTask, labels_needed: bool = True, labels_ignored: bool = False
) -> Iterator[TextExample] | Iterator[ChoiceExample]:
    """Read the examples of a TSV, CSV or JSON file.

    Args:
        path: plain or `.gz`.
        task: of kind classification, regression or multiple choice.
        labels_needed: refuse a file without the label column (test files have none).
        labels_ignored: look at no label; the examples have none.

    Raises:
        ValueError: no example at all, a missing label column, an unknown label, or what `read_rows` refuses.
    """
    count, labels = 0, LabelReader(task)
    if not labels_needed:  # a prediction's number is its row's
        task = dataclasses.replace(task, skip_broken=False)
    for line, row in read_rows(path, task):
        count += 1
        written = label_of(path, line, task, row) if labels_needed else row.get(task.label)
        label = None if written is None or labels_ignored else labels.read(written, f"{path}, line {line}")
        yield example_of(task, line, row, label)
    if not count:
        end = "line 1: the file has" if task.format == "jsonl" else "line 2: the file has a header but"
        raise ValueError(f"{path}, {end} no example")


def label_of(path: Path, line: int, task: LabelledTask, row: Mapping[str, str]) -> str:
    """Get the label that is written in a row."""
    if task.label not in row:
        line = line if task.format == "jsonl" else 1
        raise ValueError(
            f"{path}, line {line}: no column {task.label!r} with the labels of task {task.name}; the columns are: "
            f"{', '.join(row)}"
        )
    return row[task.label]


def example_of(
    task: LabelledTask, line: int, row: Mapping[str, str], label: int | float | None
) -> TextExample | ChoiceExample:
    """Make the example of a row: its text columns, what results are grouped by, and its label as an index or value."""
    texts = [row[name] for name in task.text]
    if task.kind == MULTIPLE_CHOICE:
        return ChoiceExample(line, texts[0], tuple(texts[1:]), label)
    groups = tuple(row.get(name, "") for name in task.groups)
    return TextExample(line, texts[0], texts[1] if len(texts) > 1 else None, label, groups)
