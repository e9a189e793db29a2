"""Paired differences of a method to plain training, with 95 % intervals.

A seed fixes the initial weights, the order of the batches and, where it is drawn anew for every seed, the part that is
trained on, so runs of the same seed are compared with each other. The interval is a percentile bootstrap that draws the
seeds and the examples of the test set anew, each with replacement, the same ones for both. For BLEU and one seed it is
sacrebleu's paired bootstrap. A draw is the mean over all seeds on the drawn examples, plus the deviation of the drawn
seeds from all seeds on the whole set: seeds and examples drawn at once would count their common chance twice (Owen
2007, "The pigeonhole bootstrap"). Means of few drawn seeds vary too little (Hesterberg 2015,
"What teachers should know about the bootstrap"), so that deviation is widened: intervals over 3 seeds then cover 95 %
of normal differences instead of 75 %. Without examples the interval is Student's over the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_reg_plugin.experiments.report.examples import Examples
from attn_reg_plugin.experiments.running.flags import PLAIN

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.report.results import RunResult

#: draws of a bootstrap, as many as sacrebleu takes
RESAMPLES = 1000
#: the seed of the draws is sacrebleu's
_SEED = 12345
#: weights of examples that are in memory at a time
_AT_A_TIME = 4_000_000

#: a score's subset and metric
Key = tuple[str, str]


@dataclass(frozen=True)
class Difference:
    """A method's mean difference to plain training.

    Attributes:
        mean: over the seeds that both have.
        low, high: the ends of the 95 % interval; None where there is nothing to draw: one seed, and no examples.
        seeds: how many.
        drawn: what the interval is over: `seeds and examples`, `examples`, `seeds` (Student's) or `nothing`.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    drawn: str

    def text(self, digits: int) -> str:
        """`+2.10 [+0.35, +3.91]`, without an interval where there is none; what rounds to 0 keeps its sign: -0.00."""
        mean, *ends = (
            None if value is None else f"{round(value, 9) + 0.0:+.{digits}f}"  # without rounding errors of a tie
            for value in (self.mean, self.low, self.high)
        )
        return f"{mean} [{', '.join(ends)}]" if None not in ends else str(mean)


def differences(runs: Sequence[RunResult], baseline: str = PLAIN) -> dict[str, dict[str, dict[str, Difference]]]:
    """The differences of each other method to the baseline, by method, subset and metric.

    A method without a seed of the baseline has none.
    """
    by_method: dict[str, dict[Any, RunResult]] = {}
    for run in runs:
        by_method.setdefault(run.method, {})[run.seed] = run
    plain = by_method.pop(baseline, {})
    pairs = {name: [(own[seed], plain[seed]) for seed in own if seed in plain] for name, own in by_method.items()}
    return {name: _of_method(found) for name, found in pairs.items() if found}


def _of_method(pairs: Sequence[tuple[RunResult, RunResult]]) -> dict[str, dict[str, Difference]]:
    """The differences of a method, by subset and metric.

    Args:
        pairs: for each seed the run of the method and that of the baseline; only scores that all of them have count.
    """
    runs = [run for pair in pairs for run in pair]
    several, found = len(pairs) > 1, {}
    for key in runs[0].scores:
        if not all(key in run.scores for run in runs):
            continue
        values = [one.scores[key] - other.scores[key] for one, other in pairs]
        mean, (subset, metric) = statistics.fmean(values), key
        counts = {run.examples[key].count if key in run.examples else 0 for run in runs}
        if len(counts) == 1 and max(counts) > 1:
            ends = interval([(one.examples[key], other.examples[key]) for one, other in pairs])
            difference = Difference(mean, *ends, len(values), "seeds and examples" if several else "examples")
        else:
            difference = over_seeds(values) if several else Difference(mean, None, None, 1, "nothing")
        found.setdefault(subset, {})[metric] = difference
    return found


def over_seeds(values: Sequence[float]) -> Difference:
    """Take the mean of differences, with Student's interval."""
    from scipy.stats import sem, t

    mean, half = statistics.fmean(values), float(t.ppf(0.975, len(values) - 1) * sem(values))
    return Difference(mean, mean - half, mean + half, len(values), "seeds")


def widening(seeds: int) -> float:
    """The factor for the deviation of drawn seeds from all of them: √(n / (n - 1)) · t₀.₉₇₅(n - 1) / z₀.₉₇₅.

    The bootstrap's variance of a mean is (n - 1) / n of the unbiased one, and it takes normal quantiles for Student's.
    """
    from scipy.stats import norm, t

    return math.sqrt(seeds / (seeds - 1)) * float(t.ppf(0.975, seeds - 1) / norm.ppf(0.975)) if seeds > 1 else 0.0


def interval(pairs: Sequence[tuple[Examples, Examples]]) -> tuple[float, float]:
    """The 95 % interval of a mean difference; every draw of examples is the same for all seeds and figures.

    Args:
        pairs: of each seed a method's score and that of plain training; all of the same N examples, at least 2.
    """
    count, seeds = pairs[0][0].count, len(pairs)

    def of_seeds(weights: np.ndarray) -> np.ndarray:
        """The differences with the examples weighted, (seeds, R)."""
        return np.array([one.scores(weights) - other.scores(weights) for one, other in pairs])

    whole = of_seeds(np.ones((1, count)))[:, 0]
    deviations = widening(seeds) * (whole - whole.mean())
    random, means, left = np.random.default_rng(_SEED), [], RESAMPLES
    while left:
        size = min(left, max(1, _AT_A_TIME // count))
        chosen = random.integers(0, seeds, (size, seeds)) if seeds > 1 else np.zeros((size, 1), dtype=int)
        rows = random.integers(0, count, (size, count))
        weights = np.array([np.bincount(row, minlength=count) for row in rows], dtype=np.float64)
        means.append(of_seeds(weights).mean(0) + deviations[chosen].mean(1))
        left -= size
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
