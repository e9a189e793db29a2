"""Training on a part of the examples: a number, a share, or so many of each class; and a share held out of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_reg_plugin.labelled.examples import Example
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, LabelledTask
from attn_reg_plugin.regularizers.base.options import Interval


def sample_of(examples: Sequence[Example], count: int, seed: int = 1) -> list[Example]:
    """Draw that many of the examples at random, in their order; all if there aren't more.

    Files may be sorted by label or by genre, so the first ones would not represent all.
    """
    chosen = random.Random(seed).sample(range(len(examples)), min(count, len(examples)))
    return [examples[index] for index in sorted(chosen)]


def check_range(flag: str, value: float, within: str) -> None:
    """Refuse a flag's number outside an `Interval`, by a ValueError."""
    if value not in (allowed := Interval(within)):
        raise ValueError(f"{flag} is {value}, but must {allowed}")


@dataclass(frozen=True)
class Sampling:
    """The part; by default everything.

    Attributes:
        examples: so many; 0: all.
        fraction: this share of them, in (0, 1].
        per_class: at most so many of every class; 0: all.
        seed: of the draw.
        held_out: this share of what was drawn isn't trained on, but chosen by, in [0, 1).

    Raises:
        ValueError: a value out of its range, or more than one of the first three.
    """

    examples: int = 0
    fraction: float = 1.0
    per_class: int = 0
    seed: int = 1
    held_out: float = 0.0

    def __post_init__(self) -> None:
        check_range("--train-examples", self.examples, "[0, inf)")
        check_range("--train-per-class", self.per_class, "[0, inf)")
        check_range("--train-fraction", self.fraction, "(0, 1]")
        check_range("--held-out", self.held_out, "[0, 1)")
        given = {"examples": self.examples, "fraction": self.fraction < 1, "per-class": self.per_class}
        if len(names := [f"--train-{name}" for name, value in given.items() if value]) > 1:
            raise ValueError(f"{' and '.join(names)} cannot be given together: each says which part is trained on")

    def check(self, task: LabelledTask) -> None:
        """Refuse so many of each class where there are no classes, by a ValueError."""
        if self.per_class and task.kind != CLASSIFICATION:
            raise ValueError(f"--train-per-class is for classification, but {task.name} is a task of {task.kind}")

    def of(self, examples: Sequence[Example]) -> list[Example]:
        """Draw the part at random; the examples stay in their order.

        Raises:
            ValueError: more are asked for of every class than any of them has.
        """
        if self.per_class:
            of_class: dict[Any, list[int]] = {}
            for index in random.Random(self.seed).sample(range(len(examples)), len(examples)):
                of_class.setdefault(examples[index].label, []).append(index)  # type: ignore[union-attr]
            if self.per_class > (most := max(map(len, of_class.values()), default=0)):
                raise ValueError(f"--train-per-class is {self.per_class}, but no class has more than {most} examples")
            chosen = [index for found in of_class.values() for index in found[: self.per_class]]
            return [examples[index] for index in sorted(chosen)]
        if self.fraction < 1:
            return sample_of(examples, max(1, round(self.fraction * len(examples))), self.seed)
        return sample_of(examples, self.examples, self.seed) if self.examples else list(examples)

    def parted(self, drawn: Sequence[Example]) -> tuple[list[Example], list[Example]]:
        """Part what `of` gave into examples that are trained on and held out (at least one), each in their order.

        So many of each class are parted class by class, and one of each is trained on.

        Raises:
            ValueError: nothing would be left to train on, or to hold out.
        """
        if not self.held_out:
            return list(drawn), []
        groups: dict[Any, list[int]] = {}
        for index, example in enumerate(drawn):
            groups.setdefault(example.label if self.per_class else None, []).append(index)
        draw, chosen = random.Random(f"held out {self.seed}"), set()
        for group in groups.values():
            count = max(1, round(self.held_out * len(group)))
            chosen |= set(draw.sample(group, min(count, len(group) - 1) if self.per_class else count))
        if not 0 < len(chosen) < len(drawn):
            what = "train on" if chosen else "hold out, but for one of each class"
            raise ValueError(f"--held-out {self.held_out} leaves none of {len(drawn)} training examples to {what}")
        trained = [example for index, example in enumerate(drawn) if index not in chosen]
        return trained, [drawn[index] for index in sorted(chosen)]
