"""Wrong labels and planted words: how many, which, drawn by the seed alone; and what is refused."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from attn_reg_plugin.labelled import ChoiceExample, Corruption, TextExample, find_task
from attn_reg_plugin.labelled.corruption import rare_words
from tests.labelled.tokenizers import bert_tokenizer
from tests.models.hf_folders import tokenizer

MNLI, SWAG = (find_task(name) for name in ("mnli", "swag"))
TEXTS = [TextExample(line, f"text {line}", "other", line % 3) for line in range(900)]
CHOICES = [ChoiceExample(line, "a", ("b", "c", "d", "e"), line % 4) for line in range(1000)]
WORDS = ("yes", "maybe", "no")


def changed(before: list[Any], after: list[Any]) -> list[tuple[Any, Any]]:
    """Labels that differ, before and after; nothing else does."""
    assert [replace(example, label=None) for example in before] == [replace(example, label=None) for example in after]
    pairs = [(one.label, other.label) for one, other in zip(before, after, strict=True)]
    return [pair for pair in pairs if pair[0] != pair[1]]


@pytest.mark.parametrize(("task", "examples", "others"), [(MNLI, TEXTS, 2), (SWAG, CHOICES, 3)])
def test_noise_puts_any_other_label_in_place_of_a_share_of_them(task: Any, examples: list[Any], others: int) -> None:
    found = changed(examples, Corruption(label_noise=0.25).of_training(examples, task))
    assert len(found) == len(examples) // 4
    counts = Counter(found)
    assert len(counts) == (others + 1) * others and min(counts.values()) > len(found) / len(counts) / 2


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
def test_a_planted_word_says_the_label_that_is_trained_on(share: float) -> None:
    planted = Corruption(label_noise=0.2, shortcut=share, words=WORDS if share else ()).of_training(TEXTS, MNLI)
    pairs = [(one, other) for one, other in zip(TEXTS, planted, strict=True) if one.first != other.first]
    assert len(pairs) == round(share * len(TEXTS))
    assert all(other.first == f"{WORDS[other.label]} {one.first}" for one, other in pairs)
    assert all(one.second == other.second for one, other in zip(TEXTS, planted, strict=True))
    assert (
        len(changed(TEXTS, [replace(other, first=one.first) for one, other in zip(TEXTS, planted, strict=True)])) == 180
    )


def test_planted_words_say_nothing_at_evaluation() -> None:
    shortcut = Corruption(shortcut=0.5, words=WORDS)
    assert shortcut.of_evaluation(TEXTS, "valid") == TEXTS
    planted = replace(shortcut, at_evaluation="random").of_evaluation(TEXTS, "valid")
    together = Counter((example.first.split()[0], example.label) for example in planted)
    assert set(together) == {(word, label) for word in WORDS for label in range(3)}
    assert all(70 <= count <= 130 for count in together.values()), "each word as often with each label"
    assert [example.first.partition(" ")[2] for example in planted] == [example.first for example in TEXTS]


def test_words_are_chosen_that_are_one_piece_and_rare() -> None:
    bert = bert_tokenizer()  # a cat dog sleep ##s ##ing the un ##want ##ed . runs
    assert rare_words(bert, 2, [TextExample(1, "the cat sleeps")]) == ("runs", "sleep")
    assert rare_words(bert, 2, [TextExample(1, "A cat.", "it runs")]) == ("sleep", "runs"), "then what is there"
    assert rare_words(bert, 4, [TextExample(1, "the cat")]) == ("runs", "sleep", "un", "dog"), "then short ones"
    with pytest.raises(ValueError, match="the tokenizer knows 7 words as one piece; give 8 by --shortcut-words"):
        rare_words(bert, 8, [])


def test_the_words_of_a_corruption() -> None:
    chosen = Corruption(shortcut=0.5).with_words(MNLI, tokenizer(), TEXTS)
    assert len(set(chosen.words)) == 3 and Corruption().with_words(MNLI, tokenizer(), TEXTS) == Corruption()
    given = Corruption(shortcut=0.5, words=("w1", "w2", "w3x"))
    assert given.with_words(MNLI, tokenizer(), TEXTS) == given
    with pytest.raises(ValueError, match="--shortcut-words has 'perhaps', which the model's tokenizer does not know"):
        replace(given, words=("w1", "w2", "perhaps")).with_words(MNLI, tokenizer(), TEXTS)
    with pytest.raises(ValueError, match="has 'cat', which the model's tokenizer does not know, or not from"):
        replace(given, words=("cat", "Cat", "dog")).with_words(MNLI, bert_tokenizer(), TEXTS)


@pytest.mark.parametrize(
    ("how", "task", "said"),
    [
        ({"label_noise": 1.0}, "rte", r"--label-noise is 1.0, but must lie in \[0, 1\)"),
        ({"shortcut": 1.1}, "rte", r"--shortcut is 1.1, but must lie in \[0, 1\]"),
        ({"shortcut": 0.5, "at_evaluation": "gold"}, "rte", "--shortcut-at-evaluation is gold, but must be none"),
        ({"shortcut": 0.5, "words": ("a", "a")}, "rte", "--shortcut-words is a,a, but must be different words"),
        ({"words": ("a", "b")}, "rte", "--shortcut-words says something about --shortcut, which is 0"),
        ({"at_evaluation": "random"}, "rte", "--shortcut-at-evaluation says something about --shortcut, which is 0"),
        ({"label_noise": 0.1}, "wnut17", "--label-noise is for classification and multiple choice, but wnut17 is a"),
        ({"shortcut": 0.1}, "swag", "--shortcut is for classification, but swag is a task of multiple choice"),
        (
            {"shortcut": 0.1, "words": WORDS},
            "rte",
            "--shortcut-words has 3, but must have one for each of the 2 classes",
        ),
    ],
)
def test_refusals(how: dict[str, Any], task: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Corruption(**how).check(find_task(task))


@pytest.mark.parametrize(("share", "flag"), [("label_noise", "--label-noise"), ("shortcut", "--shortcut")])
def test_a_share_that_comes_to_nothing_is_refused(share: str, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} 0.001 is 0 of 100 training examples, but it takes at least 1"):
        Corruption(**{share: 0.001}).of_training(TEXTS[:100], MNLI)
