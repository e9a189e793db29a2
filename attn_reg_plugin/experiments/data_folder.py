"""The data folder of a comparison, as `attn-reg prepare` writes it: bin/ for fairseq, raw/ references."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_reg_plugin.dictionaries import read_index
from attn_reg_plugin.files import raw_lines, sha256


def refuse_split(name: str, path: str | Path) -> None:
    """Refuse a path with the character at which fairseq splits those of data and of models; `name` is the setting's."""
    if os.pathsep in str(path):
        raise ValueError(f"{name} {path} has {os.pathsep!r}, at which fairseq splits paths; give another folder")


@dataclass(frozen=True)
class DataFolder:
    """A prepared corpus: its folder, its languages, the test subsets, whether the dictionary is joint."""

    root: Path
    source: str
    target: str
    subsets: tuple[str, ...]
    joint: bool

    @classmethod
    def open(cls, root: Path) -> DataFolder:
        """Look at what is in `root`; a FileNotFoundError says which part of it is missing."""
        binary = root / "bin"
        advice = "make it with `attn-reg prepare`"
        if not binary.is_dir():
            raise FileNotFoundError(f"{root} has no folder bin/ with data for fairseq; {advice}")
        pairs = [path.name.split(".")[1] for path in binary.glob("train.*-*.*.idx") if path.name.count(".") == 3]
        pairs = [pair for pair in pairs if pair.count("-") == 1]
        if not pairs:
            raise FileNotFoundError(f"{binary} has no training data (train.SOURCE-TARGET.*.idx); {advice}")
        if len(set(pairs)) > 1:
            raise ValueError(f"{binary} has data of {' and '.join(sorted(set(pairs)))}; give a folder with one pair")
        source, target = pairs[0].split("-")
        subsets = sorted(path.name.split(".")[0] for path in binary.glob(f"test*.{pairs[0]}.{source}.idx"))
        if not subsets:
            raise FileNotFoundError(f"{binary} has no test data (test.{pairs[0]}.{source}.idx); {advice}")
        dictionaries = [binary / f"dict.{language}.txt" for language in (source, target)]
        for path in dictionaries + [root / "raw" / f"{subset}.{target}" for subset in subsets]:
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing; {advice}")
        return cls(root, source, target, tuple(subsets), dictionaries[0].read_bytes() == dictionaries[1].read_bytes())

    @property
    def bin(self) -> Path:
        """The folder to give to fairseq."""
        return self.root / "bin"

    def pairs(self, subset: str = "train") -> int:
        """The number of pairs of a subset, from fairseq's index; 0 where that has another format than mmap."""
        index = read_index(self.bin / f"{subset}.{self.source}-{self.target}.{self.target}.idx")
        return 0 if index is None else len(index[1])

    def references(self, subset: str) -> list[str]:
        """The raw reference translations of a subset."""
        return raw_lines(self.root / "raw" / f"{subset}.{self.target}")

    def other_pieces(self) -> Path | None:
        """The target's dictionary if it has pieces, but none of sentencepiece's with a space in them, `▁`."""
        path = self.bin / f"dict.{self.target}.txt"
        pieces = raw_lines(path)
        return path if pieces and not any("▁" in piece for piece in pieces) else None

    def digest(self) -> str:
        """A digest of everything fairseq reads, and of nothing else (no path, no time)."""
        return digest_of([path for path in sorted(self.bin.iterdir()) if path.suffix in {".bin", ".idx", ".txt"}])


def digest_of(paths: Sequence[Path]) -> str:
    """A digest of files by name and content; of a folder, of the texts in it, by their names there."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.txt*")) if path.is_dir() else [path]:
            digest.update((path.name if file == path else file.relative_to(path).as_posix()).encode())
            digest.update(bytes.fromhex(sha256_of(file)))
    return digest.hexdigest()[:16]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, which is read again where its time of change is another one."""
    return _sha256(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _sha256(path: Path, changed: int) -> str:
    return sha256(path)
