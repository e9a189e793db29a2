"""Drop rates as a run logged them, and piecewise-linear curves fitted to them by least squares."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attn_reg_plugin.experiments.training_log import finite, record_of
from attn_reg_plugin.files import read_json
from attn_reg_plugin.regularizers.scheduled_dropout import Curve

_RATE = re.compile(r"(?:train_|)drop_((?:encoder|decoder)\.(?:self|cross)\[\d+\](?:@[\w.]+)*)")
#: the file in which Trainer keeps its log
TRAINER_STATE = "trainer_state.json"
#: what holds drop rates
_LOGS = f"the log of a fairseq training with --log-format json, or the {TRAINER_STATE} of one of Trainer"
#: at most so many stretches of training are fitted; finer logs are averaged
STRETCHES = 300
#: where the curve is evaluated within a stretch, and where an interior knot may start out
SAMPLES, CANDIDATES = 16, 16
#: variance of a rate that was rounded to four digits, below which a better fit is rounding
ROUNDING = 1e-8

#: knots -> (sum of squared errors, values at the knots)
Solve = Callable[[list[int]], tuple[float, np.ndarray]]


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
    """The drop rates by site that a training logged, from the log file `run` or the one in the folder `run`.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: no drop rate is in it, or a folder holds several such logs.
    """
    if not run.exists():
        raise FileNotFoundError(f"there is no run {run}")
    if run.is_file():
        if rates := rates_of_log(run):
            return rates
        raise ValueError(f"{run} holds no drop rates; it must be {_LOGS}")
    states = [state] if (state := newest_trainer_state(run)) else []
    paths = dict.fromkeys([*sorted(path for path in run.iterdir() if path.is_file()), *states])
    logs = {path: rates for path in paths if (rates := rates_of_log(path))}
    if len(logs) > 1:
        names = ", ".join(path.name for path in logs)
        raise ValueError(f"{run} holds several logs with drop rates ({names}); give one of them")
    if not logs:
        raise ValueError(f"no file in {run} holds drop rates; one must be {_LOGS}")
    return next(iter(logs.values()))


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


def fit_curve(rates: Rates, knots: int = 5) -> Fit:
    """A piecewise-linear curve of the drop probability through the logged drop rates.

    A logged rate is the mean of the curve over its stretch, so that stretches of any length give the same curve. The
    values at the knots are a weighted least-squares solution; the knots are placed one by one where they help most,
    and then moved. Of all numbers of knots the one with the lowest Bayesian information criterion is taken.

    Args:
        rates: of one site.
        knots: the most points that the curve may have, at least 2.
    """
    all_rates, rates = rates, rates.thinned(STRETCHES)
    first, last, n = int(rates.starts[0]), int(rates.ends[-1]) - 1, len(rates.drops)
    if n == 1 or last <= first:
        return Fit(Curve(((first, _probability(rates.drops.mean())),)), float(np.std(rates.drops)))
    positions = rates.starts[:, None] + (rates.ends - 1 - rates.starts)[:, None] * np.linspace(0, 1, SAMPLES)
    weights = np.sqrt((rates.ends - rates.starts) / (rates.ends - rates.starts).mean())

    def solve(at: list[int]) -> tuple[float, np.ndarray]:
        basis = np.stack([np.interp(positions, at, row).mean(1) for row in np.eye(len(at))], 1)
        values, *_ = np.linalg.lstsq(basis * weights[:, None], rates.drops * weights, rcond=None)
        return float((((basis @ values - rates.drops) * weights) ** 2).sum()), values

    def criterion(at: list[int]) -> float:
        return n * math.log(max(solve(at)[0] / n, ROUNDING)) + 2 * len(at) * math.log(n)

    chosen = min(_knots(solve, first, last, min(knots, n)), key=criterion)
    curve = Curve(tuple((x, _probability(y)) for x, y in zip(chosen, solve(chosen)[1], strict=True)))
    distance = [curve(middle) - drop for middle, drop in zip(all_rates.middles, all_rates.drops, strict=True)]
    return Fit(curve, float(np.sqrt(np.mean(np.square(distance)))))


def _knots(solve: Solve, first: int, last: int, most: int) -> Iterator[list[int]]:
    """Good places for 2, 3, … `most` knots, the first and the last always among them."""
    candidates = np.unique(np.linspace(first, last, CANDIDATES + 2).astype(int))[1:-1]
    at = [first, last]
    yield at
    while len(at) < most and (free := [int(x) for x in candidates if x not in at]):
        at = min((sorted([*at, x]) for x in free), key=lambda tried: solve(tried)[0])
        step = (last - first) // CANDIDATES
        while step >= 1:
            moved = [sorted([*at[:i], at[i] + to, *at[i + 1 :]]) for i in range(1, len(at) - 1) for to in (-step, step)]
            inside = [one for one in moved if first in one and last in one and len(set(one)) == len(at)]
            better = min(inside, key=lambda tried: solve(tried)[0], default=at)
            if solve(better)[0] < solve(at)[0] * (1 - 1e-6) - 1e-15:
                at = better
            else:
                step //= 2
        yield at


def _probability(value: float) -> float:
    return round(float(min(max(value, 0.0), 1.0)), 4)
