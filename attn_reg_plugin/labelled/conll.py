"""Readers of tagged words: CoNLL columns (WNUT-17, CoNLL-2003) and CoNLL-U (Universal Dependencies).

CoNLL: one word per line, fields separated by a tab or by spaces, an empty line after each sentence; `-DOCSTART-` lines
are skipped. CoNLL-U: ten fields separated by tabs, `#` comments; ranges of multiword tokens (`3-4`) and empty nodes
(`5.1`) are skipped, for their words have lines of their own. Files may be gzipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attn_reg_plugin.files import read_lines
from attn_reg_plugin.labelled.examples import TaggedSentence
from attn_reg_plugin.labelled.tables import LabelReader
from attn_reg_plugin.labelled.task_table import LabelledTask

#: a line of a word: its number, the word, and its label
Word = tuple[int, str, str]
#: a line and its fields; None where a sentence ends
Line = tuple[int, list[str] | None]
CONLLU_FIELDS = 10


def read_words(path: Path, task: LabelledTask, labels_ignored: bool = False) -> Iterator[list[Word]]:
    """Read the sentences of a file, with labels as they are written.

    Args:
        labels_ignored: the labels are empty, and a line may be a word alone.

    Raises:
        ValueError: an empty file, a ragged line, a label column that isn't a number or doesn't exist, or text that
            cannot be read.
    """
    if not re.fullmatch(r"-?\d+", task.label):
        raise ValueError(
            f"the label column of task {task.name} is {task.label!r}, but in a file of words it must be a number, "
            "counted from 0, or -1 for the last"
        )
    word_column, label_column = 1 if task.format == "conllu" else 0, int(task.label)
    expected = None if labels_ignored else task.fields
    sentence: list[Word] = []
    found = False
    for number, fields in _conllu_lines(path) if task.format == "conllu" else _conll_lines(path, expected):
        if fields is None:
            if sentence:
                yield sentence
            sentence = []
            continue
        found = True
        if not labels_ignored and (not -len(fields) <= label_column < len(fields) or len(fields) < 2):
            raise ValueError(
                f"{path}, line {number}: no column {label_column} for the label of task {task.name}; the line has "
                f"{_fields(fields)}"
            )
        sentence.append((number, fields[word_column], "" if labels_ignored else fields[label_column]))
    if sentence:
        yield sentence
    if not found:
        raise ValueError(f"{path}, line 1: the file has no words")


def _fields(fields: list[str]) -> str:
    return f"{len(fields)} field{'s' * (len(fields) != 1)}{', some of them empty' * ('' in fields)}"


def _conll_lines(path: Path, expected: int | None) -> Iterator[Line]:
    for number, line in enumerate(read_lines(path), start=1):
        fields = line.split("\t") if "\t" in line else line.split(" ")
        if not line.strip(" \t") or fields[0] == "-DOCSTART-":
            yield number, None
            continue
        expected = expected or len(fields)
        if len(fields) != expected or "" in fields:
            raise ValueError(f"{path}, line {number}: {_fields(fields)}, but each word's line must have {expected}")
        yield number, fields


def _conllu_lines(path: Path) -> Iterator[Line]:
    last = 0
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip(" \t"):
            last = 0
            yield number, None
            continue
        if line.startswith("#"):
            continue
        fields = line.split("\t")
        if len(fields) != CONLLU_FIELDS or "" in fields:
            raise ValueError(
                f"{path}, line {number}: {_fields(fields)}, but a line of CoNLL-U must have {CONLLU_FIELDS}, separated "
                "by tabs"
            )
        if re.fullmatch(r"\d+[-.]\d+", fields[0]):
            continue
        if fields[0] != str(last + 1):
            raise ValueError(f"{path}, line {number}: the word's number is {fields[0]!r}, but must be {last + 1}")
        last += 1
        yield number, fields


def read_tagged(path: Path, task: LabelledTask, labels_ignored: bool = False) -> Iterator[TaggedSentence]:
    """Read the sentences of a CoNLL or CoNLL-U file, with labels as indices.

    Args:
        path: plain or `.gz`.
        task: of kind tagging.
        labels_ignored: look at no label; the sentences have none.

    Raises:
        ValueError: an unknown label, or what `read_words` refuses.
    """
    labels = LabelReader(task)
    for sentence in read_words(path, task, labels_ignored):
        indices = None
        if not labels_ignored:
            indices = tuple(int(labels.read(label, f"{path}, line {line}")) for line, _, label in sentence)
        yield TaggedSentence(sentence[0][0], tuple(word for _, word, _ in sentence), indices)
