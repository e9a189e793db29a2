"""Paired differences of a method to plain training, with 95 % intervals.

A seed fixes the initial weights, the order of the batches and, where it is drawn anew for every seed, the part that is
trained on, so runs of the same seed are compared with each other. The interval is a percentile bootstrap that draws the
seeds and the examples of the test set anew, each with replacement, the same ones for both. For BLEU and one seed it is
sacrebleu's paired bootstrap. A draw is the mean over all seeds on the drawn examples, and to it comes by how much the
drawn seeds differ from all of them on the whole set: on the drawn examples, chance of seeds and examples together would
count twice (Owen 2007, "The pigeonhole bootstrap"). Means of few drawn seeds vary too little (Hesterberg 2015,
"What teachers should know about the bootstrap"), so this part is widened: intervals over 3 seeds then cover 95 % of
normal differences instead of 75 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from attn_reg_plugin.experiments.report.examples import Examples

#: the method that the others are compared with
PLAIN = "plain"
#: draws of a bootstrap, as many as sacrebleu takes
RESAMPLES = 1000
#: of the random numbers, sacrebleu's
_SEED = 12345
#: weights of examples that are in memory at a time
_AT_A_TIME = 4_000_000

#: a score's subset and metric
Key = tuple[str, str]


class Scored(Protocol):
    """A finished run, see `results.RunResult`."""

    method: str
    seed: Any
    scores: Mapping[Key, float]

    @property
    def examples(self) -> Mapping[Key, Examples]:
        """The scores as functions of the examples; without those whose examples are gone."""
        ...


@dataclass(frozen=True)
class Difference:
    """A method's mean difference to plain training.

    Attributes:
        mean: over the seeds that both have.
        low, high: the ends of the 95 % interval; None where there is nothing to draw: one seed, and no examples.
        seeds: how many.
        drawn: what the bootstrap drew: `seeds and examples`, `examples`, `seeds` or `nothing`.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    drawn: str

    def text(self, digits: int) -> str:
        """`+2.10 [+0.35, +3.91]`, without an interval where there is none; -0.00 is below 0, +0.00 at it or above."""
        mean, *ends = (
            None if value is None else f"{round(value, 9) + 0.0:+.{digits}f}"  # without rounding errors of a tie
            for value in (self.mean, self.low, self.high)
        )
        return f"{mean} [{', '.join(ends)}]" if None not in ends else str(mean)


def differences(runs: Sequence[Scored], baseline: str = PLAIN) -> dict[str, dict[str, dict[str, Difference]]]:
    """The differences of each other method to the baseline, by method, subset and metric.

    A method without a seed of the baseline has none.
    """
    by_method: dict[str, dict[Any, Scored]] = {}
    for run in runs:
        by_method.setdefault(run.method, {})[run.seed] = run
    plain = by_method.pop(baseline, {})
    pairs = {name: [(own[seed], plain[seed]) for seed in own if seed in plain] for name, own in by_method.items()}
    return {name: _of_method(found) for name, found in pairs.items() if found}


def _of_method(pairs: Sequence[tuple[Scored, Scored]]) -> dict[str, dict[str, Difference]]:
    """The differences of a method, by subset and metric; scores of equally many examples are drawn together.

    Args:
        pairs: for each seed the run of the method and that of the baseline; only scores that all of them have count.
    """
    runs = [run for pair in pairs for run in pair]
    keys = [key for key in runs[0].scores if all(key in run.scores for run in runs)]
    drawn: dict[int, list[Key]] = {}
    for key in keys:
        counts = {run.examples[key].count if key in run.examples else 0 for run in runs}
        if len(counts) == 1 and max(counts) > 1:
            drawn.setdefault(max(counts), []).append(key)
    ends: dict[Key, tuple[float, float]] = {}
    for chosen in drawn.values():
        examples = [[(one.examples[key], other.examples[key]) for one, other in pairs] for key in chosen]
        ends |= dict(zip(chosen, intervals(examples), strict=True))
    found: dict[str, dict[str, Difference]] = {}
    for subset, metric in keys:
        values = [one.scores[subset, metric] - other.scores[subset, metric] for one, other in pairs]
        found.setdefault(subset, {})[metric] = _difference(values, ends.get((subset, metric)))
    return found


def _difference(values: Sequence[float], ends: tuple[float, float] | None) -> Difference:
    several = len(values) > 1
    drawn = ["seeds"] * several + ["examples"] * (ends is not None)
    low, high = ends or (_over_seeds(values) if several else (None, None))
    return Difference(statistics.fmean(values), low, high, len(values), " and ".join(drawn) or "nothing")


def _over_seeds(values: Sequence[float]) -> tuple[float, float]:
    from scipy.stats import bootstrap

    mean, factor = statistics.fmean(values), widening(len(values))

    def statistic(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        return mean + factor * (drawn.mean(axis) - mean)

    how = {"n_resamples": RESAMPLES, "method": "percentile", "rng": np.random.default_rng(_SEED)}
    found = bootstrap((np.array(values),), statistic, **how).confidence_interval
    return float(found.low), float(found.high)


def widening(seeds: int, freedom: float = 0.0) -> float:
    """The factor for the deviation of drawn seeds from all of them: √(n / (n - 1)) · t₀.₉₇₅(f) / z₀.₉₇₅.

    The bootstrap's variance of a mean is (n - 1) / n of the unbiased one, and it takes normal quantiles for Student's.

    Args:
        seeds: n, at least 2.
        freedom: f, the degrees of freedom of the whole interval; 0: n - 1.
    """
    from scipy.stats import norm, t

    return math.sqrt(seeds / (seeds - 1)) * float(t.ppf(0.975, freedom or seeds - 1) / norm.ppf(0.975))


def intervals(figures: Sequence[Sequence[tuple[Examples, Examples]]]) -> list[tuple[float, float]]:
    """The 95 % intervals of several mean differences; every draw is the same for all of them.

    Args:
        figures: of each figure and seed a method's score and that of plain training; all of the same N examples, at
            least 2, and the same seeds.
    """
    from scipy.stats import bootstrap

    count, seeds = figures[0][0][0].count, len(figures[0])
    whole = _of_seeds(figures, np.ones((1, count)))
    deviations = (widening(seeds) if seeds > 1 else 0.0) * (whole - whole.mean(1, keepdims=True))  # (figures, seeds, 1)

    def statistic(*drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        rows = np.atleast_2d(drawn[-1]).astype(np.int64)  # (R, N)
        means = _of_seeds(figures, _weights(rows, count)).mean(1)  # (figures, R)
        if seeds > 1:
            means = means + deviations[:, np.atleast_2d(drawn[0]).astype(np.int64), 0].mean(-1)
        return means if drawn[-1].ndim > 1 else means[:, 0]

    samples = ([np.arange(seeds)] if seeds > 1 else []) + [np.arange(count)]
    found = bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        batch=max(1, min(RESAMPLES, _AT_A_TIME // count)),
        vectorized=True,
        axis=-1,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return [(float(low), float(high)) for low, high in zip(found.low, found.high, strict=True)]


def _of_seeds(figures: Sequence[Sequence[tuple[Examples, Examples]]], weights: np.ndarray) -> np.ndarray:
    """The differences with the examples weighted, (figures, seeds, R)."""
    return np.array([[one.scores(weights) - other.scores(weights) for one, other in pairs] for pairs in figures])


def _weights(rows: np.ndarray, count: int) -> np.ndarray:
    """How often each example is in each draw, (R, N), of the indices drawn, (R, N)."""
    shifted = rows + count * np.arange(len(rows))[:, None]
    counts = np.bincount(shifted.ravel(), minlength=count * len(rows))
    return counts.reshape(len(rows), count).astype(np.float64)  # whole numbers, as products of matrices take them
