"""Drop rates as a run logged them, and piecewise-linear curves fitted to them by least squares."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attn_reg_plugin.experiments.training_log import finite, record_of
from attn_reg_plugin.files import read_json
from attn_reg_plugin.regularizers.scheduled_dropout import Curve

#: knots -> (sum of squared errors, values at the knots)
Solve = Callable[[list[int]], tuple[float, np.ndarray]]

_RATE = re.compile(r"(train_|)drop_((?:encoder|decoder)\.(?:self|cross)\[\d+\](?:@[\w.]+)*)")
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


@dataclass(frozen=True)
class Fit:
    """A curve of the drop probability, and how far (root mean square) it is from the logged drop rates."""

    curve: Curve
    error: float


def read_rates(run: Path) -> dict[str, Rates]:
    """The drop rates by site that a training logged, from the log file `run` or the one in the folder `run`.

    The log is fairseq's with `--log-format json`, standard output or `--log-file`, or Trainer's `trainer_state.json`;
    where its output folder has none, that of its last checkpoint. Of the lines that come every few updates and those
    that close an epoch, the more numerous are read. Updates that come twice, as in a resumed run, count once: the last
    line holds.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: no drop rate is in it, or a folder holds several such logs.
    """
    if not run.exists():
        raise FileNotFoundError(f"there is no run {run}")
    if run.is_file():
        rates = rates_of_log(run)
        if not rates:
            raise ValueError(f"{run} holds no drop rates; it must be {_LOGS}")
        return rates
    logs = {path: rates for path in sorted(run.iterdir()) if path.is_file() and (rates := rates_of_log(path))}
    if len(logs) > 1:
        names = ", ".join(path.name for path in logs)
        raise ValueError(f"{run} holds several logs with drop rates ({names}); give one of them")
    state = newest_trainer_state(run)
    rates = next(iter(logs.values()), None) or (rates_of_log(state) if state else {})
    if not rates:
        raise ValueError(f"no file in {run} holds drop rates; one must be {_LOGS}")
    return rates


def newest_trainer_state(folder: Path) -> Path | None:
    """The newest state of a training of Trainer: its own at the end, or that of its last checkpoint."""
    if (folder / TRAINER_STATE).is_file():
        return folder / TRAINER_STATE
    states = [path for path in folder.glob(f"checkpoint-*/{TRAINER_STATE}") if path.parent.name[11:].isdecimal()]
    return max(states, key=lambda path: int(path.parent.name[11:]), default=None)


def rates_of_log(path: Path) -> dict[str, Rates]:
    """The drop rates by site in one file, in the order of their sites; empty if it holds none."""
    if path.name == TRAINER_STATE:
        return rates_of_records(_trainer_records(path))
    with path.open(encoding="utf-8", errors="replace") as lines:
        return rates_of_lines(lines)


def rates_of_lines(lines: Iterable[str]) -> dict[str, Rates]:
    """The same of the lines of a log of fairseq's."""
    return rates_of_records(_records(lines))


def rates_of_records(logged: Iterable[tuple[str, int, Mapping[str, object]]]) -> dict[str, Rates]:
    """The drop rates by site, in the order of their sites.

    Args:
        logged: (kind of record, number of updates, figures by name, of which `drop_SITE` count), in the order of the
            log. Of several kinds the one with the most records counts, of records at the same update the last.
    """
    found: dict[str, dict[int, dict[str, float]]] = {}
    for kind, updates, record in logged:
        names = {key: _RATE.fullmatch(key) for key in record}
        rates = {name[2]: rate for key, name in names.items() if name and (rate := finite(record[key])) is not None}
        if rates and updates:
            found.setdefault(kind, {})[updates] = rates
    records = max(found.values(), key=len, default={})
    series: dict[str, list[tuple[int, int, float]]] = {}
    # the first stretch is as long as the second if the log starts in the middle of a run
    ends = sorted(records)
    start = max(0, 2 * ends[0] - ends[1]) if len(ends) > 1 else 0
    for end in ends:
        for site, rate in records[end].items():
            series.setdefault(site, []).append((start, end, rate))
        start = end
    return {
        site: Rates(*(np.array(column) for column in zip(*series[site], strict=True)))
        for site in sorted(series, key=_order)
    }


def _records(lines: Iterable[str]) -> Iterator[tuple[str, int, dict[str, object]]]:
    """(`train_` for an epoch's line or nothing, number of updates, the figures) of each line of fairseq's that has
    drop rates.

    fairseq logs `null` for a site that nothing was dropped from since the last line; that says nothing.
    """
    for line in lines:
        record = record_of(line) if "drop_" in line else None
        if record is None:
            continue
        prefix = "train_" if "train_num_updates" in record else ""
        updates = finite(record.get(f"{prefix}num_updates"))
        if updates:
            yield prefix, int(updates), record


def _trainer_records(path: Path) -> Iterator[tuple[str, int, dict[str, object]]]:
    """The same of Trainer's `trainer_state.json`."""
    history = read_json(path).get("log_history")
    for record in history if isinstance(history, list) else ():
        if isinstance(record, dict) and (updates := finite(record.get("step"))):
            yield "", int(updates), record


def _order(site: str) -> tuple[bool, bool, str, int]:
    """The encoder first, self before cross, tower by tower, and layers as numbers."""
    name, _, rest = site.partition("[")
    layer, _, tower = rest.partition("]")
    return not name.startswith("encoder"), not name.endswith("self"), tower, int(layer)


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
    within = np.linspace(0, 1, SAMPLES)
    positions = rates.starts[:, None] + (rates.ends - 1 - rates.starts)[:, None] * within
    weights = np.sqrt((rates.ends - rates.starts) / (rates.ends - rates.starts).mean())

    def solve(at: list[int]) -> tuple[float, np.ndarray]:
        basis = np.stack([np.interp(positions, at, row).mean(1) for row in np.eye(len(at))], 1)
        values, *_ = np.linalg.lstsq(basis * weights[:, None], rates.drops * weights, rcond=None)
        return float((((basis @ values - rates.drops) * weights) ** 2).sum()), values

    best, chosen = math.inf, [first, last]
    for at in _knots(solve, first, last, min(knots, n)):
        squares = solve(at)[0]
        criterion = n * math.log(max(squares / n, ROUNDING)) + 2 * len(at) * math.log(n)
        if criterion < best:
            best, chosen = criterion, at
    values = solve(chosen)[1]
    curve = Curve(tuple((x, _probability(y)) for x, y in zip(chosen, values, strict=True)))
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
            at, moved = _moved(solve, at, step)
            step = step if moved else step // 2
        yield at


def _moved(solve: Solve, at: list[int], step: int) -> tuple[list[int], bool]:
    """The interior knots, each moved by `step` to one side if that makes the fit better; and whether any was."""
    squares, moved = solve(at)[0], False
    for i in range(1, len(at) - 1):
        for to in (at[i] - step, at[i] + step):
            if at[i - 1] < to < at[i + 1]:
                tried = [*at[:i], to, *at[i + 1 :]]
                if (better := solve(tried)[0]) < squares * (1 - 1e-6) - 1e-15:
                    at, squares, moved = tried, better, True
    return at, moved


def _probability(value: float) -> float:
    return round(float(min(max(value, 0.0), 1.0)), 4)
