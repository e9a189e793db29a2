"""The phrasebook: the file keeps its promises, and sizes, seeds and noise are slices, draws and exchanges of it."""

import hashlib
import json
import re

import pytest

from attn_reg_plugin.corpora import phrasebook
from attn_reg_plugin.corpora.phrasebook import TRAIN_PAIRS, entries, exchange, splits


def _digest(triples: list[phrasebook.Triple]) -> str:
    return hashlib.sha256(json.dumps(triples).encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    ("sizes", "digests"),
    [
        ((4000, 500, 500), ["1489880bdfc2", "abdcab227af5", "acab21777141"]),
        ((300, 30, 40), ["00003fd00404", "25b40a93bdf0", "8aae6e0fccbb"]),
    ],
)
def test_seed_1_gives_what_the_generator_gave(sizes: tuple[int, int, int], digests: list[str]) -> None:
    assert [_digest(split) for split in splits(*sizes).values()] == digests


@pytest.mark.parametrize("seed", [1, 7])
def test_valid_and_test_have_unseen_combinations_of_known_words(seed: int) -> None:
    made = splits(2000, 150, 200, seed)
    assert {name: len(split) for name, split in made.items()} == {"train": 2000, "valid": 150, "test": 200}
    assert len({triple for split in made.values() for triple in split}) == 2350
    found = {entry.triple: entry for entry in entries()}
    known = frozenset[str]().union(*(found[triple].words for triple in made["train"]))
    assert not any(found[triple].held_out for triple in made["train"])
    for triple in made["valid"] + made["test"]:
        assert found[triple].held_out and found[triple].words <= known


def test_other_seeds_draw_other_training_pairs_and_no_test_for_choosing() -> None:
    first, second, third = (splits(1500, 500, 500, seed) for seed in (1, 2, 3))
    assert len(set(first["train"]) & set(second["train"])) < 500
    assert second["train"] != third["train"] and second == splits(1500, 500, 500, 2)
    assert len(set(second["valid"]) & set(first["test"])) < 20


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.02, 2), (0.25, 25), (1.0, 100)])
def test_an_exchange_moves_exactly_its_share(share: float, number: int) -> None:
    items = list(range(100))
    made = exchange(items, share, seed=3)
    assert sum(one != other for one, other in zip(items, made, strict=True)) == number
    assert sorted(made) == items and made == exchange(items, share, seed=3)
    assert number < 25 or made != exchange(items, share, seed=4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 5, 5), "but train=0, valid=5 and test=5 were asked for."),
        ((TRAIN_PAIRS + 1, 1, 1), "The phrasebook has 10458 pairs for train and 1542 for valid and test together"),
        ((1, 1000, 543), "but train=1, valid=1000 and test=543 were asked for."),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        splits(*sizes)
