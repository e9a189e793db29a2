"""A toy corpus in the form `attn-reg prepare` writes, without preparing anything."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

WORDS = ["ba", "do", "ki", "lu", "me", "no", "pa", "ri", "su", "ta"]
SIZES = {"train": 100, "valid": 20, "test": 20}


def make_corpus(root: Path) -> Path:
    """A folder with bin/ and raw/ of a made-up language pair, en-ro; each word is a piece."""
    generator = random.Random(0)
    for folder in ("raw", "pieces"):
        (root / folder).mkdir(parents=True)
    for split, size in SIZES.items():
        sources = [[generator.choice(WORDS) for _ in range(generator.randint(2, 6))] for _ in range(size)]
        for language, step in (("en", 1), ("ro", -1)):
            for folder, start in (("raw", ""), ("pieces", "▁")):
                lines = [" ".join(start + word[::step] for word in words[::step]) for words in sources]
                text = "".join(f"{line}\n" for line in lines)
                (root / folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    pieces = root / "pieces"
    command = [sys.executable, "-m", "fairseq_cli.preprocess", "--source-lang", "en", "--target-lang", "ro"]
    command += ["--trainpref", str(pieces / "train"), "--validpref", str(pieces / "valid")]
    command += ["--testpref", str(pieces / "test"), "--destdir", str(root / "bin")]
    subprocess.run([*command, "--joined-dictionary"], check=True, capture_output=True)
    return root


def empty_corpus(data: Path) -> Path:
    """A prepared folder as far as its files' names go."""
    names = ("train.en-ro.en.idx", "train.en-ro.ro.idx", "test.en-ro.en.idx", "test1.en-ro.en.idx")
    for name in (
        *(f"bin/{name}" for name in names),
        "bin/dict.en.txt",
        "bin/dict.ro.txt",
        "raw/test.ro",
        "raw/test1.ro",
    ):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).touch()
    return data
