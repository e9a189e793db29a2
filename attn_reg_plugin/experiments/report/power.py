"""The number of seeds that show a difference, and the difference that the present seeds can show.

From the paired differences of a finished comparison, method against plain training, seed by seed: their standard
deviation s, and the power of the two-sided paired t-test. With n seeds and a true difference d, t follows a
noncentral t distribution with n − 1 degrees of freedom and noncentrality √n d / s (Cohen, Statistical Power Analysis
for the Behavioral Sciences, 2nd edition, 2.3). The evaluation set is taken as it is: nothing is said of other examples.

`python -m attn_reg_plugin.experiments.report.power OUT` prints the table of a page for a folder with results.json.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_reg_plugin.experiments.report.differences import PLAIN, Key
from attn_reg_plugin.experiments.report.results import lower_is_better, named, reported_scores
from attn_reg_plugin.files import read_json

if TYPE_CHECKING:
    import pandas as pd

#: a difference worth showing, by metric, in points of percent or of BLEU and chrF; `OTHERS` of all other metrics
WORTH = {"bleu": 0.3, "chrf": 0.3}
OTHERS = 0.5
#: more seeds than anybody runs
MOST = 100_000
#: row of the table that has the differences of all methods together
POOLED = "all methods"
COLUMNS = ("method", "seed", "subset", "metric", "value")


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
    found = bisect_left(range(2, MOST + 1), power, key=lambda seeds: power_of(seeds, effect, level)) + 2
    return found if found <= MOST else None


def effect_shown(seeds: int, power: float = 0.8, level: float = 0.05) -> float:
    """The least difference that so many seeds show with this power, in standard deviations of the differences."""
    from scipy.optimize import brentq

    return float(brentq(lambda effect: power_of(seeds, effect, level) - power, 0.0, 1e4, xtol=1e-9))


def deviations(scores: pd.DataFrame, baseline: str = PLAIN) -> pd.DataFrame:
    """The paired differences to the baseline, of methods with two seeds or more; of several methods also pooled.

    Args:
        scores: `COLUMNS`, a row for each score of each run, see `scores_of`.

    Returns:
        a row by subset, metric and method: `seeds` (n; of `POOLED` those of a method, on average), `mean` and `std` of
        the differences, its degrees of `freedom`, and the ends `low` and `high` of its 95 % interval, of normally
        distributed differences. Pooled is the root of the mean variance; it has no interval, since methods share the
        plain runs.
    """
    import pandas as pd
    from scipy.stats import chi2

    values = scores[[not lower_is_better(metric) for metric in scores["metric"]]]
    values = values.pivot_table(index=["subset", "metric", "seed"], columns="method", values="value", sort=False)
    if baseline not in values:
        return pd.DataFrame(columns=["seeds", "mean", "std", "freedom", "low", "high"])
    differences = values.drop(columns=baseline).sub(values[baseline], axis=0).stack().dropna()
    found = differences.groupby(["subset", "metric", "method"], sort=False).agg(["count", "mean", "std"])
    found = found[found["count"] > 1].rename(columns={"count": "seeds"}).assign(freedom=lambda rows: rows["seeds"] - 1)
    for name, end in (("low", 0.975), ("high", 0.025)):
        found[name] = np.sqrt(found["freedom"] * found["std"] ** 2 / chi2.ppf(end, found["freedom"]))
    pooled = []
    for (subset, metric), rows in found.groupby(["subset", "metric"], sort=False):
        std = np.sqrt((rows["freedom"] * rows["std"] ** 2).sum() / rows["freedom"].sum())
        about = {"seeds": round(rows["seeds"].mean()), "mean": rows["mean"].mean(), "freedom": rows["freedom"].sum()}
        own = pd.DataFrame([{**about, "std": std}], index=[(subset, metric, POOLED)])
        pooled.append(pd.concat([rows, own] if len(rows) > 1 else [rows]))
    return pd.concat(pooled) if pooled else found


def cells(scores: pd.DataFrame, baseline: str = PLAIN) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts; no row where no method has two seeds of the baseline.

    A difference of `WORTH` is to be shown with a power of 0.8 at the level 0.05.
    """
    header = ["method", "score", "seeds", "difference", "std [95 %]", "shown by these seeds", "to show", "seeds for it"]
    body = []
    for (subset, metric, method), row in deviations(scores, baseline).iterrows():
        std, worth = row["std"], WORTH.get(metric, OTHERS)
        interval = "" if math.isnan(row["low"]) else f" [{row['low']:.2f}, {row['high']:.2f}]"
        shown = needed = "–"
        if std > 1e-9 * max(1.0, abs(row["mean"])):  # by more than rounding; else nothing is known of the deviation
            shown = f"{effect_shown(int(row['seeds'])) * std:.2f}"
            needed = str(seeds_needed(worth / std) or f"more than {MOST:,}")
        score = metric if subset in ("valid", "test") else f"{metric} {subset}"
        line = [method, score, f"{row['seeds']:.0f}", f"{round(row['mean'], 9) + 0.0:+.2f}", f"{std:.2f}{interval}"]
        body.append([*line, shown, f"{worth:g}", needed])
    return header, body


def scores_of(runs: Sequence[tuple[str, Any, Mapping[Key, float]]]) -> pd.DataFrame:
    """The scores of runs, as `deviations` takes them, from the method, the seed and the scores of each."""
    import pandas as pd

    return pd.DataFrame([(*run[:2], *key, one) for run in runs for key, one in run[2].items()], columns=list(COLUMNS))


def read_scores(path: Path) -> pd.DataFrame:
    """The scores in the results.json of a comparison, as `deviations` takes them.

    Raises:
        ValueError: the file is of something else.
        FileNotFoundError: there is no such file.
    """
    content = read_json(path, "give the results.json of attn-reg compare or finetune")
    if not isinstance(content.get("runs"), dict):
        raise ValueError(f"{path} holds no runs, so it isn't the results.json of attn-reg compare or finetune")
    return scores_of([(*named(name), reported_scores(entry)) for name, entry in content["runs"].items()])


if __name__ == "__main__":
    from attn_reg_plugin.experiments.report.table import markdown

    print(markdown(*cells(read_scores(Path(sys.argv[1]) / "results.json")), []))
