"""fairseq's data files without fairseq: `dict.txt` with its special symbols, and the binaries `*.idx` and `*.bin`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attn_reg_plugin.files import read_bytes, write_text

#: what fairseq puts before the entries of any dictionary
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
UNKNOWN = "<unk>"
#: ends a dictionary's line that may hold a symbol a second time
_OVERWRITE = " #fairseq:overwrite"
#: how an index of fairseq's mmap format begins; then a version (8 bytes), the code of a type and a count (8 bytes)
_MAGIC = b"MMIDIDX\x00\x00"
#: fairseq's codes of whole numbers and their bytes
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8}


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
    try:
        lines = read_bytes(path).decode("utf-8").removesuffix("\n").split("\n")
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


def count_sequences(index: Path) -> int:
    """Count the sequences of fairseq's binaries in mmap format.

    Args:
        index: the file `*.idx`; `*.bin` is beside it.

    Raises:
        ValueError: one of the two is not whole, or no such file.
        OSError: one of them is missing, or cannot be read.
    """
    import numpy as np

    content, head = read_bytes(index), len(_MAGIC) + 17
    count = int.from_bytes(content[head - 8 : head], "little")
    size = _BYTES.get(content[head - 9]) if len(content) >= head else None
    if size is None or not content.startswith(_MAGIC) or len(content) != head + 12 * count:
        raise ValueError(f"{index} is damaged, or is not an index of fairseq's mmap format; make the data anew")
    binary, wanted = (
        index.with_suffix(".bin"),
        int(np.frombuffer(content, np.int32, count, head).sum(dtype=np.int64)) * size,
    )
    if (found := binary.stat().st_size) != wanted:
        raise ValueError(f"{binary} is damaged: it has {found} bytes, but {index.name} asks for {wanted}")
    return count
