"""The phrasebook: 12,000 sentences in English, Romanian and Turkish, a corpus that needs no download.

`phrasebook.tsv.gz` holds them; README.md beside it says how they were made. Articles, genders, cases, vowel harmony and
word order are real and no sentence comes twice, so a small Transformer has something to learn and over-fits on little
of it. A tenth of all verb–object and adjective–noun combinations is held out: train has none of them, and every
sentence of valid and test has at least one.
"""

import gzip
import hashlib
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")

#: sentences for train, and for valid and test together
TRAIN_PAIRS, UNSEEN_PAIRS = 10_458, 1_542
_FILE = Path(__file__).with_name("phrasebook.tsv.gz")


class Triple(NamedTuple):
    """The same sentence in English, Romanian and Turkish."""

    en: str
    ro: str
    tr: str


class Entry(NamedTuple):
    """A sentence, whether it has a combination of words that train never shows, and its words, such as `Verb:open`."""

    triple: Triple
    held_out: bool
    words: frozenset[str]


@cache
def entries() -> tuple[Entry, ...]:
    """All sentences, in the order in which they were made."""
    with gzip.open(_FILE, "rt", encoding="utf-8", newline="\n") as lines:
        rows = (line.removesuffix("\n").split("\t") for line in lines)
        return tuple(Entry(Triple(*row[:3]), row[3] == "1", frozenset(row[4].split(" "))) for row in rows)


def check_sizes(train: int, valid: int, test: int) -> None:
    """Refuse sizes that are not positive or larger than what there is, by a ValueError."""
    if min(train, valid, test) < 1 or train > TRAIN_PAIRS or valid + test > UNSEEN_PAIRS:
        raise ValueError(
            f"The phrasebook has {TRAIN_PAIRS} pairs for train and {UNSEEN_PAIRS} for valid and test together, "
            f"but train={train}, valid={valid} and test={test} were asked for."
        )


def splits(train: int = 4000, valid: int = 500, test: int = 500, seed: int = 1) -> dict[str, list[Triple]]:
    """Train, valid and test: no sentence in two of them, and unseen combinations in valid and test.

    Seed 1 takes the first sentences for train, another seed draws them. Valid and test follow the order of the file
    for every seed, sentences of which every word is in train first. So with equal sizes the valid of one seed and the
    test of another share hardly any sentence.

    Raises:
        ValueError: as of `check_sizes`.
    """
    check_sizes(train, valid, test)
    known = [entry for entry in entries() if not entry.held_out]
    trained = (known if seed == 1 else shuffled(known, f"train:{seed}"))[:train]
    words = frozenset[str]().union(*(entry.words for entry in trained))
    unseen = [entry for entry in entries() if entry.held_out]
    unseen.sort(key=lambda entry: not entry.words <= words)
    return {
        "train": [entry.triple for entry in trained],
        "valid": [entry.triple for entry in unseen[:valid]],
        "test": [entry.triple for entry in unseen[valid : valid + test]],
    }


def exchange(items: Sequence[Item], share: float, seed: int) -> list[Item]:
    """Exchange a share of the items, in [0, 1], among each other.

    The items at `round(share * len(items))` random positions move to one another's positions in one cycle, so that
    each of them changes its place.
    """
    places = shuffled(range(len(items)), f"exchange:{seed}")[: round(share * len(items))]
    exchanged = list(items)
    for place, other in zip(places, places[1:] + places[:1], strict=True):
        exchanged[place] = items[other]
    return exchanged


def shuffled(items: Sequence[Item], seed: str) -> list[Item]:
    """The items in a random order that is the same on every machine."""
    digest = hashlib.sha256(seed.encode()).digest()
    # Python promises that the sequence of random() stays the same, which it doesn't of shuffle()
    draw = random.Random(int.from_bytes(digest[:8], "big")).random
    order = sorted((draw(), index) for index in range(len(items)))
    return [items[index] for _, index in order]
