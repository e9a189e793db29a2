"""fairseq's dictionaries: the special symbols, and reading and writing `dict.txt` without fairseq."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attn_reg_plugin.files import write_text

#: what fairseq puts before the entries of any dictionary
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
UNKNOWN = "<unk>"


#: ends a dictionary's line that may hold a symbol a second time
_OVERWRITE = " #fairseq:overwrite"


def write_dictionary(symbols: Iterable[str], path: Path) -> None:
    """Write a fairseq dictionary (`dict.txt`): one symbol and a count of 1 per line, the special symbols left out."""
    write_text(path, "".join(f"{symbol} 1\n" for symbol in symbols))


def read_dictionary(path: Path) -> list[str]:
    """The symbols of a fairseq dictionary file, without the special ones.

    Raises:
        ValueError: a line is not `<symbol> <count>` or holds a symbol a second time (file and line), or the file is not
            UTF-8.
        OSError: there is no such file, or it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"dictionary {path}: no such file")
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a fairseq dictionary: it is not UTF-8 text") from None
    symbols: dict[str, None] = {}
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        bare = line.rstrip().removesuffix(_OVERWRITE)
        symbol, _, count = bare.rpartition(" ")
        if not symbol or not count.isdecimal():
            raise ValueError(f"{path}, line {number}: {line!r} is not '<symbol> <count>'")
        if (symbol in symbols or symbol in SPECIAL) and not line.rstrip().endswith(_OVERWRITE):
            where = "is one of fairseq's own" if symbol in SPECIAL else "is in an earlier line too"
            raise ValueError(f"{path}, line {number}: {symbol!r} {where}, and a dictionary has every symbol once")
        symbols[symbol] = None
    return list(symbols)
