"""Parallel text: pairs of lines, with errors that name the file and the line.

Nothing here holds more than one line per file, so memory does not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from attn_reg_plugin.files import read_lines


class Pair(NamedTuple):
    """A sentence and its translation.

    Attributes:
        line: its number in its files, counted from 1.
        source: the sentence in the source language, one line.
        target: its translation, one line.
    """

    line: int
    source: str
    target: str


def read_pairs(source: Path, target: Path) -> Iterator[Pair]:
    """The pairs of two files aligned line by line, one at a time.

    Raises:
        ValueError: the files have not equally many lines (names the shorter file and the first line it
            lacks), or one of them cannot be read as UTF-8 text.
        FileNotFoundError: one of the files is missing.
    """
    for number, (left, right) in enumerate(zip_longest(read_lines(source), read_lines(target)), start=1):
        if left is None or right is None:
            short, long = (source, target) if left is None else (target, source)
            raise ValueError(
                f"{short}, line {number} is missing: {long} has a line {number}, and parallel files must "
                "have equally many lines"
            )
        yield Pair(number, left, right)
