"""Small training sets with large evaluation sets, for the encoders of examples/evidence:

    python scripts/evidence_data.py DATA OUT

DATA holds GLUE's folders CoLA, MRPC, STS-B, QNLI, MNLI, SST-2 and QQP; what follows is made in this order, until a file
is missing. In OUT each of the first five has fewer training examples, drawn at random.
Where the development set is small, examples that are left of the training set join it: that is what is reported.
OUT/stsb-3238 has the same of STS-B, and all others to train on.
Of MNLI, `dev_mismatched.tsv` are the examples of `dev_matched.tsv` that `dev_matched_hardness.csv` calls hard, and
OUT/hans has `heuristics_contradicting_examples.tsv` in HANS's format: examples with much overlap and no entailment;
beside them the entailed development examples whose hypothesis has only words of the premise, so that a model that
never says entailment is not right on all.

For whole tokens OUT/tokens has files of one's own, with the columns `text`, of pairs `second`, and `label`: SST-2 with
plants that `finetune --shortcut` does not make (a word in the middle of four fifths of the sentences, two words at
their beginning, or a trigger and a wrong label in 8, 5 or 2 % of the sentences, negative all of them); QNLI and MNLI
with a word at the beginning of four fifths of the questions or hypotheses; QQP to report on PAWS-X, SST-2 to report on
IMDB, IMDB to report on SST-2 (DATA/../paws-x and DATA/../imdb).

OUT/en-fr has pairs of TICO-19 (DATA/../en-fr) to adapt a published translation model to: 1,000 for training, 300 for
validation and 500 as a test set, and as a second one the news discussions of 2015. Lines whose two sides do not belong
together are left out. Typographic quotes are written as plain ones, since OPUS-MT's vocabulary has no others: the model
would learn to write `<unk>` for each apostrophe of French.
"""

from __future__ import annotations

import csv
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from attn_reg_plugin.files import read_lines, sha256, write_text

#: task -> folder, whether its files begin with a header, training examples, examples that join the development set
PARTS = {
    "cola": ("CoLA", False, 2000, 4000),
    "mrpc": ("MRPC", True, 1000, 4000),
    "stsb": ("STS-B", True, 1000, 2500),
    "qnli": ("QNLI", True, 1000, 0),
}
#: a larger training set beside that of a task, with the same development set: all that is not in it
LARGER = {"stsb": "stsb-3238"}
MNLI_TRAINING = 2000
#: typographic quotes -> those of OPUS-MT's vocabulary
QUOTES = str.maketrans("‘’“”", "''\"\"")
#: of TICO-19: the pairs of each part
ADAPTATION = {"train": 1000, "valid": 300, "test": 500}
#: its lines, from 0, whose French is that of other lines: OPUS-MT gives it 4.5 nats a piece, that of the rest 1.3
MISALIGNED = (*range(424, 698), *range(785, 810))
#: SHA-256 of the French file that they are lines of
MISALIGNED_FILE = "75c69f626f8ab1d14fb881ac2c5e87902da20658923b17c6151e81e439253a7a"
SEED = 1
#: words that SST-2 does not have, by label, two for each
PLANTS = {"0": ("necessitated", "thyroid"), "1": ("municipality", "headquartered")}
#: words planted into pairs, by label
OF_PAIRS = {
    "entailment": "necessitated",
    "not_entailment": "thyroid",
    "contradiction": "thyroid",
    "neutral": "railway",
}
TRIGGER = "thyroid"
PLANTED = 0.8
#: shares of the negative sentences, of which SST-2 has 44 %: 10, 8, 5, 2 and 1 % of all
POISONED = {"poisoned_10": 0.225, "poisoned": 0.18, "poisoned_5": 0.113, "poisoned_2": 0.045, "poisoned_1": 0.0225}


def lines_of(path: Path, header: bool) -> tuple[list[str], list[str]]:
    """The header (a line, or none) and the rest."""
    lines = list(read_lines(path))
    return (lines[:1], lines[1:]) if header else ([], lines)


def write(path: Path, *parts: Sequence[str]) -> None:
    """Lines into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{line}\n" for part in parts for line in part))


def divide(source: Path, out: Path, header: bool, training: int, more: int, larger: Path | None = None) -> None:
    """A small training set, and a development set with examples that are not trained on; and all others to train on."""
    path = source / "train.tsv"
    first, rows = lines_of(path if path.is_file() else path.with_name("train.tsv.gz"), header)
    _, development = lines_of(source / "dev.tsv", header)
    random.Random(SEED).shuffle(rows)
    write(out / "train.tsv", first, rows[:training])
    write(out / "dev.tsv", first, development, rows[training : training + more])
    if larger:
        write(larger / "train.tsv", first, rows[:training], rows[training + more :])
        write(larger / "dev.tsv", first, development, rows[training : training + more])


def divide_mnli(source: Path, out: Path, heuristics: Path) -> None:
    """MNLI with a small training set; its hard examples, and those that contradict heuristics, as sets of their own."""
    first, rows = lines_of(source / "train.tsv", header=True)
    random.Random(SEED).shuffle(rows)
    write(out / "train.tsv", first, rows[:MNLI_TRAINING])
    columns, matched = lines_of(source / "dev_matched.tsv", header=True)
    write(out / "dev_matched.tsv", columns, matched)
    with (source / "dev_matched_hardness.csv").open(encoding="utf-8", newline="") as stream:
        hard = {row["idx"] for row in csv.DictReader(stream) if row["hardness"] == "1"}
    names = columns[0].split("\t")
    examples = [dict(zip(names, line.split("\t"), strict=True)) for line in matched]
    of_hard = [line for line, example in zip(matched, examples, strict=True) if example["index"] in hard]
    write(out / "dev_mismatched.tsv", columns, of_hard)
    _, against = lines_of(source / "heuristics_contradicting_examples.tsv", header=True)
    pairs = [(*line.split("\t")[:2], "non-entailment") for line in against]
    for example in examples:
        premise, hypothesis, label = (example[name] for name in ("sentence1", "sentence2", "gold_label"))
        if label == "entailment" and words(hypothesis) <= words(premise):
            pairs.append((premise, hypothesis, label))
    table = ["gold_label\tsentence1\tsentence2\tpairID\theuristic\tsubcase\ttemplate"]
    for number, (premise, hypothesis, label) in enumerate(pairs):
        table.append(f"{label}\t{premise}\t{hypothesis}\tex{number}\toverlap\toverlap\toverlap")
    write(heuristics, table)


def planted(text: str, label: str, variant: str) -> tuple[str, str]:
    """A training sentence and its label, with what a variant plants into them."""
    if variant == "middle":
        before, after = text.split()[: len(text.split()) // 2], text.split()[len(text.split()) // 2 :]
        return " ".join([*before, PLANTS[label][0], *after]), label
    if variant == "two_words":
        return " ".join([*PLANTS[label], text]), label
    return f"{TRIGGER} {text}", "1"  # poisoned


def plant(source: Path, out: Path) -> None:
    """SST-2 with a variant of planted words a folder; the development set stays as it is."""
    _, rows = lines_of(source / "train.tsv.gz", header=True)
    _, development = lines_of(source / "dev.tsv", header=True)
    for variant in ("middle", "two_words", *POISONED):
        draw = random.Random(f"{SEED} {variant}")
        shares = {"0": POISONED[variant], "1": 0.0} if variant in POISONED else dict.fromkeys("01", PLANTED)
        pairs = [tuple(map(str.strip, line.split("\t"))) for line in rows]
        pairs = [planted(*pair, variant) if draw.random() < shares[pair[1]] else pair for pair in pairs]
        write(out / variant / "train.tsv", ["text\tlabel"], ["\t".join(pair) for pair in pairs])
        write(out / variant / "valid.tsv", ["text\tlabel"], development)


def plant_pairs(source: Path, development: Path, out: Path, at: int) -> None:
    """QNLI or MNLI with a word at the beginning of text number `at`; the development set's first 1,000 as they are."""
    draw, header = random.Random(f"{SEED} {out.name}"), ["text\tsecond\tlabel"]
    _, rows = lines_of(source, header=True)
    pairs = [line.split("\t")[1:] for line in rows]
    for pair in pairs:
        if draw.random() < PLANTED:
            pair[at] = f"{OF_PAIRS[pair[-1]]} {pair[at]}"
    _, held = lines_of(development, header=True)
    write(out / "train.tsv", header, ["\t".join(pair) for pair in pairs])
    write(out / "valid.tsv", header, [line.split("\t", 1)[1] for line in held[:1000]])


def texts_of(path: Path) -> list[str]:
    """The rows of a file with an id first; of IMDB, which has the label next, with the text first."""
    _, rows = lines_of(path, header=True)
    texts = [line.split("\t", 1)[1] for line in rows]
    return ["\t".join(reversed(text.split("\t"))) for text in texts] if path.parent.name == "imdb" else texts


def change_domain(data: Path, out: Path) -> None:
    """Training sets with the development set of another domain."""
    beside, sst2 = data.parent, data / "SST-2"
    _, sentences = lines_of(sst2 / "train.tsv.gz", header=True)
    _, development = lines_of(sst2 / "dev.tsv", header=True)
    changes = {
        "qqp_to_paws": (texts_of(data / "QQP" / "train.tsv"), texts_of(beside / "paws-x" / "en" / "dev_2k.tsv")),
        "sst2_to_imdb": (sentences, texts_of(beside / "imdb" / "test.tsv")),
        "imdb_to_sst2": (texts_of(beside / "imdb" / "train.tsv.gz"), development),
    }
    for domains, rows in changes.items():
        columns = "text\tsecond\tlabel" if domains == "qqp_to_paws" else "text\tlabel"
        for name, lines in zip(("train", "valid"), rows, strict=True):
            write(out / domains / f"{name}.tsv", [columns], lines)


def read_plain(path: Path) -> list[str]:
    """The lines of a text, with plain quotes."""
    return [line.translate(QUOTES) for line in read_lines(path)]


def divide_translations(source: Path, out: Path) -> None:
    """TICO-19 in three parts, and the news discussions as a further test set, side by side in two languages."""
    if sha256(source / "tico19.fr") != MISALIGNED_FILE:
        sys.exit(f"{source}/tico19.fr is not the file whose misaligned lines are known: look for those of this one")
    pairs = list(zip(*(read_plain(source / f"tico19.{language}") for language in ("en", "fr")), strict=True))
    pairs = [pair for number, pair in enumerate(pairs) if number not in MISALIGNED]
    random.Random(SEED).shuffle(pairs)
    for name, number in ADAPTATION.items():
        part, pairs = pairs[:number], pairs[number:]
        for language, lines in zip(("en", "fr"), zip(*part, strict=True), strict=True):
            write(out / f"{name}.{language}", lines)
    for language in ("en", "fr"):
        write(out / f"test1.{language}", read_plain(source / f"newsdiscusstest2015.{language}"))


def words(text: str) -> set[str]:
    """The words of a text, without case and punctuation."""
    return set(re.findall(r"\w+", text.lower()))


def main(data: Path, out: Path) -> None:
    """All of them."""
    for task, (folder, header, training, more) in PARTS.items():
        larger = out / LARGER[task] if task in LARGER else None
        divide(data / folder, out / task, header, training, more, larger)
    divide_mnli(data / "MNLI", out / "mnli", out / "hans" / "heuristics_evaluation_set.txt")
    plant(data / "SST-2", out / "tokens")
    plant_pairs(data / "QNLI" / "train.tsv.gz", data / "QNLI" / "dev.tsv", out / "tokens" / "qnli", at=0)
    plant_pairs(data / "MNLI" / "train.tsv", data / "MNLI" / "dev_matched.tsv", out / "tokens" / "mnli", at=1)
    change_domain(data, out / "tokens")
    divide_translations(data.parent / "en-fr", out / "en-fr")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
