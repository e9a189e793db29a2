"""Splits of a corpus arranged anew: halves of the validation set, pairs set aside for testing, and noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from attn_reg_plugin.corpora import phrasebook
from attn_reg_plugin.corpora.parallel import Pair


@dataclass(frozen=True)
class Split:
    """A part of a corpus.

    Attributes:
        name: fairseq's name: `train`, `valid`, `test`, `test1`, ...
        title: the corpus's own name, such as `newstest2016`.
        places: the source and the target side, as messages name them.
        pairs: opens the stream of pairs.
    """

    name: str
    title: str
    places: tuple[str, str]
    pairs: Callable[[], Iterator[Pair]]


@dataclass(frozen=True)
class Arrangement:
    """Changes of the splits; by default only a validation set without a test set is split.

    Attributes:
        split_valid: split the validation set in halves, to develop on one and to report on the other.
        set_aside: so many training pairs, drawn at random, become a test set.
        noise: share of the training targets that are exchanged among each other, in [0, 1].
        seed: of both draws.
    """

    split_valid: bool = False
    set_aside: int = 0
    noise: float = 0.0
    seed: int = 1

    def describe(self) -> dict[str, Any]:
        """Describe what isn't as by default, for the manifest."""
        found = {name: value for name, value in asdict(self).items() if value and name != "seed"}
        return {**found, "seed": self.seed} if self.set_aside or self.noise else found

    def of(self, train: Split, valid: Split, tests: Sequence[Split]) -> tuple[list[Split], list[str]]:
        """Arrange the splits; training comes first. Sentences say what the user should know.

        Raises:
            ValueError: too few pairs for what is asked.
        """
        notes = []
        if self.split_valid or not tests:
            valid, half, note = _halves(valid, bool(tests))
            tests, notes = [half, *tests], [note]
        if self.set_aside or self.noise:
            pairs = list(train.pairs())
            if self.set_aside:
                pairs, chosen, note = self._set_aside(train, pairs)
                tests, notes = [*tests, replace(train, title="set-aside", pairs=_again(chosen))], [*notes, note]
            if self.noise:
                pairs, note = self._noisy(train, pairs)
                notes.append(note)
            train = replace(train, pairs=_again(pairs))
        return [train, valid, *(replace(test, name=f"test{n or ''}") for n, test in enumerate(tests))], notes

    def _set_aside(self, train: Split, pairs: list[Pair]) -> tuple[list[Pair], list[Pair], str]:
        """Draw pairs; the pairs that stay (none that shares a side with a drawn one), those drawn, and the note."""
        whole = _whole(pairs)
        drawn = phrasebook.shuffled([pairs[index].line for index in whole], f"aside:{self.seed}")
        lines = set(drawn[: self.set_aside])
        chosen = [pair for pair in pairs if pair.line in lines]
        left = [pair for pair in pairs if pair.line not in lines]
        sources, targets = {_plain(pair.source) for pair in chosen}, {_plain(pair.target) for pair in chosen}
        kept = [pair for pair in left if _plain(pair.source) not in sources and _plain(pair.target) not in targets]
        if not _whole(kept):
            raise ValueError(f"--set-aside {self.set_aside} leaves none of the {len(whole)} pairs of {train.places[0]}")
        note = f"{len(chosen)} training pairs are set aside as a test set"
        same = len(left) - len(kept)
        return kept, chosen, f"{note}, and {same} left out that share a side with one of them" if same else note

    def _noisy(self, train: Split, pairs: list[Pair]) -> tuple[list[Pair], str]:
        """Exchange targets; pairs with an empty side have no part in it."""
        whole = _whole(pairs)
        number = round(self.noise * len(whole))
        if number < 2:
            raise ValueError(
                f"--noise {self.noise} exchanges {number} of the {len(whole)} targets of {train.places[1]}, but must "
                "exchange at least 2"
            )
        targets = phrasebook.exchange([pairs[index].target for index in whole], self.noise, self.seed)
        noisy = list(pairs)
        for index, target in zip(whole, targets, strict=True):
            noisy[index] = pairs[index]._replace(target=target)
        return noisy, f"{number} of {len(whole)} training targets are exchanged among each other"


def _again(pairs: list[Pair]) -> Callable[[], Iterator[Pair]]:
    return lambda: iter(pairs)


def _whole(pairs: Sequence[Pair]) -> list[int]:
    """Find the places of the pairs that have both sides."""
    return [index for index, pair in enumerate(pairs) if pair.source.strip() and pair.target.strip()]


def _plain(text: str) -> str:
    """Reduce a sentence to its letters and digits, small, to compare it by."""
    return "".join(letter for letter in text.casefold() if letter.isalnum()) or text


def _halves(valid: Split, asked: bool) -> tuple[Split, Split, str]:
    """Part the validation pairs into a validation and a test set; `asked` where there is a test set, too."""
    total = sum(1 for _ in valid.pairs())
    half = total // 2
    if half == 0:
        reason = "" if asked else ", and there is no test set"
        raise ValueError(f"{valid.places[0]} has {total} lines, too few to be split into valid and test{reason}")
    first, second = f"{valid.title}a", f"{valid.title}b"
    what = f"{valid.title} is split" if asked else f"there is no test set, so {valid.title} is split"
    note = f"{what}: lines 1 to {half} are valid ({first}), lines {half + 1} to {total} are test ({second})"
    return (
        Split("valid", first, valid.places, lambda: islice(valid.pairs(), half)),
        Split("test", second, valid.places, lambda: islice(valid.pairs(), half, None)),
        note,
    )
