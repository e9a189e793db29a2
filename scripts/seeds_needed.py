"""The number of seeds that show a difference, from the results.json of a comparison:

    python scripts/seeds_needed.py OUT

The paired differences, method against plain training, seed by seed, have a standard deviation s. With n seeds and a
true difference d, t of the two-sided paired t-test follows a noncentral t distribution with n − 1 degrees of freedom
and noncentrality √n d / s (Cohen, Statistical Power Analysis for the Behavioral Sciences, 2nd edition, 2.3). The
evaluation set is taken as it is: nothing is said of other examples.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from pathlib import Path

import pandas as pd
from evidence_results import named, reported_scores
from scipy.optimize import brentq
from scipy.stats import nct, t

from attn_reg_plugin.experiments.report.results import lower_is_better
from attn_reg_plugin.files import read_json

#: a difference worth showing, by metric, in points of percent or of BLEU and chrF; `OTHERS` of all other metrics
WORTH = {"bleu": 0.3, "chrf": 0.3}
OTHERS = 0.5
#: more seeds than anybody runs
MOST = 100_000
#: of the test
LEVEL, POWER = 0.05, 0.8


def power_of(seeds: int, effect: float) -> float:
    """The probability that the test shows a difference of `effect` standard deviations, with 2 seeds or more."""
    critical, shift = float(t.ppf(1 - LEVEL / 2, seeds - 1)), math.sqrt(seeds) * abs(effect)
    if shift > 100 * critical:  # nothing of the distribution is left below, and it isn't computed so far out
        return 1.0
    below = float(nct.cdf(-critical, seeds - 1, shift))
    return float(nct.sf(critical, seeds - 1, shift)) + (0.0 if math.isnan(below) else below)  # too small to be computed


def seeds_needed(effect: float, power: float = POWER) -> int | None:
    """The least number of seeds with this power; None where it is beyond `MOST`."""
    found = bisect_left(range(2, MOST + 1), power, key=lambda seeds: power_of(seeds, effect)) + 2
    return found if found <= MOST else None


def effect_shown(seeds: int) -> float:
    """The least difference that so many seeds show, in standard deviations of the differences."""
    return float(brentq(lambda effect: power_of(seeds, effect) - POWER, 0.0, 1e4, xtol=1e-9))


def table(path: Path) -> pd.DataFrame:
    """The differences of each method with two seeds or more, what they show, and how many seeds would be needed."""
    runs = read_json(path, "give the results.json of attn-reg compare or finetune").get("runs", {})
    scores = [(*named(name), *key, one) for name, entry in runs.items() for key, one in reported_scores(entry).items()]
    values = pd.DataFrame(scores, columns=["method", "seed", "subset", "metric", "value"])
    values = values[~values["metric"].map(lower_is_better).astype(bool)]
    values = values.pivot_table(index=["subset", "metric", "seed"], columns="method", values="value", sort=False)
    if "plain" not in values:
        raise ValueError(f"{path} has no runs of plain training")
    differences = values.drop(columns="plain").sub(values["plain"], axis=0).stack().dropna()
    found = differences.groupby(["subset", "metric", "method"], sort=False).agg(["count", "mean", "std"])
    found = found[found["count"] > 1].rename(columns={"count": "seeds"})
    # a deviation of rounding only says nothing
    stds = found["std"].where(found["std"] > 1e-9 * found["mean"].abs().clip(lower=1))
    worth = [WORTH.get(metric, OTHERS) for _, metric, _ in found.index]
    shown = [effect_shown(seeds) * std for seeds, std in zip(found["seeds"], stds, strict=True)]
    needed = [seeds_needed(one / std) if std == std else None for one, std in zip(worth, stds, strict=True)]
    return found.assign(**{"shown by these": shown, "to show": worth, "seeds for it": needed})


if __name__ == "__main__":
    print(table(Path(sys.argv[1]) / "results.json").reset_index().to_markdown(index=False, floatfmt=".2f"))
