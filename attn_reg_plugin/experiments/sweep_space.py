"""The space of a sweep: which keys it varies and over what, as a grid or as ranges for a sampler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: how a range is written in a file, `{log: [low, high]}`, and what is drawn from it
RANGES = {
    "log": "a number whose logarithm is uniform",
    "uniform": "a number",
    "int": "a whole number",
}
_FORMS = "a list of values, " + " or ".join(f"{{{kind}: [low, high]}}" for kind in RANGES)


@dataclass(frozen=True)
class Dimension:
    """A key that a sweep varies.

    Attributes:
        key: an option of the method, or a setting of the comparison.
        shared: whether plain training has it too, as it has the learning rate.
        values: its values; empty where it has a range.
        kind: of the range, one of `RANGES`.
        low, high: the ends of the range; both may be drawn.
    """

    key: str
    shared: bool = False
    values: tuple[Any, ...] = ()
    kind: str = ""
    low: float = 0.0
    high: float = 0.0

    @property
    def tried(self) -> tuple[Any, ...]:
        """The values that show whether all are possible: each of a list, the ends of a range."""
        return self.values or (self.low, self.high)

    def suggest(self, trial: Any) -> Any:
        """The value for one of Optuna's trials."""
        if self.values:
            return trial.suggest_categorical(self.key, list(self.values))
        if self.kind == "int":
            return trial.suggest_int(self.key, int(self.low), int(self.high))
        return trial.suggest_float(self.key, self.low, self.high, log=self.kind == "log")


def read_dimension(key: str, given: Any) -> Dimension:
    """A key's entry of a file, `[0.1, 0.2]` or `{log: [1e-5, 1e-4]}`.

    Raises:
        ValueError: it is something else, empty, or not a range.
    """
    if isinstance(given, list) and given:
        return Dimension(key, values=tuple(given))
    if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in RANGES:
        raise ValueError(f"{key} is {given!r}, but must be {_FORMS}")
    kind, ends = next(iter(given.items()))
    try:
        low, high = (float(end) for end in ends)  # YAML reads 1e-5, without a point, as text
    except (TypeError, ValueError):
        raise ValueError(f"{key}: {kind} is {ends!r}, but must be two numbers, [low, high]") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{key}: {kind} is {ends!r}, but the first number must be below the second, both finite")
    if kind == "log" and low <= 0:
        raise ValueError(f"{key}: log is {ends!r}, but both must be above 0")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"{key}: int is {ends!r}, but both must be whole numbers")
    whole = int if kind == "int" else float
    return Dimension(key, kind=str(kind), low=whole(low), high=whole(high))


def text_of(values: Mapping[str, Any]) -> str:
    """Values for titles: `p 0.1, q 0.3`."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def grid(dimensions: Sequence[Dimension]) -> list[dict[str, Any]]:
    """All combinations of the values; the last key varies fastest. Without keys it is one empty combination."""
    keys = [dimension.key for dimension in dimensions]
    products = itertools.product(*(dimension.values for dimension in dimensions))
    return [dict(zip(keys, values, strict=True)) for values in products]


@dataclass(frozen=True)
class Slot:
    """A place in an arm that one trial fills.

    Attributes:
        number: from 0.
        seed: of its training.
        values: of its keys; None where a sampler draws them.
    """

    number: int
    seed: int
    values: dict[str, Any] | None


@dataclass(frozen=True)
class Arm:
    """One side of a sweep, the method or plain training, with its trials' places.

    Attributes:
        name: `plain`, or the method's.
        title: in tables.
        dimensions: the keys that vary in it.
        slots: as many in every arm of a sweep, so that all have the same budget.
    """

    name: str
    title: str
    dimensions: tuple[Dimension, ...]
    slots: tuple[Slot, ...]


def slots_of(dimensions: Sequence[Dimension], seeds: Sequence[int], trials: int) -> tuple[Slot, ...]:
    """The method's places: every combination with every seed, or as many as there are trials for a sampler.

    Args:
        trials: 0 for the whole grid. A sampler's trials take the seeds in turn.
    """
    if not trials:
        places = [(seed, values) for values in grid(dimensions) for seed in seeds]
    else:
        places = [(seeds[number % len(seeds)], None) for number in range(trials)]
    return tuple(Slot(number, seed, values) for number, (seed, values) in enumerate(places))


def equal_budget(slots: Sequence[Slot], shared: Sequence[Dimension], seeds: Sequence[int]) -> tuple[Slot, ...]:
    """Plain training's places: as many, each with a seed of its own, with the same values of the keys that it has.

    Args:
        slots: the method's.
        shared: the keys that plain training has too; without any, its trials differ in the seed only.
        seeds: the sweep's, which come first; then the whole numbers above them.
    """
    more = itertools.count(max(seeds) + 1)
    own = [*seeds, *itertools.islice(more, max(0, len(slots) - len(seeds)))]
    keys = [dimension.key for dimension in shared]
    values = [{key: slot.values[key] for key in keys} if slot.values is not None else None for slot in slots]
    drawn = [{} if not keys else chosen for chosen in values]
    return tuple(Slot(slot.number, own[i], drawn[i]) for i, slot in enumerate(slots))
