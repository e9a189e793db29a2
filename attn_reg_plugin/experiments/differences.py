"""Paired differences of a method to plain training, with 95 % intervals.

A seed fixes the initial weights, the order of the batches and, where it is drawn anew for every seed, the part that is
trained on, so runs of the same seed are compared with each other. The interval is a percentile bootstrap that draws the
seeds and the examples of the test set anew, each with replacement, the same ones for both. For BLEU and one seed it is
sacrebleu's paired bootstrap. A draw is the mean over all seeds on the drawn examples, and to it comes by how much the
drawn seeds differ from all of them on the whole set: on the drawn examples, chance of seeds and examples together would
count twice (Owen 2007, "The pigeonhole bootstrap"). What is drawn of few seeds varies too little (Hesterberg 2015,
"What teachers should know about the bootstrap"), so this part is widened: intervals over 3 seeds then cover 95 % of
normal differences instead of 75 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_reg_plugin.experiments.example_scores import Examples

#: what the others are compared with
PLAIN = "plain"
#: draws of a bootstrap, as many as sacrebleu takes
RESAMPLES = 1000
#: of the random numbers, sacrebleu's
_SEED = 12345
#: weights of examples that are in memory at a time
_AT_A_TIME = 4_000_000

#: by subset and metric
Figures = Mapping[str, Mapping[str, float]]


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
        """`+2.10 [+0.35, +3.91]`, without an interval where there is none."""
        mean, *ends = (
            None if value is None else f"{round(value, digits) + 0.0:+.{digits}f}"  # no -0.00
            for value in (self.mean, self.low, self.high)
        )
        return f"{mean} [{', '.join(ends)}]" if None not in ends else str(mean)


def differences(runs: Sequence[Any]) -> dict[str, dict[str, dict[str, Difference]]]:
    """Of each method but plain training, by subset and metric; empty without plain training.

    Args:
        runs: finished ones, with `method`, `seed`, `figures()` and `examples()`, see `Run`.
    """
    by_method: dict[str, dict[int, Any]] = {}
    for one in runs:
        by_method.setdefault(one.method.name, {})[one.seed] = one
    plain = by_method.pop(PLAIN, {})
    pairs = {
        name: [(of_method[seed], plain[seed]) for seed in of_method if seed in plain]
        for name, of_method in by_method.items()
    }
    pairs = {name: found for name, found in pairs.items() if found}
    if not pairs:
        return {}
    examples = {id(one): one.examples() for found in pairs.values() for pair in found for one in pair}
    return {name: paired(found, examples) for name, found in pairs.items()}


def paired(
    pairs: Sequence[tuple[Any, Any]], examples: Mapping[int, Mapping[str, Mapping[str, Examples]]] | None = None
) -> dict[str, dict[str, Difference]]:
    """Those of one method, by subset and metric; what all its pairs have examples of is drawn together.

    Args:
        pairs: of each seed the method's run and the one that it is compared with; what not all have is left out.
        examples: what `examples()` gave, by the id of the run; by default it is asked for.
    """
    if examples is None:
        examples = {id(one): one.examples() for pair in pairs for one in pair}
    figures = [(one.figures(), other.figures()) for one, other in pairs]
    every = [figure for pair in figures for figure in pair]
    found: dict[str, dict[str, Difference]] = {}
    for subset in [subset for subset in figures[0][0] if all(subset in figure for figure in every)]:
        names = [name for name in figures[0][0][subset] if all(name in figure[subset] for figure in every)]
        values = {name: [one[subset][name] - other[subset][name] for one, other in figures] for name in names}
        scores = {
            name: [tuple(examples[id(one)].get(subset, {}).get(name) for one in pair) for pair in pairs]
            for name in names
        }
        whole = [name for name in names if _comparable(scores[name])]
        ends = dict(zip(whole, intervals([scores[name] for name in whole]), strict=True))
        found[subset] = {name: _difference(values[name], ends.get(name)) for name in names}
    return found


def _comparable(pairs: Sequence[tuple[Examples | None, ...]]) -> bool:
    """Whether the examples of all runs are there, and equally many."""
    return len({None if one is None else len(one) for pair in pairs for one in pair} | {None}) == 2 and all(
        one is not None and len(one) > 1 for pair in pairs for one in pair
    )


def _difference(values: Sequence[float], ends: tuple[float, float] | None) -> Difference:
    mean, several = statistics.fmean(values), len(values) > 1
    drawn = ["seeds"] * several + ["examples"] * (ends is not None)
    if ends is None and several:
        ends = _over_seeds(values)
    low, high = ends or (None, None)
    return Difference(mean, low, high, len(values), " and ".join(drawn) or "nothing")


def _over_seeds(values: Sequence[float]) -> tuple[float, float]:
    from scipy.stats import bootstrap

    mean, factor = statistics.fmean(values), widening(len(values))

    def statistic(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        return mean + factor * (drawn.mean(axis) - mean)

    how = {"n_resamples": RESAMPLES, "method": "percentile", "rng": np.random.default_rng(_SEED)}
    found = bootstrap((np.array(values),), statistic, **how).confidence_interval
    return float(found.low), float(found.high)


def widening(seeds: int, freedom: float = 0.0) -> float:
    """What the deviation of drawn seeds from all of them is multiplied by: √(n / (n - 1)) · t₀.₉₇₅(f) / z₀.₉₇₅.

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

    if not figures:
        return []
    count, seeds = len(figures[0][0][0]), len(figures[0])
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
