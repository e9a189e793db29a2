"""Drop rates as a run logged them, and piecewise-linear curves fitted to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attn_reg_plugin.experiments.training_log import finite, record_of
from attn_reg_plugin.files import read_json
from attn_reg_plugin.regularizers.scheduled_dropout import Curve

_RATE = re.compile(r"(?:train_)?(?:attn_reg/)?drop_((?:encoder|decoder)\.(?:self|cross)\[\d+\](?:@[\w.]+)*)")
#: the file in which Trainer keeps its log
TRAINER_STATE = "trainer_state.json"
#: what holds drop rates
_LOGS = f"the log of a fairseq training with --log-format json, or the {TRAINER_STATE} of one of Trainer"


@dataclass(frozen=True)
class Rates:
    """The drop rates of one site, each the mean over a stretch of training.

    Attributes:
        starts, ends: (N,) updates made before the first and after the last update of each stretch.
        drops: (N,) mean drop rates, in [0, 1].
    """

    starts: np.ndarray
    ends: np.ndarray
    drops: np.ndarray

    @property
    def middles(self) -> np.ndarray:
        """(N,) the mean of the update numbers that a stretch covers."""
        return (self.starts + self.ends - 1) / 2

    def thinned(self, most: int) -> Rates:
        """At most `most` stretches, neighbours averaged."""
        groups = np.array_split(np.arange(len(self.drops)), min(most, len(self.drops)))
        lengths = self.ends - self.starts
        return Rates(
            np.array([self.starts[group[0]] for group in groups]),
            np.array([self.ends[group[-1]] for group in groups]),
            np.array([np.average(self.drops[group], weights=lengths[group]) for group in groups]),
        )


# -- reading ----------------------------------------------------------------------------------------------------------


def read_rates(run: Path) -> dict[str, Rates]:
    """The drop rates by site that a training logged.

    Args:
        run: a log, or a folder with `train.log` or Trainer's state in it.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: no drop rate is in it.
    """
    if not run.exists():
        raise FileNotFoundError(f"there is no run {run}")
    path = run
    if run.is_dir():
        path = run / "train.log" if (run / "train.log").is_file() else newest_trainer_state(run)
    if path and (rates := rates_of_log(path)):
        return rates
    raise ValueError(f"{path or run} holds no drop rates; give {_LOGS}, or a folder with train.log or {TRAINER_STATE}")


def newest_trainer_state(folder: Path) -> Path | None:
    """The newest state of a training of Trainer: its own at the end, or that of its last checkpoint."""
    if (folder / TRAINER_STATE).is_file():
        return folder / TRAINER_STATE
    states = [path for path in folder.glob(f"checkpoint-*/{TRAINER_STATE}") if path.parent.name[11:].isdecimal()]
    return max(states, key=lambda path: int(path.parent.name[11:]), default=None)


def rates_of_log(path: Path) -> dict[str, Rates]:
    """The drop rates by site in one file, in the order of their sites; empty if it holds none.

    Of the records that come every few updates and those that close an epoch, the more numerous count; of records at the
    same update, as a resumed run has them, the last.
    """
    found: dict[str, dict[int, dict[str, float]]] = {}
    for kind, updates, record in _records(path):
        names = {key: _RATE.fullmatch(key) for key in record}
        # fairseq logs `null` for a site that nothing was dropped from since the last line; that says nothing
        rates = {name[1]: rate for key, name in names.items() if name and (rate := finite(record[key])) is not None}
        if rates and updates:
            found.setdefault(kind, {})[int(updates)] = rates
    records = max(found.values(), key=len, default={})
    ends, series = sorted(records), {}
    # the first stretch is as long as the second if the log starts in the middle of a run
    start = max(0, 2 * ends[0] - ends[1]) if len(ends) > 1 else 0
    for end in ends:
        for site, rate in records[end].items():
            series.setdefault(site, []).append((start, end, rate))
        start = end
    return {site: Rates(*np.array(series[site]).T) for site in sorted(series, key=_order)}


def _records(path: Path) -> Iterator[tuple[str, float | None, Mapping[str, object]]]:
    """Kind, number of updates and figures of each record in fairseq's log or Trainer's state."""
    if path.name == TRAINER_STATE:
        history = read_json(path).get("log_history")
        for record in history if isinstance(history, list) else ():
            if isinstance(record, dict):
                yield "", finite(record.get("step")), record
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if "drop_" in line and (record := record_of(line)) is not None:
                kind = "train_" if "train_num_updates" in record else ""
                yield kind, finite(record.get(f"{kind}num_updates")), record


def _order(site: str) -> tuple[bool, bool, str, int]:
    """The encoder first, self before cross, tower by tower, and layers as numbers."""
    name, _, rest = site.partition("[")
    layer, _, tower = rest.partition("]")
    return not name.startswith("encoder"), not name.endswith("self"), tower, int(layer)


# -- fitting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A curve of the drop probability, and how far (root mean square) it is from the logged drop rates."""

    curve: Curve
    error: float


def fit_curve(rates: Rates, knots: int = 9) -> Fit:
    """A piecewise-linear curve of the drop probability through the logged drop rates, by least squares.

    There are equally many rates between the knots. A logged rate is that of the middle of its stretch, and weighs as
    much as the stretch has updates.

    Args:
        rates: of one site.
        knots: points of the curve, at least 2; no more than there are rates.
    """
    count = len(rates.drops)
    at = np.interp(np.linspace(0, count - 1, min(knots, count)), np.arange(count), rates.middles).round()
    at[-1], at[0] = rates.ends[-1] - 1, rates.starts[0]
    at = np.unique(at)
    basis = np.stack([np.interp(rates.middles, at, row) for row in np.eye(len(at))], axis=1)
    weights = np.sqrt(rates.ends - rates.starts)
    values, *_ = np.linalg.lstsq(basis * weights[:, None], rates.drops * weights, rcond=None)
    error = float(np.sqrt(np.mean((basis @ values - rates.drops) ** 2)))
    points = zip(at.tolist(), values.clip(0.0, 1.0).tolist(), strict=True)
    return Fit(Curve(tuple((int(place), round(value, 4)) for place, value in points)), error)
