"""fairseq's data files without fairseq: `dict.txt` with its special symbols, and the binaries `*.idx` and `*.bin`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attn_reg_plugin.files import raw_lines, read_bytes, write_text

if TYPE_CHECKING:
    import numpy as np

#: what fairseq puts before the entries of any dictionary
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
UNKNOWN = "<unk>"
#: ends a dictionary's line that may hold a symbol a second time
_OVERWRITE = " #fairseq:overwrite"
#: how an index of fairseq's mmap format begins; then a version (8 bytes), the code of a type and a count (8 bytes)
_MAGIC = b"MMIDIDX\x00\x00"
#: how its other formats begin
_OTHERS = (b"TNTIDX\x00\x00", b"HUFFIDX\x00")
#: fairseq's codes of whole numbers
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16", 9: "uint32", 10: "uint64"}


def is_pair(text: str) -> bool:
    """Whether it names two languages, `en-ro`, as fairseq does, which parts names of files at dots and hyphens."""
    source, _, target = text.partition("-")
    return bool(re.fullmatch(r"\w+-\w+", text, re.ASCII)) and source != target


def write_dictionary(symbols: Iterable[str], path: Path) -> None:
    """Write a fairseq dictionary (`dict.txt`): one symbol and a count of 1 per line, the special symbols left out."""
    write_text(path, "".join(f"{symbol} 1\n" for symbol in symbols))


def read_dictionary(path: Path) -> list[str]:
    """The symbols of a fairseq dictionary file, without the special ones; what overwrites another is one more.

    Raises:
        ValueError: a line is not `<symbol> <count>` or holds a symbol a second time (file and line), or the file is not
            UTF-8.
        OSError: there is no such file, or it cannot be read.
    """
    symbols, known = list[str](), set(SPECIAL)
    for number, line in enumerate(raw_lines(path), start=1):
        bare = line.rstrip().removesuffix(_OVERWRITE)
        symbol, _, count = bare.rpartition(" ")
        if not symbol or not count.isdecimal():
            raise ValueError(f"{path}, line {number}: {line!r} is not '<symbol> <count>'")
        if symbol in known and bare == line.rstrip():
            raise ValueError(f"{path}, line {number}: {symbol!r} a second time, or one of fairseq's own")
        symbols.append(symbol)
        known.add(symbol)
    return symbols


def read_index(path: Path) -> tuple[str, np.ndarray] | None:
    """The type of the numbers in a binary, and how many each of its texts has, (N,); None of other formats than mmap.

    Raises:
        ValueError: it is damaged, or no index at all; one sentence with the file.
        OSError: it is missing, or cannot be read.
    """
    import numpy as np

    content, head = read_bytes(path), len(_MAGIC) + 17
    if content.startswith(_OTHERS):
        return None
    count = int.from_bytes(content[head - 8 : head], "little")
    kind = _TYPES.get(content[head - 9]) if len(content) >= head else None
    if kind is None or not content.startswith(_MAGIC) or len(content) != head + 12 * count:
        raise ValueError(f"{path} is damaged, or is not an index of fairseq's mmap format; make the data anew")
    return kind, np.frombuffer(content, np.int32, count, head)


def check_binaries(folder: Path, split: str, dictionaries: Path) -> None:
    """Refuse a split that is damaged or has more symbols than its dictionaries, which may be in another folder.

    Other formats than mmap are left to fairseq.

    Raises:
        ValueError: one sentence with the file.
        OSError: a file is missing, or cannot be read.
    """
    import numpy as np

    for path in sorted(folder.glob(f"{split}.*-*.*.idx")):
        index, binary = read_index(path), path.with_suffix(".bin")
        if index is None:
            continue
        kind, sizes = index
        length = int(sizes.sum(dtype=np.int64))
        wanted, found = length * np.dtype(kind).itemsize, binary.stat().st_size
        if found != wanted:
            raise ValueError(f"{binary} is damaged: it has {found} bytes, but {path.name} asks for {wanted}")
        dictionary = dictionaries / f"dict.{path.name.split('.')[-2]}.txt"
        known = len(SPECIAL) + len(read_dictionary(dictionary))
        largest = int(np.memmap(binary, kind, "r").max()) if length else 0
        if largest >= known:
            said = f"it has {known} symbols, but {binary.name} has number {largest}"
            raise ValueError(f"{dictionary} is damaged or of other data: {said}")
