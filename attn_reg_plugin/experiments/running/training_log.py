"""The json log of fairseq-train, and the training time in its checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

_RECORD = re.compile(r"\{.*\}\s*$")
#: what fairseq logs at the end
_DONE = "done training in "


def record_of(line: str) -> dict[str, Any] | None:
    """The json record that a line of fairseq's log ends with; None where there is none."""
    match = _RECORD.search(line)
    try:
        return json.loads(match.group()) if match else None
    except ValueError:
        return None


def finite(value: object) -> float | None:
    """A number of a log, which may be text there; None of what isn't a finite number."""
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


@dataclass
class TrainingLog:
    """The figures of a run; of lines that come twice, as in the log of a resumed run, the last one holds.

    Attributes:
        trainings: epoch -> the figures of its training, without their prefix.
        validations: (epoch, number of updates) -> the figures of a validation, without their prefix.
        position: how far the run is, in epochs.
        ended: whether the training said that it is done, and none went on after that.
    """

    trainings: dict[int, dict[str, float]] = field(default_factory=dict)
    validations: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    position: float = 0.0
    ended: bool = False

    def add(self, line: str) -> None:
        """Take in one line of the log; others than the json records and the last one are ignored."""
        record = record_of(line)
        if record is None:
            self.ended = self.ended or _DONE in line
            return
        try:
            epoch = int(record["epoch"])
        except (ValueError, KeyError, TypeError):
            return
        self.ended = False
        if "valid_num_updates" in record:
            figures = _figures(record, "valid_")
            self.validations[epoch, int(figures["num_updates"])] = figures
        elif "train_train_wall" in record:
            self.trainings[epoch] = _figures(record, "train_")
            self.position = float(epoch)
        elif "update" in record:
            self.position = _number(record["update"]) or self.position

    def over(self, epoch: int) -> bool:
        """Whether an epoch has ended; until then further validations of it may come."""
        return self.ended or epoch in self.trainings or epoch < max(self.validations, default=(0, 0))[0]

    def history(self) -> pandas.DataFrame:
        """The figures as a table, a row per epoch: `train_NAME`, `valid_NAME` of its last validation."""
        import pandas

        rows: dict[int, dict[str, float]] = {}
        of_epochs = [("train", epoch, figures) for epoch, figures in self.trainings.items()]
        of_epochs += [("valid", epoch, figures) for (epoch, _), figures in sorted(self.validations.items())]
        for prefix, epoch, figures in of_epochs:
            rows.setdefault(epoch, {}).update({f"{prefix}_{name}": value for name, value in figures.items()})
        return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("epoch").sort_index()

    def best_validation(self) -> tuple[str, float]:
        """The name and the value of the lowest validation loss; a ValueError where there is none.

        The loss is `nll_loss` (bits per target piece, without label smoothing) where it is logged, else `loss`.
        """
        for name in ("nll_loss", "loss"):
            values = [figures.get(name, math.nan) for figures in self.validations.values()]
            if values := [value for value in values if math.isfinite(value)]:
                return name, min(values)
        raise ValueError("the training log holds no validation loss")

    def chosen(self, name: str, maximize: bool, best: Path | None = None) -> tuple[int, dict[str, float]]:
        """The epoch and the figures of the best validation, the later of equals: fairseq's best checkpoint.

        Args:
            name: the figure that checkpoints are chosen by; a ValueError where no validation has it.
            maximize: whether higher is better.
            best: the best checkpoint. A validation that was followed by no saving, as of `--validate-interval-updates`
                or before `--save-interval`, may be better than its own; None, or not there: no validation was.
        """
        sign = 1 if maximize else -1
        found = [
            (sign * figures[name], key, figures)
            for key, figures in self.validations.items()
            if math.isfinite(figures.get(name, math.nan))
        ]
        if not found:
            raise ValueError(f"the training log holds no validation with {json.dumps(name)}")
        updates = _in_checkpoint(best, lambda state: state["optimizer_history"][-1]["num_updates"]) if best else None
        saved = [entry for entry in found if entry[1][1] == updates]
        _, (epoch, _), figures = max(saved or found, key=lambda entry: entry[:2])
        return epoch, figures


def read_log(path: Path) -> TrainingLog:
    """Read the figures of a whole log file; there are none without the file."""
    log = TrainingLog()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        log.add(line)
    return log


def seconds_per_epoch(log: TrainingLog, checkpoint: Path) -> float | None:
    """Seconds an epoch spends in updates, without validation and saving; None when unknown.

    The log rounds each epoch to whole seconds. The checkpoint keeps the sum unrounded and over interruptions, so it is
    asked first.
    """
    if not log.trainings:
        return None
    total = _in_checkpoint(checkpoint, _train_wall)
    if total is None:
        total = sum(figures.get("train_wall", 0.0) for figures in log.trainings.values())
    return total / len(log.trainings)


def _train_wall(state: Any) -> float:
    meters = state["extra_state"]["metrics"]["default"]
    return next(kept["sum"] for _, name, _, kept in meters if name == "train_wall")


def _in_checkpoint(path: Path, find: Callable[[Any], float]) -> float | None:
    """A number in a checkpoint; None where that has none or cannot be read."""
    from attn_reg_plugin.checkpoints import load_weights  # torch

    try:
        return float(find(load_weights(path, mmap=True)))
    except (KeyError, TypeError, ValueError, IndexError, StopIteration):
        return None


def _figures(record: dict[str, object], prefix: str) -> dict[str, float]:
    """The numbers in a record whose names begin so, without the prefix."""
    numbers = {name: _number(value) for name, value in record.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): number for name, number in numbers.items() if number is not None}


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
