"""A corpus in the form `attn-reg prepare` writes, as far as names go."""

from pathlib import Path


def empty_corpus(data: Path) -> Path:
    """A prepared folder as far as its files' names go."""
    names = ("train.en-ro.en.idx", "train.en-ro.ro.idx", "test.en-ro.en.idx", "test1.en-ro.en.idx")
    others = ("bin/dict.en.txt", "bin/dict.ro.txt", "raw/test.ro", "raw/test1.ro")
    for name in (*(f"bin/{name}" for name in names), *others):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(b"TNTIDX\0\0" if name.endswith("idx") else b"")  # of a format not looked into
    return data
