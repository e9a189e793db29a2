"""Power of the paired t-test: against published values and a simulation; and what is read from comparisons."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from attn_reg_plugin.experiments.report.power import (
    COLUMNS,
    cells,
    deviations,
    effect_shown,
    power_of,
    read_scores,
    seeds_needed,
)


@pytest.mark.parametrize(
    ("effect", "power", "level", "seeds"),
    # G*Power and R's power.t.test(type = "paired")
    [(0.5, 0.8, 0.05, 34), (0.8, 0.8, 0.05, 15), (0.2, 0.8, 0.05, 199), (1.0, 0.8, 0.05, 10), (0.5, 0.9, 0.05, 44)],
)
def test_known_numbers_of_pairs(effect: float, power: float, level: float, seeds: int) -> None:
    assert seeds_needed(effect, power, level) == seeds
    assert power_of(seeds - 1, effect, level) < power <= power_of(seeds, effect, level)


@pytest.mark.parametrize(("seeds", "effect"), [(3, 2.0), (5, 1.0), (10, 1.0), (10, 0.0)])
def test_the_power_is_the_share_of_experiments_that_show_it(seeds: int, effect: float) -> None:
    """Simulated: plain and method share what a seed does to both, so only the differences vary by 1."""
    random, tries = np.random.default_rng(1), 20_000
    shared = 5 * random.standard_normal((tries, seeds))
    plain, method = (shared + random.standard_normal((tries, seeds)) / math.sqrt(2) for _ in range(2))
    shown = float((ttest_rel(method + effect, plain, axis=1).pvalue < 0.05).mean())
    assert power_of(seeds, effect) == pytest.approx(shown, abs=4 * math.sqrt(0.25 / tries))


@pytest.mark.parametrize("seeds", [2, 3, 5, 10, 40])
def test_the_difference_that_is_shown_has_the_power(seeds: int) -> None:
    effect = effect_shown(seeds)
    assert power_of(seeds, effect) == pytest.approx(0.8, abs=1e-6)
    assert seeds_needed(effect * 1.0001) == seeds


def test_limits() -> None:
    assert power_of(5, 0.0) == pytest.approx(0.05) and power_of(2, math.inf) == power_of(5, 1e6) == 1.0
    assert seeds_needed(math.inf) == 2 and seeds_needed(1e-4) is None
    assert seeds_needed(0.01) == pytest.approx(78_490, abs=2), "more than the last power of 2 below the most"


def frame(scores: dict[str, list[float]], metric: str = "accuracy") -> pd.DataFrame:
    """The scores of methods, by seed."""
    rows = [(name, seed, "valid", metric, one) for name, own in scores.items() for seed, one in enumerate(own, start=1)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def test_paired_differences_and_all_methods_together() -> None:
    """Differences of `a` are 1, 2, 3, of `b` 0, 4; the last seed is plain training's alone."""
    scores = frame({"plain": [50, 60, 70, 1], "a": [51, 62, 73], "b": [50, 64], "c": [9]})
    found = deviations(pd.concat([scores, frame({"plain": [1.0, 2.0], "a": [2.0, 3.0]}, "loss")]))
    assert [method for *_, method in found.index] == ["a", "b", "all methods"]
    first, second, both = (row for _, row in found.iterrows())
    assert (first["seeds"], first["mean"], first["std"]) == (3, 2.0, 1.0)
    assert (second["seeds"], second["mean"]) == (2, 2.0) and second["std"] == pytest.approx(8**0.5)
    assert both["std"] == pytest.approx(((2 * 1 + 1 * 8) / 3) ** 0.5), "variances, weighted by degrees of freedom"
    assert (first["low"], first["high"]) == (pytest.approx(0.5207, abs=1e-4), pytest.approx(6.2847, abs=1e-4))
    _, (line, *_) = cells(scores)
    assert line == ["a", "accuracy", "3", "+2.00", "1.00 [0.52, 6.28]", f"{effect_shown(3):.2f}", "0.5", "34"]
    assert seeds_needed(0.5) == 34 and not cells(scores, "other")[1] and not cells(frame({"plain": [1, 2]}))[1]


def test_differences_that_vary_by_rounding_only_do_not_vary() -> None:
    """Four of 277 examples more with every seed."""
    right = [(150, 154), (160, 164), (171, 175)]
    plain, other = ([100 * one / 277 for one in column] for column in zip(*right, strict=True))
    scores = frame({"plain": plain, "a": other})
    assert 0 < deviations(scores)["std"].item() < 1e-9 and cells(scores)[1][0][5:] == ["–", "0.5", "–"]


def test_results_of_this_and_of_earlier_versions_are_read(tmp_path: Path) -> None:
    def read(runs: list[dict[str, Any]]) -> tuple[Any, ...]:
        named = dict(zip(("plain-seed1", "plain-seed2", "a-seed1", "a-seed2"), runs, strict=True))
        (tmp_path / "results.json").write_text(json.dumps({"methods": [], "runs": named}), encoding="utf-8")
        (entry,) = deviations(read_scores(tmp_path / "results.json")).iterrows()
        return (*entry[0], entry[1]["mean"])

    reported = [(9, 50), (9, 50), (99, 51), (0, 53)]
    chosen = [{"training": {"scores": {"accuracy": one}}} for one, _ in reported]
    held_out = [{"reported": {"scores": {"valid": {"accuracy": one}}}} for _, one in reported]
    both = [{**one, **other} for one, other in zip(chosen, held_out, strict=True)]
    assert read(both) == ("valid", "accuracy", "a", 2.0), "what is reported counts, and not what was chosen by"
    bleu = [{"translation": {"scores": {"test": {"bleu": 20.0 + n, "bleu_signature": "x"}}}} for n in (0, 0, 1, 3)]
    assert read(bleu) == ("test", "bleu", "a", 2.0)
    now = [{"scores": {"valid": {"accuracy": one, "loss": 1.0}}} for _, one in reported]
    assert read(now) == ("valid", "accuracy", "a", 2.0)
    (tmp_path / "results.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds no runs, so it isn't the results\.json"):
        read_scores(tmp_path / "results.json")
