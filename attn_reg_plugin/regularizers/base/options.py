"""The options of a method: each declared once, with its help, choices and range, and all checked in one place."""

import dataclasses
import math
import numbers
import sys
from dataclasses import dataclass, field
from typing import Any

#: declared type -> what its values are, in words
_KINDS = {"bool": "True or False", "int": "a whole number", "float": "a number", "str": "text"}


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, written as in mathematics: `[0, 1)` has its 0 and not its 1.

    Attributes:
        text: such as `[0, 1]`, `(0, inf)` or `[1, inf)`; infinity itself is never inside.
    """

    text: str

    @property
    def bounds(self) -> tuple[float, float]:
        """The two ends."""
        low, high = self.text[1:-1].split(",")
        return float(low), float(high)

    def __contains__(self, value: float) -> bool:
        low, high = self.bounds
        above = low < value or (self.text[0] == "[" and low == value)
        below = value < high or (self.text[-1] == "]" and value == high)
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        low, high = self.bounds
        if high < math.inf:
            return f"lie in {self.text}"
        return f"be {'at least' if self.text[0] == '[' else 'above'} {low:g}"


class OptionError(ValueError):
    """An option of a method that cannot be used with the model it is attached to, or names a file that is missing.

    Attributes:
        option: its name.
        method: whose it is, where several act together.
    """

    method: str = ""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, within: str | None = None) -> Any:
    """A documented field of a method; faces turn it into a flag, and `check_options` holds it to what it declares.

    Args:
        default: if none is given.
        help: one line, for `--help`.
        choices: the values that a text may have.
        within: the range of a number, an `Interval` such as `[0, 1]`; without one it must be finite.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "within": within})


def options_of(method: type) -> list[dataclasses.Field]:
    """The fields of a method that are options: those declared by `option`."""
    return [entry for entry in dataclasses.fields(method) if "help" in entry.metadata]


def options_text(method: type) -> str:
    """Say what each option of a method does, a line each, as `help(method)` shows it."""
    lines = []
    for entry in options_of(method):
        choices = entry.metadata.get("choices")
        allowed = f"; one of {', '.join(choices)}" if choices else ""
        lines.append(f"    {entry.name}: {entry.metadata['help']}{allowed} (default: {entry.default!r})")
    return "\n".join(["Options; another type is a TypeError, a value out of range a ValueError:", *lines])


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse, by a TypeError or ValueError, a `value` that is no whole number, or below `least`."""
    if not _is_a("int", value):
        raise TypeError(f"{name} is {value!r}, but must be a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}")


def check_options(method: Any) -> None:
    """Hold every option of `method` to its declared type, choices and range.

    Raises:
        TypeError: a value of another type, such as "false" for a bool or 1.5 for an int.
        ValueError: a value that isn't one of the choices, out of its range, or not finite.
    """
    for entry in options_of(type(method)):
        check_value(entry, getattr(method, entry.name))


def check_value(entry: dataclasses.Field, value: Any) -> None:
    """Hold one value to what its option declares; raises as `check_options` does."""
    kind = entry.type if isinstance(entry.type, str) else getattr(entry.type, "__name__", "")
    if kind in _KINDS and not _is_a(kind, value):
        raise TypeError(f"{entry.name} is {value!r}, but must be {_KINDS[kind]}")
    choices = entry.metadata.get("choices")
    within = entry.metadata.get("within")
    if choices and value not in choices:
        raise ValueError(f"{entry.name} is {value!r}, but must be one of {', '.join(choices)}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{entry.name} is a number of more than 308 digits, but must be finite")
    if within is not None and value not in (allowed := Interval(within)):
        finite = ", and finite" if math.isinf(value) and math.isinf(allowed.bounds[1]) else ""
        raise ValueError(f"{entry.name} is {value}, but must {allowed}{finite}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{entry.name} is {value}, but must be finite")


def _is_a(kind: str, value: Any) -> bool:
    """Whether `value` is of the declared type; a whole number is a number, True isn't."""
    if kind in ("bool", "str"):
        return isinstance(value, bool if kind == "bool" else str)
    return isinstance(value, numbers.Integral if kind == "int" else numbers.Real) and not isinstance(value, bool)
