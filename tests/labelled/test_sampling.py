"""Training on a part: how much it is, that it's drawn at random, and what is refused."""

from collections import Counter
from unittest import mock

import pytest

from attn_reg_plugin.labelled import Sampling, TextExample, find_task
from attn_reg_plugin.tasks.attn_reg_translation import keep_part

EXAMPLES = [TextExample(line, "a", None, int(line > 700)) for line in range(1, 1001)]


def test_pairs_that_are_all_trained_on_are_not_numbered() -> None:
    """The numbers of millions of pairs take gigabytes."""
    pairs = mock.MagicMock()
    keep_part(pairs, Sampling(seed=3))
    assert pairs.mock_calls == [], "not even counted"


@pytest.mark.parametrize(("fraction", "count"), [(0.1, 100), (0.0004, 1), (0.9996, 1000)])
def test_a_share(fraction: float, count: int) -> None:
    assert len(Sampling(fraction=fraction).of(EXAMPLES)) == count


def test_so_many_of_each_class_and_all_of_a_class_with_fewer() -> None:
    sample = Sampling(per_class=64).of(EXAMPLES)
    assert Counter(example.label for example in sample) == {0: 64, 1: 64}
    assert sample == sorted(sample, key=lambda example: example.line)
    assert sample[0].line < 100 and sample[63].line > 600, "not the first ones of a class"
    assert Counter(example.label for example in Sampling(per_class=400).of(EXAMPLES)) == {0: 400, 1: 300}


@pytest.mark.parametrize("part", [{"examples": 50}, {"fraction": 0.05}, {"per_class": 25}])
def test_each_seed_draws_anew(part: dict) -> None:
    first, again, other = (Sampling(**part, seed=seed).of(EXAMPLES) for seed in (1, 1, 2))
    assert first == again != other and len(first) == len(other) == 50


@pytest.mark.parametrize(("share", "count"), [(0.1, 20), (0.001, 1), (0.994, 199)])
def test_what_is_held_out_is_not_trained_on(share: float, count: int) -> None:
    sampling = Sampling(examples=200, held_out=share)
    drawn = sampling.of(EXAMPLES)
    trained, held_out = sampling.parted(drawn)
    assert len(held_out) == count and sorted([*trained, *held_out], key=lambda example: example.line) == drawn
    assert all(part == sorted(part, key=lambda example: example.line) for part in (trained, held_out))
    assert (trained, held_out) == Sampling(examples=200, held_out=share).parted(drawn), "drawn by the seed alone"
    assert held_out != Sampling(examples=200, held_out=share, seed=2).parted(drawn)[1]


def test_so_many_of_each_class_are_parted_class_by_class() -> None:
    sampling = Sampling(per_class=40, held_out=0.8)
    parts = sampling.parted(sampling.of(EXAMPLES))
    assert [Counter(example.label for example in part) for part in parts] == [{0: 8, 1: 8}, {0: 32, 1: 32}]
    trained, held_out = sampling.parted([EXAMPLES[0], EXAMPLES[1], EXAMPLES[-1]])
    assert {one.label for one in trained} == {0, 1} and len(held_out) == 1, "a rare class is not held out whole"


def test_not_everything_can_be_held_out() -> None:
    with pytest.raises(ValueError, match=r"--held-out 0\.5 leaves none of 1 training examples to train on"):
        Sampling(held_out=0.5).parted(EXAMPLES[:1])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"held_out": 1.0}, r"--held-out is 1.0, but must lie in \[0, 1\)"),
        ({"per_class": -1}, "--train-per-class is -1, but must be at least 0"),
        ({"fraction": float("nan")}, "--train-fraction is nan, but must lie in"),
    ],
)
def test_refusals(part: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(**part)


@pytest.mark.parametrize("task", ["stsb", "wnut17", "swag"])
def test_only_classes_can_be_drawn_by_class(task: str) -> None:
    with pytest.raises(ValueError, match=f"--train-per-class is for classification, but {task} is a task of"):
        Sampling(per_class=1).check(find_task(task))
