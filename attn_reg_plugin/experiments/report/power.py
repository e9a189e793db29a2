"""The number of seeds that show a difference, and the difference that the present seeds can show.

From the paired differences of a finished comparison, method against plain training, seed by seed: their standard
deviation s, and the power of the two-sided paired t-test. With n seeds and a true difference d, t follows a
noncentral t distribution with n − 1 degrees of freedom and noncentrality √n d / s (Cohen, Statistical Power Analysis
for the Behavioral Sciences, 2nd edition, 2.3). The evaluation set is taken as it is: nothing is said of other examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attn_reg_plugin.experiments.report.differences import PLAIN
from attn_reg_plugin.experiments.report.results import lower_is_better, named, reported_scores
from attn_reg_plugin.files import read_json

#: a difference worth showing, by metric, in points of percent or of BLEU and chrF; `OTHERS` of all other metrics
WORTH = {"bleu": 0.3, "chrf": 0.3}
OTHERS = 0.5
#: more seeds than anybody runs
MOST = 100_000
#: row of the table that has the differences of all methods together
POOLED = "all methods"


@dataclass(frozen=True)
class Pilot:
    """Paired differences of a method to plain training.

    Attributes:
        source: the comparison they come from.
        method, subset, metric: what they are of.
        seeds: n, how many pairs there are; of `POOLED` those of a method, on average.
        mean: of the differences.
        deviation: s, their standard deviation (n − 1).
        freedom: of s, degrees of freedom.
    """

    source: str
    method: str
    subset: str
    metric: str
    seeds: int
    mean: float
    deviation: float
    freedom: int

    @property
    def varies(self) -> bool:
        """Whether the differences do, by more than rounding."""
        return self.deviation > 1e-9 * max(1.0, abs(self.mean))

    @property
    def worth(self) -> float:
        """The difference that is to be shown by default."""
        return WORTH.get(self.metric, OTHERS)

    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the standard deviation, of normally distributed differences: few seeds know little."""
        from scipy.stats import chi2

        low, high = np.sqrt(self.freedom * self.deviation**2 / chi2.ppf([0.975, 0.025], self.freedom))
        return float(low), float(high)


def power_of(seeds: int, effect: float, level: float = 0.05) -> float:
    """The probability that a two-sided paired t-test shows a difference.

    Args:
        seeds: pairs, at least 2.
        effect: the true difference in standard deviations of the paired differences.
        level: of the test, in (0, 1).
    """
    from scipy.stats import nct, t

    critical, shift = float(t.ppf(1 - level / 2, seeds - 1)), math.sqrt(seeds) * abs(effect)
    if shift > 100 * critical:  # nothing of the distribution is left below, and it isn't computed so far out
        return 1.0
    below = float(nct.cdf(-critical, seeds - 1, shift))
    return float(nct.sf(critical, seeds - 1, shift)) + (0.0 if math.isnan(below) else below)  # too small to be computed


def seeds_needed(effect: float, power: float = 0.8, level: float = 0.05) -> int | None:
    """The least number of seeds with this power; None where it is beyond `MOST`.

    Args:
        effect: see `power_of`.
    """
    from bisect import bisect_left

    found = bisect_left(range(2, MOST + 1), power, key=lambda seeds: power_of(seeds, effect, level)) + 2
    return found if found <= MOST else None


def effect_shown(seeds: int, power: float = 0.8, level: float = 0.05) -> float:
    """The least difference that so many seeds show with this power, in standard deviations of the differences."""
    from scipy.optimize import brentq

    high = 1.0
    while power_of(seeds, high, level) < power:
        high *= 2
    return float(brentq(lambda effect: power_of(seeds, effect, level) - power, 0.0, high, xtol=1e-9))


def read_pilots(path: Path) -> list[Pilot]:
    """The paired differences of a comparison, by metric; of several methods also pooled.

    Args:
        path: of its `results.json`, or of the folder that holds it.

    Raises:
        ValueError: the file is of something else, or has no method with two seeds beside plain training.
        FileNotFoundError: there is no such file.
    """
    file = path / "results.json" if path.is_dir() else path
    content = read_json(file, "give the results.json of attn-reg compare or finetune")
    if not isinstance(content.get("runs"), Mapping):
        raise ValueError(f"{file} holds no runs, so it isn't the results.json of attn-reg compare or finetune")
    found = _pilots(content, file.resolve().parent.name)
    if not found:
        raise ValueError(f"{file} has no method with two seeds that {PLAIN} has, too; their differences are needed")
    return found


def _pilots(content: Mapping[str, Any], source: str) -> list[Pilot]:
    import pandas as pd

    titles = {str(row.get("method")): str(row.get("title")) for row in content.get("methods", ())}
    entries = [
        (*named(name), *key, value)
        for name, entry in content["runs"].items()
        for key, value in reported_scores(entry).items()
        if not lower_is_better(key[1])
    ]
    columns = ["subset", "metric", "method", "seed"]
    scores = pd.DataFrame(entries, columns=["method", "seed", "subset", "metric", "value"]).set_index(columns)["value"]
    if PLAIN not in scores.index.get_level_values("method"):
        return []
    plain = scores.xs(PLAIN, level="method")
    found = []
    for key, by_key in (scores - plain.reindex(scores.index.droplevel("method")).to_numpy()).groupby(
        ["subset", "metric"], sort=False
    ):
        own = []
        for method, values in by_key.dropna().groupby("method", sort=False):
            if method != PLAIN and len(values) > 1:
                about = (source, titles.get(method, method), *key, len(values))
                own.append(Pilot(*about, float(values.mean()), float(values.std()), len(values) - 1))
        found += [*own, *_pooled(own)]
    return found


def _pooled(pilots: Sequence[Pilot]) -> list[Pilot]:
    """The differences of several methods together: the root of their mean variance."""
    if len(pilots) < 2:
        return []
    freedom = sum(one.freedom for one in pilots)
    deviation = math.sqrt(sum(one.freedom * one.deviation**2 for one in pilots) / freedom)
    first, seeds = pilots[0], round(np.mean([one.seeds for one in pilots]))
    mean = float(np.mean([one.mean for one in pilots]))
    return [Pilot(first.source, POOLED, first.subset, first.metric, seeds, mean, deviation, freedom)]
