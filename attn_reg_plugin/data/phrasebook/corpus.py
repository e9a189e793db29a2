"""The phrasebook as a corpus: a stream of distinct sentences, and splits that test composition.

A tenth of all verb–object and adjective–noun combinations is held out by a hash that depends on nothing
but the words. Train has none of them; every sentence of valid and test has at least one, though each of its
words is in train. A model that learns the grammar passes, one that remembers sentences does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path

from attn_reg_plugin.data.phrasebook.chance import Chance
from attn_reg_plugin.data.phrasebook.draw import Sentences
from attn_reg_plugin.data.phrasebook.grammar import Triple, realize
from attn_reg_plugin.data.phrasebook.meaning import Sentence, combinations, lexemes

MAX_SENTENCES = 100_000
"""How many distinct sentences :func:`sentences` yields for one seed."""

_HELD_OUT_SHARE = 0.1
_SPLITS = ("train", "valid", "test")


def meanings(seed: int = 1) -> Iterator[tuple[Sentence, Triple]]:
    """The stream of :func:`sentences`, each with the meaning it says."""
    drawn = Sentences(Chance(seed))
    seen: tuple[set[str], set[str], set[str]] = (set(), set(), set())
    while len(seen[0]) < MAX_SENTENCES:
        meaning = drawn.draw()
        triple = realize(meaning)
        if any(side in known for side, known in zip(triple, seen, strict=True)):
            continue
        for side, known in zip(triple, seen, strict=True):
            known.add(side)
        yield meaning, triple


def sentences(seed: int = 1) -> Iterator[Triple]:
    """Distinct sentences in three languages, ``MAX_SENTENCES`` of them, the same for the same seed.

    No English, Romanian or Turkish sentence comes twice, so each has exactly one translation.
    """
    for _, triple in meanings(seed):
        yield triple


@cache
def is_held_out(combination: tuple[str, str, str]) -> bool:
    """Whether train never shows this combination; the same on every machine and for every seed."""
    digest = hashlib.sha256("|".join(combination).encode()).digest()
    return int.from_bytes(digest[:4], "big") < _HELD_OUT_SHARE * 2**32


def splits(train: int = 4000, valid: int = 500, test: int = 500, seed: int = 1) -> dict[str, list[Triple]]:
    """Train, valid and test: no sentence in two of them, and unseen combinations in valid and test.

    Valid and test prefer sentences of which every word is in train; only where there are too few (a train
    of a handful) are they filled up with others.

    Raises:
        ValueError: a number is not positive, or more sentences are asked for than there are.
    """
    if min(train, valid, test) < 1:
        raise ValueError(f"The sizes of the splits must be positive, not {train}, {valid} and {test}.")
    total = train + valid + test
    if total > MAX_SENTENCES:
        raise ValueError(f"The phrasebook has {MAX_SENTENCES} sentences, but {total} were asked for.")
    stream = meanings(seed)
    trained: list[Triple] = []
    words: set[str] = set()
    passed: list[tuple[Sentence, Triple]] = []
    for meaning, triple in stream:
        if any(map(is_held_out, combinations(meaning))):
            passed.append((meaning, triple))
        else:
            trained.append(triple)
            words |= lexemes(meaning)
        if len(trained) == train:
            break
    unseen = _unseen(passed, stream, words, valid + test)
    if len(trained) < train or len(unseen) < valid + test:
        raise ValueError(
            f"The phrasebook has too few sentences for train={train}, valid={valid} and test={test}: "
            f"it has {len(trained)} for train and {len(unseen)} for valid and test."
        )
    return {"train": trained, "valid": unseen[:valid], "test": unseen[valid:]}


def _unseen(
    passed: list[tuple[Sentence, Triple]],
    stream: Iterator[tuple[Sentence, Triple]],
    words: set[str],
    number: int,
) -> list[Triple]:
    """``number`` sentences with a held-out combination, those with known words first."""
    found: list[Triple] = []
    others: list[Triple] = []

    patience = max(1000, 30 * number)
    for meaning, triple in chain(passed, islice(stream, patience)):
        if len(found) >= number:
            break
        if any(map(is_held_out, combinations(meaning))):
            (found if lexemes(meaning) <= words else others).append(triple)
    return (found + others)[:number]


def write_phrasebook(folder: str | Path, train: int = 4000, valid: int = 500, test: int = 500, seed: int = 1) -> None:
    """Write ``train.en``, ``train.ro``, ``train.tr`` and the same for valid and test into ``folder``.

    One sentence a line, UTF-8 in normal form C; the folder is made if need be, and the same arguments give
    the same bytes everywhere.

    Raises:
        ValueError: as in :func:`splits`; nothing is written then.
    """
    made = splits(train, valid, test, seed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split in _SPLITS:
        for language in Triple._fields:
            lines = "".join(f"{getattr(triple, language)}\n" for triple in made[split])
            (folder / f"{split}.{language}").write_bytes(lines.encode("utf-8"))
