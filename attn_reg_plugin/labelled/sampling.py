"""Training on a part of the examples: a number, a share, or so many of each class; and what is held out of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from attn_reg_plugin.labelled.examples import Example
from attn_reg_plugin.labelled.reading import sample_of
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, LabelledTask


@dataclass(frozen=True)
class Sampling:
    """Which part; by default everything.

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
        for flag, value in (("--train-examples", self.examples), ("--train-per-class", self.per_class)):
            if value < 0:
                raise ValueError(f"{flag} is {value}, but must be at least 0")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"--train-fraction is {self.fraction}, but must lie in (0, 1]")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"--held-out is {self.held_out}, but must lie in [0, 1)")
        given = {
            "--train-examples": self.examples,
            "--train-fraction": self.fraction < 1,
            "--train-per-class": self.per_class,
        }
        if len(names := [name for name, value in given.items() if value]) > 1:
            raise ValueError(f"{' and '.join(names)} cannot be given together: each says which part is trained on")

    def check(self, task: LabelledTask) -> None:
        """Refuse what a task cannot have.

        Raises:
            ValueError: so many of each class, where there are no classes.
        """
        if self.per_class and task.kind != CLASSIFICATION:
            kind = task.kind.replace("_", " ")
            raise ValueError(f"--train-per-class is for classification, but {task.name} is a task of {kind}")

    def of(self, examples: Sequence[Example]) -> list[Example]:
        """The part of the examples, drawn at random, in their order."""
        if self.per_class:
            shuffled = random.Random(self.seed).sample(range(len(examples)), len(examples))
            chosen, count = [], dict.fromkeys((example.label for example in examples), 0)
            for index in shuffled:
                label = examples[index].label
                if count[label] < self.per_class:
                    count[label] += 1
                    chosen.append(index)
            return [examples[index] for index in sorted(chosen)]
        if self.fraction < 1:
            return sample_of(examples, max(1, round(self.fraction * len(examples))), self.seed)
        return sample_of(examples, self.examples, self.seed) if self.examples else list(examples)

    def parted(self, drawn: Sequence[Example]) -> tuple[list[Example], list[Example]]:
        """The examples that are trained on, and those held out (at least one), each in their order.

        Args:
            drawn: what `of` has given, corrupted or not.

        Raises:
            ValueError: nothing would be left to train on.
        """
        if not self.held_out:
            return list(drawn), []
        count = max(1, round(self.held_out * len(drawn)))
        if count >= len(drawn):
            raise ValueError(f"--held-out {self.held_out} leaves none of {len(drawn)} training examples to train on")
        chosen = set(random.Random(f"held out {self.seed}").sample(range(len(drawn)), count))
        parts = ([index for index in range(len(drawn)) if (index in chosen) == held] for held in (False, True))
        trained, held_out = ([drawn[index] for index in part] for part in parts)
        return trained, held_out
