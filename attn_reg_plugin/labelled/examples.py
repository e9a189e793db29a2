"""The examples that the readers give: one small dataclass per kind of problem, with labels as indices."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextExample:
    """A text or a pair of texts, to be classified or scored.

    Attributes:
        line: its number in its file, counted from 1.
        first, second: the texts; `second` is None where the task has one only.
        label: index of the class, or the value of a regression; None where the file has no labels.
    """

    line: int
    first: str
    second: str | None = None
    label: int | float | None = None


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """Words with one label each, None without labels; `line` is that of the first word, counted from 1."""

    line: int
    words: tuple[str, ...]
    labels: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """A beginning and the endings to choose from, equally many in every example; the label is the right one's index."""

    line: int
    context: str
    endings: tuple[str, ...]
    label: int | None = None


Example = TextExample | TaggedSentence | ChoiceExample
