"""fairseq's dictionaries: the special symbols, and reading and writing `dict.txt` without fairseq."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

#: what fairseq puts before the entries of any dictionary
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
UNKNOWN = "<unk>"


def write_dictionary(symbols: Iterable[str], path: Path) -> None:
    """Write a fairseq dictionary (`dict.txt`): one symbol and a count of 1 per line, the special symbols left out."""
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")


def read_dictionary(path: Path) -> list[str]:
    """The symbols of a fairseq dictionary file, without the special ones.

    Raises:
        ValueError: a line is not `<symbol> <count>` (file and line), or the file is not UTF-8.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"dictionary {path}: no such file")
    symbols = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a fairseq dictionary: it is not UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        symbol, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        if symbol and count.isdecimal():
            symbols.append(symbol)
        elif line:
            raise ValueError(f"{path}, line {number}: {line!r} is not '<symbol> <count>'")
    return symbols
