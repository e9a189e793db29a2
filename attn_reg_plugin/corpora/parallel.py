"""Readers of parallel text: line by line, plain or gzipped, with errors that name the file and the line.

Nothing here holds more than one line per file, so memory does not grow with the corpus.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import IO, NamedTuple

#: characters other than the newline at which some reader would break a line
_LINE_BREAKS = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


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


def one_line(text: str) -> str:
    """The text without its line end, and with a space for every line break inside it."""
    return text.removesuffix("\n").removesuffix("\r").translate(_LINE_BREAKS)


def find_text(folder: Path, name: str) -> Path | None:
    """`name` or `name.gz` in a folder; None where there is neither.

    Raises:
        ValueError: both are there, so it is not clear which one is meant.
    """
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if len(found) == 2:
        raise ValueError(f"{folder} has both {name} and {name}.gz: remove one of them")
    return found[0] if found else None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, plain or `.gz`, one at a time.

    A byte order mark at the start is dropped; line breaks other than the newline become spaces.

    Raises:
        ValueError: a line that is not UTF-8 or holds a NUL byte, or a broken gzip file (with the line number).
        FileNotFoundError: there is no such file.
    """
    number = 0
    with _open(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if b"\0" in line:
                    raise ValueError(f"{path}, line {number}: not text (a NUL byte at position {line.index(0) + 1})")
                yield one_line(text)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(
                f"{path}, line {number}: not UTF-8 (byte 0x{byte:02x} at position {error.start + 1} of the "
                "line); only UTF-8 text is read"
            ) from None
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise ValueError(f"{path}, after line {number}: not a whole gzip file") from None


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
