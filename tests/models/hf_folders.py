"""Small files in the official formats, with labels that can be learned, beside the package's tiny encoders."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.labelled.made_up import make_encoder, make_text, tokenizer

__all__ = ["make_encoder", "tokenizer"]
SIZES = {"train": 48, "dev": 21}


def _positive(text: str) -> int:
    return int(sum(int(word.strip("wxy")) for word in text.split()) < 11.5 * len(text.split()))


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _make_pairs(folder: Path, sizes: dict[str, int], seed: int, column: str, pair: Callable) -> Path:
    """Tables of two sentences and `column`; `pair` makes all three from a generator."""
    generator = random.Random(seed)
    for split, size in sizes.items():
        rows = ["\t".join([str(index), *pair(generator)]) for index in range(size)]
        _write(folder / f"{split}.tsv", [f"index\tsentence1\tsentence2\t{column}", *rows])
    return folder


def make_rte(folder: Path, sizes: dict[str, int] = SIZES, seed: int = 3) -> Path:
    """Pairs in RTE's format; whether the first text is positive is the label."""

    def pair(generator: random.Random) -> tuple[str, str, str]:
        first, second = make_text(generator), make_text(generator, 4)
        return first, second, ["not_entailment", "entailment"][_positive(first)]

    return _make_pairs(folder, sizes, seed, "label", pair)


def make_mnli(folder: Path, sizes: dict[str, int] = SIZES, seed: int = 7) -> Path:
    """Pairs in MNLI's format, as far as the columns matter, with both development sets."""

    def pair(generator: random.Random) -> tuple[str, str, str]:
        first, second = make_text(generator), make_text(generator)
        return first, second, ["entailment", "neutral", "contradiction"][_positive(first) + _positive(second)]

    names = {"train": sizes["train"], "dev_matched": sizes["dev"], "dev_mismatched": sizes["dev"] + 5}
    return _make_pairs(folder, names, seed, "gold_label", pair)


def make_stsb(folder: Path, sizes: dict[str, int] = SIZES, seed: int = 4) -> Path:
    """Pairs in STS-B's format, as far as the columns matter."""

    def pair(generator: random.Random) -> tuple[str, str, str]:
        first, second = make_text(generator), make_text(generator)
        shared = len(set(first.split()) & set(second.split()))
        return first, second, f"{min(5.0, 1.25 * shared):.3f}"

    return _make_pairs(folder, sizes, seed, "score", pair)


def make_wnut(folder: Path, sizes: dict[str, int] = SIZES, seed: int = 5) -> Path:
    """Sentences in WNUT-17's format; low words are persons, high ones locations."""
    generator = random.Random(seed)
    for split, size in sizes.items():
        lines = []
        for _ in range(size):
            for word in make_text(generator).split():
                number = int(word.strip("wxy"))
                tag = "B-person" if number < 5 else "B-location" if number > 18 else "O"
                lines.append(f"{word}\t{tag}")
            lines.append("")
        _write(folder / f"{split}.conll", lines)
    return folder


def make_swag(folder: Path, sizes: dict[str, int] = SIZES, seed: int = 6) -> Path:
    """Beginnings and endings in SWAG's format; the right ending repeats the beginning's first word."""
    generator = random.Random(seed)
    for split, size in {"train": sizes["train"], "val": sizes["dev"]}.items():
        lines = ["startphrase,ending0,ending1,ending2,ending3,label"]
        for _ in range(size):
            start, label = make_text(generator), generator.randrange(4)
            endings = [make_text(generator, 4) for _ in range(4)]
            endings[label] = f"{start.split()[0]} {endings[label]}"
            lines.append(",".join([start, *endings, str(label)]))
        _write(folder / f"{split}.csv", lines)
    return folder


#: a row of the table of tasks -> (how its files are made, the fairseq task, the criterion, the official metric)
TOYS = {
    "rte": (make_rte, "attn_reg_text_classification", "attn_reg_classification", "accuracy"),
    "stsb": (make_stsb, "attn_reg_text_classification", "attn_reg_classification", "pearson_spearman"),
    "wnut17": (make_wnut, "attn_reg_token_classification", "attn_reg_tagging", "f1"),
    "swag": (make_swag, "attn_reg_multiple_choice", "attn_reg_classification", "accuracy"),
}
