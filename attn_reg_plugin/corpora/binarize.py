"""fairseq's own preprocessing, in a process of its own, and a check of what it wrote."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_MAGIC = b"MMIDIDX\x00\x00"


def require_packages() -> None:
    """Check that fairseq and sentencepiece are installed, without importing them.

    Raises:
        ValueError: one of them is not.
    """
    for module, package in (("fairseq_cli", "fairseq-fixed"), ("sentencepiece", "sentencepiece")):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"{package} is not installed, and preparing a corpus needs it: pip install {package}")


def count_sequences(index: Path) -> int:
    """How many sequences a fairseq index file (`*.idx`, mmap format) has.

    Raises:
        ValueError: it is not such a file.
    """
    with index.open("rb") as file:
        head = file.read(len(_MAGIC) + 17)
    if len(head) != len(_MAGIC) + 17 or not head.startswith(_MAGIC):
        raise ValueError(f"{index} is not an index of fairseq's mmap format")
    return struct.unpack("<QBQ", head[len(_MAGIC) :])[2]


def preprocess(
    folder: Path,
    destination: Path,
    languages: tuple[str, str],
    splits: Sequence[str],
    dictionaries: tuple[str, str],
    workers: int = 1,
) -> None:
    """Run `fairseq_cli.preprocess` on `pieces/SPLIT.LANGUAGE` of a folder.

    Args:
        folder: holds `pieces/` and the dictionaries; paths given to fairseq are relative to it, because
            fairseq splits lists of paths at commas.
        destination: where fairseq writes, inside `folder`.
        languages: source and target.
        splits: `train`, `valid`, `test`, `test1`, ... in any order.
        dictionaries: the file of the source and of the target, relative to `folder` (twice the same if
            joined).
        workers: how many processes.

    Raises:
        ValueError: fairseq failed; the sentence ends with its last line.
    """
    tests = sorted((name for name in splits if name.startswith("test")), key=lambda name: (len(name), name))
    command = [sys.executable, "-P", "-m", "fairseq_cli.preprocess"]
    command += ["--source-lang", languages[0], "--target-lang", languages[1]]
    command += [
        "--trainpref",
        "pieces/train",
        "--validpref",
        "pieces/valid",
        "--testpref",
        ",".join(f"pieces/{name}" for name in tests),
    ]
    command += ["--srcdict", dictionaries[0], "--tgtdict", dictionaries[1]]
    command += ["--destdir", str(destination.relative_to(folder)), "--workers", str(workers)]
    result = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if result.returncode != 0:
        lines = result.stdout.strip().splitlines() or ["it said nothing"]
        raise ValueError(f"fairseq_cli.preprocess failed with status {result.returncode}: {lines[-1]}")
    (destination / "preprocess.log").unlink(missing_ok=True)  # times and paths, different in every run


def check_counts(destination: Path, languages: tuple[str, str], expected: Mapping[str, int]) -> None:
    """Check that every binary has as many sequences as its split has pairs.

    Args:
        destination: fairseq's folder of binaries.
        languages: source and target.
        expected: split -> number of pairs.

    Raises:
        ValueError: a number differs.
    """
    for split, pairs in expected.items():
        for language in languages:
            index = destination / f"{split}.{languages[0]}-{languages[1]}.{language}.idx"
            found = count_sequences(index)
            if found != pairs:
                raise ValueError(f"fairseq wrote {found} sequences to {index.name}, but {split} has {pairs} pairs")
