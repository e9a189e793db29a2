"""How many seeds show a difference, and which difference the present seeds can show.

From the paired differences of a finished comparison, method against plain training, seed by seed: their standard
deviation s, and the power of the two-sided paired t-test. With n seeds and a true difference d, t follows a
noncentral t distribution with n − 1 degrees of freedom and noncentrality √n d / s (Cohen, Statistical Power Analysis
for the Behavioral Sciences, 2nd edition, 2.3). The evaluation set is taken as it is: nothing is said of other examples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.differences import PLAIN
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

        square = self.freedom * self.deviation**2
        low, high = (math.sqrt(square / float(chi2.ppf(end, self.freedom))) for end in (0.975, 0.025))
        return low, high


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
        effect: see `power_of`; infinity where the differences do not vary.
    """
    low, high = 1, 2
    while power_of(high, effect, level) < power:
        if high == MOST:
            return None
        low, high = high, min(2 * high, MOST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power_of(middle, effect, level) < power else (low, middle)
    return high


def effect_shown(seeds: int, power: float = 0.8, level: float = 0.05) -> float:
    """The least difference that so many seeds show with this power, in standard deviations of the differences."""
    from scipy.optimize import brentq

    high = 1.0
    while power_of(seeds, high, level) < power:
        high *= 2
    return float(brentq(lambda effect: power_of(seeds, effect, level) - power, 0.0, high, xtol=1e-9))


# -- differences of finished comparisons ------------------------------------------------------------------------------


def read_pilots(paths: Iterable[Path]) -> list[Pilot]:
    """The paired differences of comparisons, by metric; of several methods also pooled.

    Args:
        paths: of `results.json`, or of the folders that hold it.

    Raises:
        ValueError: a file is of something else, or has no method with two seeds beside plain training.
        FileNotFoundError: there is no such file.
    """
    found = []
    for path in paths:
        file = path / "results.json" if path.is_dir() else path
        content = read_json(file, "give the results.json of attn-reg compare or finetune")
        if not isinstance(content.get("runs"), Mapping):
            raise ValueError(f"{file} holds no runs, so it isn't the results.json of attn-reg compare or finetune")
        own = _pilots(content, file.resolve().parent.name)
        if not own:
            raise ValueError(f"{file} has no method with two seeds that {PLAIN} has, too; their differences are needed")
        found += own
    return found


def _pilots(content: Mapping[str, Any], source: str) -> list[Pilot]:
    runs: dict[str, dict[str, dict[tuple[str, str], float]]] = {}
    for name, entry in content["runs"].items():
        method, _, seed = str(name).rpartition("-seed")
        runs.setdefault(method, {})[seed] = reported_scores(entry)
    plain = runs.pop(PLAIN, {})
    titles = {str(row.get("method")): str(row.get("title")) for row in content.get("methods", ())}
    found: dict[tuple[str, str], list[Pilot]] = {}
    for method, of_method in runs.items():
        seeds = [seed for seed in of_method if seed in plain]
        for subset, metric in next(iter(of_method.values())):
            key = (subset, metric)
            values = [
                of_method[seed][key] - plain[seed][key] for seed in seeds if key in of_method[seed].keys() & plain[seed]
            ]
            if len(values) > 1:
                about = (source, titles.get(method, method), subset, metric, len(values))
                own = Pilot(*about, statistics.fmean(values), statistics.stdev(values), len(values) - 1)
                found.setdefault(key, []).append(own)
    return [one for own in found.values() for one in (*own, *_pooled(own))]


def _pooled(pilots: Sequence[Pilot]) -> list[Pilot]:
    """The differences of several methods together: the root of their mean variance."""
    if len(pilots) < 2:
        return []
    freedom = sum(one.freedom for one in pilots)
    deviation = math.sqrt(sum(one.freedom * one.deviation**2 for one in pilots) / freedom)
    first, seeds = pilots[0], round(statistics.fmean(one.seeds for one in pilots))
    mean = statistics.fmean(one.mean for one in pilots)
    return [Pilot(first.source, POOLED, first.subset, first.metric, seeds, mean, deviation, freedom)]


def reported_scores(entry: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """What a run reports, by subset and metric: a translation's test sets, or an encoder's validation sets.

    Args:
        entry: of a run, as results.json has it.
    """
    if "translation" in entry:
        scores = entry["translation"]["scores"]
        return {(subset, name): one[name] for subset, one in scores.items() for name in ("bleu", "chrf")}
    by_subset = entry.get("reported", {}).get("scores") or {"valid": entry.get("training", {}).get("scores", {})}
    return {(subset, name): float(one[name]) for subset, one in by_subset.items() for name in one if name != "loss"}
