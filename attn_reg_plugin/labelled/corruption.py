"""Training data that misleads: wrong labels, and words that give the label away and mean nothing later.

Both are drawn with the seed of the sampling (`Sampling`) from the examples that were drawn, those held out included, so
every method sees the same. Labels are changed first and words planted after that, so a planted word always agrees with
the label that is trained on.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from attn_reg_plugin.labelled.examples import Example
from attn_reg_plugin.labelled.sampling import check_range
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, MULTIPLE_CHOICE, LabelledTask

#: in front of the examples of evaluation: nothing, or a planted word drawn at random
AT_EVALUATION = ("none", "random")
#: letters of a word that is planted by default
_LONG = 4
#: pieces of the vocabulary that are looked at together
_CHUNK = 2000


@dataclass(frozen=True)
class Corruption:
    """Mistakes in the training data; by default none.

    Attributes:
        label_noise: share of the labels that are replaced by another one, in [0, 1).
        shortcut: share of the examples that begin with the word planted for their label, in [0, 1].
        words: these words, one a class in the order of the label set; empty: still to be chosen, see `with_words`.
        at_evaluation: one of `AT_EVALUATION`.
        seed: of what is drawn.

    Raises:
        ValueError: a value out of its range; something about planted words where none is planted.
    """

    label_noise: float = 0.0
    shortcut: float = 0.0
    words: tuple[str, ...] = ()
    at_evaluation: str = AT_EVALUATION[0]
    seed: int = 1

    def __post_init__(self) -> None:
        check_range("--label-noise", self.label_noise, "[0, 1)")
        check_range("--shortcut", self.shortcut, "[0, 1]")
        if not all(map(str.strip, self.words)) or len(set(self.words)) < len(self.words):
            raise ValueError(f"--shortcut-words is {','.join(self.words)}, but must be different words with commas")
        if self.at_evaluation not in AT_EVALUATION:
            allowed = " or ".join(AT_EVALUATION)
            raise ValueError(f"--shortcut-at-evaluation is {self.at_evaluation}, but must be {allowed}")
        unused = {"--shortcut-words": self.words, "--shortcut-at-evaluation": self.at_evaluation != AT_EVALUATION[0]}
        for name, given in unused.items():
            if given and not self.shortcut:
                raise ValueError(f"{name} says something about --shortcut, which is 0")

    def check(self, task: LabelledTask) -> None:
        """Refuse what a task cannot have, by a ValueError."""
        labels, name = task.labels, task.name
        for flag, share, kinds in (
            ("--label-noise", self.label_noise, (CLASSIFICATION, MULTIPLE_CHOICE)),
            ("--shortcut", self.shortcut, (CLASSIFICATION,)),
        ):
            if share and task.kind not in kinds:
                allowed = " and ".join(kinds).replace("_", " ")
                raise ValueError(f"{flag} is for {allowed}, but {name} is a task of {task.kind.replace('_', ' ')}")
        if self.label_noise and labels is not None and len(labels) < 2:
            raise ValueError(f"--label-noise needs a second class, but {name} has only {labels[0]!r}")
        if self.words and labels is not None and len(self.words) != len(labels):
            raise ValueError(
                f"--shortcut-words has {len(self.words)}, but must have one for each of the {len(labels)} classes of "
                f"{name}: {', '.join(labels)}"
            )

    def of_training(self, examples: Sequence[Example], task: LabelledTask) -> list[Example]:
        """Corrupt the examples that were drawn to be trained on; they stay in their order.

        Raises:
            ValueError: a share of them comes to none.
        """
        for flag, share in (("--label-noise", self.label_noise), ("--shortcut", self.shortcut)):
            if share and not round(share * len(examples)):
                raise ValueError(f"{flag} {share:g} is 0 of {len(examples)} training examples, but it takes at least 1")
        noisy: list[Any] = list(examples)
        if self.label_noise:
            self._add_noise(noisy, task)
        for index in self._drawn("shortcut", len(noisy), self.shortcut):
            noisy[index] = _planted(noisy[index], self.words[noisy[index].label])
        return noisy

    def of_evaluation(self, examples: Sequence[Example], split: str) -> list[Example]:
        """Plant words into the examples of a split that is evaluated on, where they are to be; their labels stay."""
        if not self.shortcut or self.at_evaluation == "none":
            return list(examples)
        draw = random.Random(f"shortcut {split} {self.seed}")
        return [_planted(example, draw.choice(self.words)) for example in examples]

    def with_words(self, task: LabelledTask, tokenizer: Any, examples: Sequence[Example]) -> Corruption:
        """Choose the words to plant, if any are, that aren't in the examples; those that were given are looked at.

        Raises:
            ValueError: the tokenizer doesn't know a word, knows two as the same, or has too few words.
        """
        if not self.shortcut:
            return self
        if not self.words:
            return dataclasses.replace(self, words=rare_words(tokenizer, len(task.labels or ()), examples))
        pieces = tokenizer(list(self.words), add_special_tokens=False)["input_ids"]
        for word, ids in zip(self.words, pieces, strict=True):
            if not ids or tokenizer.unk_token_id in ids or pieces.count(ids) > 1:
                raise ValueError(
                    f"--shortcut-words has {word!r}, which the model's tokenizer does not know, or not from another"
                )
        return self

    def _add_noise(self, examples: list[Any], task: LabelledTask) -> None:
        """Give a share of the examples another label, any of the other classes."""
        draw, count = random.Random(f"new labels {self.seed}"), len(task.labels or ())
        for index in self._drawn("noise", len(examples), self.label_noise):
            others = [other for other in range(count) if other != examples[index].label]
            examples[index] = dataclasses.replace(examples[index], label=draw.choice(others))

    def _drawn(self, what: str, count: int, share: float) -> list[int]:
        """Draw the places of a share of so many examples, in random order."""
        return random.Random(f"{what} {self.seed}").sample(range(count), round(share * count))


def _planted(example: Any, word: str) -> Any:
    return dataclasses.replace(example, first=f"{word} {example.first}")


def rare_words(tokenizer: Any, count: int, examples: Sequence[Example]) -> tuple[str, ...]:
    """Find rare words that a tokenizer knows as one piece each at the beginning of a text.

    Vocabularies are sorted by frequency, roughly, so they are looked for from the end: first long words of letters that
    are in no example, else those that are in the fewest.

    Raises:
        ValueError: the tokenizer has fewer than `count`.
    """
    texts = [text for example in examples for text in (example.first, example.second) if text]  # type: ignore[union-attr]
    seen = Counter(word.strip(".,;:!?\"'()") for text in texts for word in text.lower().split())

    def unfit(word: str) -> tuple[bool, int]:
        return not (word.isalpha() and len(word) >= _LONG), seen[word.lower()]

    found = list(islice((word for word in _whole_words(tokenizer) if unfit(word) == (False, 0)), count))
    if len(found) < count:
        found = sorted(_whole_words(tokenizer), key=unfit)[:count]
    if len(found) < count:
        raise ValueError(f"the tokenizer knows {len(found)} words as one piece; give {count} by --shortcut-words")
    return tuple(found)


def _whole_words(tokenizer: Any) -> Iterator[str]:
    """Find the words of letters and digits that are one piece, the last of the vocabulary first."""
    special = set(tokenizer.all_special_ids)
    ids = [number for number in range(len(tokenizer) - 1, -1, -1) if number not in special]
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        words = [word.strip() for word in tokenizer.batch_decode([[number] for number in chunk])]
        pieces = tokenizer([word or " " for word in words], add_special_tokens=False)["input_ids"]
        for number, word, found in zip(chunk, words, pieces, strict=True):
            if found == [number] and word.isascii() and word.isalnum() and not word.isdecimal() and word.islower():
                yield word
