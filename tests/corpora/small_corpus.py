"""A parallel corpus of made-up words in a folder, and options that prepare it."""

import random
from pathlib import Path

from attn_reg_plugin.corpora.options import Wmt16Options

ENGLISH = [a + b for a in ("ri", "ho", "wa", "blu", "gre", "ci", "old") for b in ("ver", "use", "lks", "nty")]
ROMANIAN = [a + b for a in ("râ", "că", "me", "ver", "şa", "ora", "pod") for b in ("ul", "sa", "țe", "rge")]


def corpus(count: int, seed: int) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    picks = [[draw.randrange(28) for _ in range(draw.randint(3, 9))] for _ in range(count)]
    return [(" ".join(ENGLISH[i] for i in pick), " ".join(ROMANIAN[i] for i in pick)) for pick in picks]


def write_split(
    folder: Path, name: str, pairs: list[tuple[str, str]], languages: tuple[str, str] = ("en", "ro")
) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    for side, language in enumerate(languages):
        (folder / f"{name}.{language}").write_text("".join(p[side] + "\n" for p in pairs), encoding="utf-8")


def write_corpus(folder: Path, train: list[tuple[str, str]] | None = None) -> Path:
    write_split(folder, "train", corpus(160, 1) if train is None else train)
    write_split(folder, "newsdev2016", corpus(12, 2))
    write_split(folder, "newstest2016", corpus(9, 3))
    write_split(folder, "newstest2017", corpus(7, 4))
    return folder


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def wanted(source: object, out: Path, **options: object) -> Wmt16Options:
    settings = {"pair": "en-ro", "vocab_size": 70, **options}
    if "spm_model" in options:
        del settings["vocab_size"]
    return Wmt16Options(source=str(source), out=out, **settings)
