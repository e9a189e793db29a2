"""From what a file writes to a label's index, or to a regression's value."""

from __future__ import annotations

import math

from attn_reg_plugin.labelled.task_table import REGRESSION, LabelledTask


class LabelReader:
    """Reads the labels of one task.

    Args:
        task: its label set must be known.

    Raises:
        ValueError: the label set is still to be taken from the training file.
    """

    def __init__(self, task: LabelledTask) -> None:
        self.task = task
        if task.kind != REGRESSION and task.labels is None:
            raise ValueError(f"task {task.name} takes its labels from the training file: call with_labels first")
        self.indices = {label: index for index, label in enumerate(task.labels or ())}
        for alias, label in task.aliases.items():
            self.indices.setdefault(alias, self.indices[label])

    def read(self, text: str, place: str) -> int | float:
        """The index of a class or tag, or the value of a regression.

        Args:
            text: as it is in the file.
            place: file and line, for the message.

        Raises:
            ValueError: not in the label set; not a finite number, or outside the task's bounds.
        """
        if self.task.kind == REGRESSION:
            return self._value(text, place)
        index = self.indices.get(text)
        if index is None:
            raise ValueError(f"{place}: the label is {text!r}, but must be one of {', '.join(self.task.labels)}")
        return index

    def _value(self, text: str, place: str) -> float:
        low, high = self.task.bounds or (-math.inf, math.inf)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            allowed = "a number" if self.task.bounds is None else f"a number from {low:g} to {high:g}"
            raise ValueError(f"{place}: the value is {text!r}, but must be {allowed}")
        return value
