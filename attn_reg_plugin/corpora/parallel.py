"""Parallel text: pairs of lines, with errors that name the file and the line; and the letters of Romanian.

Nothing here holds more than one line per file, so memory does not grow with the corpus.

Romanian ș and ț have a comma below (U+0219, U+021B). Much text has them with a cedilla (U+015F, U+0163), which is
another letter to a model and to BLEU. The rules touch the five Romanian letters only (ă, â, î, ș, ț, either case,
composed or written with a combining mark).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from attn_reg_plugin.files import read_lines

#: what `--romanian` may be; after the second, no text can be compared with a text that has diacritics
RULES = ("cedilla", "no-diacritics", "none")
STRIPPED = RULES[1]
_CEDILLA = str.maketrans("şţŞŢ", "șțȘȚ")
_COMBINING_CEDILLA = re.compile("([sStT])\u0327")
_PLAIN = str.maketrans("ăâîșțĂÂÎȘȚ", "aaistAAIST")
_COMBINING = re.compile("([aA])[\u0306\u0302]|([iI])\u0302|([sStT])\u0326")


class Pair(NamedTuple):
    """A sentence and its translation, each a line; `line` is their number in their files, counted from 1."""

    line: int
    source: str
    target: str


def read_pairs(source: Path, target: Path) -> Iterator[Pair]:
    """Read the pairs of two files aligned line by line, a pair at a time.

    Raises:
        ValueError: the files have not equally many lines (names the shorter file and the first line it lacks), or one
            of them cannot be read as UTF-8 text.
        FileNotFoundError: one of the files is missing.
    """
    for number, (left, right) in enumerate(zip_longest(read_lines(source), read_lines(target)), start=1):
        if left is None or right is None:
            short, long = (source, target) if left is None else (target, source)
            raise ValueError(
                f"{short}, line {number} is missing: {long} has a line {number}, and parallel files must have equally "
                "many lines"
            )
        yield Pair(number, left, right)


def normalize(line: str, rule: str) -> str:
    """Write Romanian text by a rule; applying a rule twice is the same as once.

    Args:
        line: any text.
        rule: `cedilla` writes ş ţ as ș ț; `no-diacritics` does so and then writes a a i s t for ă â î ș ț; `none`
            changes nothing.
    """
    if rule == "none":
        return line
    line = line.translate(_CEDILLA)
    line = _COMBINING_CEDILLA.sub(lambda match: match[1].translate(str.maketrans("stST", "șțȘȚ")), line)
    if rule == STRIPPED:
        line = _COMBINING.sub(lambda match: match[1] or match[2] or match[3], line.translate(_PLAIN))
    return line
