"""Readers of TSV and CSV files: GLUE, HANS, PAWS-X, IMDB, SWAG, or anything with named columns.

In TSV a quote is a character like any other (the official files are full of single ones), in CSV fields are quoted.
Files may be gzipped. Whatever is wrong is refused in one sentence with file and line.
"""

from __future__ import annotations

import csv
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attn_reg_plugin.files import read_lines
from attn_reg_plugin.labelled.examples import ChoiceExample, TextExample
from attn_reg_plugin.labelled.labels import LabelReader
from attn_reg_plugin.labelled.task_table import MULTIPLE_CHOICE, LabelledTask

logger = logging.getLogger(__name__)

Record = tuple[int, list[str]]


def read_records(path: Path, format: str) -> Iterator[Record]:
    """The lines of a TSV file or the records of a CSV file, split into fields; empty lines at the end are left out.

    Args:
        path: plain or `.gz`.
        format: `tsv` or `csv`.

    Yields:
        (line of the record's start, counted from 1; its fields)

    Raises:
        ValueError: not UTF-8, not a whole gzip file, or broken quotes.
    """
    split = _csv_records if format == "csv" else _tsv_records
    waiting: list[Record] = []
    for record in split(path):
        if record[1] in ([], [""]):
            waiting.append(record)
            continue
        yield from waiting
        waiting = []
        yield record


def _tsv_records(path: Path) -> Iterator[Record]:
    for number, line in enumerate(read_lines(path), start=1):
        yield number, line.split("\t")


def _csv_records(path: Path) -> Iterator[Record]:
    reader = csv.reader((f"{line}\n" for line in read_lines(path)), strict=True)
    number = 1
    try:
        for fields in reader:
            yield number, fields
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {number}: not CSV ({error})") from None


def read_rows(path: Path, task: LabelledTask) -> Iterator[tuple[int, dict[str, str]]]:
    """The records of a file by column name.

    A file whose first line does not name the text's columns has no header, where the task allows that.

    Raises:
        ValueError: an empty file, a missing text column, a column that stands twice, the wrong number of fields, or
            what `read_records` refuses.
    """
    records = read_records(path, task.format)
    first = next(records, None)
    if first is None:
        raise ValueError(f"{path}, line 1: the file is empty")
    columns = first[1]
    missing = [name for name in task.text if name not in columns]
    if missing and task.headerless:
        columns = list(task.headerless)
        yield first[0], _row(path, first, columns)
    elif missing:
        raise ValueError(
            f"{path}, line 1: no column {missing[0]!r} for task {task.name}; the columns are: {', '.join(columns)}"
        )
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


def _row(path: Path, record: Record, columns: Sequence[str]) -> dict[str, str]:
    number, fields = record
    if len(fields) != len(columns):
        raise ValueError(
            f"{path}, line {number}: {len(fields)} field{'s' * (len(fields) != 1)}, but the file's columns are "
            f"{len(columns)} ({', '.join(columns)})"
        )
    return dict(zip(columns, fields, strict=True))


def read_table(
    path: Path, task: LabelledTask, labels_needed: bool = True, labels_ignored: bool = False
) -> Iterator[TextExample] | Iterator[ChoiceExample]:
    """The examples of a TSV or CSV file.

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
        if not count:
            _check_label_column(path, task, row, labels_needed)
        count += 1
        written = None if labels_ignored else row.get(task.label)
        label = None if written is None else labels.read(written, f"{path}, line {line}")
        yield example_of(task, line, row, label)
    if not count:
        raise ValueError(f"{path}, line 2: the file has a header but no example")


def _check_label_column(path: Path, task: LabelledTask, row: Mapping[str, str], labels_needed: bool) -> None:
    if labels_needed and task.label not in row:
        raise ValueError(
            f"{path}, line 1: no column {task.label!r} with the labels of task {task.name}; the columns are: "
            f"{', '.join(row)}"
        )


def example_of(
    task: LabelledTask, line: int, row: Mapping[str, str], label: int | float | None
) -> TextExample | ChoiceExample:
    """The example of a row: its text columns, what results are grouped by, and its label as an index or value."""
    texts = [row[name] for name in task.text]
    if task.kind == MULTIPLE_CHOICE:
        return ChoiceExample(line, texts[0], tuple(texts[1:]), label)
    groups = tuple(row.get(name, "") for name in task.groups)
    return TextExample(line, texts[0], texts[1] if len(texts) > 1 else None, label, groups)
