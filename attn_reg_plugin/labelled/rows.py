"""Rows of labelled files: TSV, CSV, JSON lines, CoNLL columns (WNUT-17, CoNLL-2003) and CoNLL-U.

In TSV a quote is a character like any other (the official files are full of single ones), in CSV fields are quoted. A
line of a JSON file is an object. CoNLL has a word a line, fields separated by a tab or by spaces, and an empty line
after each sentence; `-DOCSTART-` lines are skipped. CoNLL-U has ten fields separated by tabs and `#` comments; ranges
of multiword tokens (`3-4`) and empty nodes (`5.1`) are skipped, for their words have lines of their own.

Files may be gzipped. Whatever is wrong is refused in one sentence with file and line, which `datasets` and pandas, that
read such files too, do not say.
"""

import csv
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from attn_reg_plugin.files import read_lines
from attn_reg_plugin.labelled.task_table import TAGGING, LabelledTask

logger = logging.getLogger(__name__)

_DIALECTS: dict[str, Any] = {"csv": {}, "tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}
_LONGEST_FIELD = 2**31 - 1
_CONLLU_FIELDS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """An example as it is written.

    Attributes:
        line: its number in its file, counted from 1.
        texts: its texts, or the words of a sentence.
        labels: its label, or one a word; None where the file has none.
        lines: where each label stands.
    """

    line: int
    texts: tuple[str, ...]
    labels: tuple[str, ...] | None
    lines: Sequence[int]


def read_rows(path: Path, task: LabelledTask, needed: bool = True) -> Iterator[Row]:
    """Read the rows of a file.

    Args:
        path: plain or `.gz`.
        task: says how to read it.
        needed: refuse a file without labels; words always have theirs.

    Raises:
        ValueError: a file that is broken or has no example; the sentence names it and the line.
        FileNotFoundError: there is no such file.
    """
    if task.kind == TAGGING:
        return _sentences(path, task)
    return (_json_rows if task.format == "jsonl" else _table_rows)(path, task, needed)


def _row(path: Path, line: int, task: LabelledTask, values: dict[str, str], needed: bool) -> Row:
    """Make a row of values by column name."""
    if needed:
        _check_columns(path, line, task, values, (task.label,))
    label = (values[task.label],) if needed or values.get(task.label) else None
    return Row(line, tuple(values[name] for name in task.text), label, (line,))


def _check_columns(
    path: Path, line: int, task: LabelledTask, there: Sequence[str] | dict, names: Sequence[str]
) -> None:
    for name in names:
        if name not in there:
            which = f"{name!r} with the labels of" if name == task.label else f"{name!r} for"
            raise ValueError(
                f"{path}, line {line}: no column {which} task {task.name}; the columns are: {', '.join(there)}"
            )


# -- tables -----------------------------------------------------------------------------------------------------------


def read_records(path: Path, format: str) -> list[tuple[int, list[str]]]:
    """Read the records of a TSV or CSV file: the line of the start, from 1, and fields; no empty lines at the end.

    Raises:
        ValueError: not UTF-8, not a whole gzip file, or broken quotes.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader((f"{line}\n" for line in read_lines(path)), strict=True, **_DIALECTS[format])
    records, number = list[tuple[int, list[str]]](), 1
    try:
        for fields in reader:
            records.append((number, fields))
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {number}: not {format.upper()} ({error})") from None
    while records and records[-1][1] in ([], [""]):
        records.pop()
    return records


def _table_rows(path: Path, task: LabelledTask, needed: bool) -> Iterator[Row]:
    """Read a table with a header; where the task allows, one that does not name the text's columns has none."""
    records = read_records(path, task.format)
    if not records:
        raise ValueError(f"{path}, line 1: the file is empty")
    columns = records[0][1]
    if task.headerless and not set(task.text) <= set(columns):
        columns = list(task.headerless)
    else:
        records = records[1:]
    _check_columns(path, 1, task, columns, (*task.text, task.label) if needed else task.text)
    for name in columns:
        if columns.count(name) > 1 and name in (*task.text, task.label):
            raise ValueError(f"{path}, line 1: there are {columns.count(name)} columns {name!r}")
    if not records:
        raise ValueError(f"{path}, line 2: the file has a header but no example")
    skipped: list[int] = []
    for number, fields in records:
        if len(fields) == len(columns):
            yield _row(path, number, task, dict(zip(columns, fields, strict=True)), needed)
        elif task.skip_broken and needed:  # a prediction's number is its row's, so no row is left out of a test set
            skipped.append(number)
        else:
            raise ValueError(
                f"{path}, line {number}: {_fields(fields)}, but the file's columns are {len(columns)} "
                f"({', '.join(columns)})"
            )
    if skipped:
        logger.warning(
            f"{path}: {len(skipped)} rows without {len(columns)} fields were left out, the first in line {skipped[0]}"
        )


def _fields(fields: list[str]) -> str:
    return f"{len(fields)} field{'s' * (len(fields) != 1)}"


def _json_rows(path: Path, task: LabelledTask, needed: bool) -> Iterator[Row]:
    """Read a JSON object a line; numbers are read as they are written."""
    found = False
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
        _check_columns(path, number, task, row, task.text)
        for name in task.text:
            if not isinstance(row[name], str):
                raise ValueError(f"{path}, line {number}: {name!r} is {type(row[name]).__name__}, but must be text")
        if isinstance(row.get(task.label), list | dict | float):  # of floats parse_float leaves NaN and infinities
            raise ValueError(f"{path}, line {number}: the label is {row[task.label]!r}, but must be a text or number")
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
        found = True
        yield _row(path, number, task, texts, needed)
    if not found:
        raise ValueError(f"{path}, line 1: the file has no example")


# -- words ------------------------------------------------------------------------------------------------------------


def _sentences(path: Path, task: LabelledTask) -> Iterator[Row]:
    """Read the sentences of a CoNLL or CoNLL-U file; the label's column is a number."""
    if not re.fullmatch(r"-?\d+", task.label):
        raise ValueError(
            f"the label column of task {task.name} is {task.label!r}, but in a file of words it must be a number, "
            "counted from 0, or -1 for the last"
        )
    conllu, column, found = task.format == "conllu", int(task.label), False
    expected = _CONLLU_FIELDS if conllu else task.fields
    words: list[tuple[int, str, str]] = []
    for number, line in enumerate(chain(read_lines(path), [""]), start=1):  # the end of the file ends a sentence
        fields = line.split("\t" if conllu or "\t" in line else " ")
        if not line.strip(" \t") or (fields[0] == "-DOCSTART-" and not conllu):
            if words:
                lines, texts, labels = zip(*words, strict=True)
                yield Row(lines[0], texts, labels, lines)
            words = []
            continue
        if conllu and line.startswith("#"):
            continue
        expected = expected or len(fields)
        if len(fields) != expected or "" in fields:
            what, end = ("a line of CoNLL-U", ", separated by tabs") if conllu else ("each word's line", "")
            given = _fields(fields) + ", some of them empty" * ("" in fields)
            raise ValueError(f"{path}, line {number}: {given}, but {what} must have {expected}{end}")
        if conllu and re.fullmatch(r"\d+[-.]\d+", fields[0]):
            continue
        if conllu and fields[0] != str(len(words) + 1):
            raise ValueError(f"{path}, line {number}: the word's number is {fields[0]!r}, but must be {len(words) + 1}")
        if not -len(fields) <= column < len(fields) or len(fields) < 2:
            raise ValueError(
                f"{path}, line {number}: no column {column} for the label of task {task.name}; the line has "
                f"{_fields(fields)}"
            )
        words.append((number, fields[1 if conllu else 0], fields[column]))
        found = True
    if not found:
        raise ValueError(f"{path}, line 1: the file has no words")
