"""Power of the paired t-test: against published values and a simulation; and what is read from comparisons."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.loading import load

script = load("scripts/seeds_needed.py")


# G*Power and R's power.t.test(type = "paired")
@pytest.mark.parametrize(
    ("effect", "power", "seeds"), [(0.5, 0.8, 34), (0.2, 0.8, 199), (1.0, 0.8, 10), (0.5, 0.9, 44)]
)
def test_known_numbers_of_pairs(effect: float, power: float, seeds: int) -> None:
    assert script.seeds_needed(effect, power) == seeds
    assert script.power_of(seeds - 1, effect) < power <= script.power_of(seeds, effect)


def test_limits() -> None:
    assert script.power_of(5, 0.0) == pytest.approx(0.05)
    assert script.power_of(2, math.inf) == script.power_of(5, 1e6) == 1.0
    assert script.seeds_needed(math.inf) == 2 and script.seeds_needed(1e-4) is None
    for seeds in (2, 10):
        effect = script.effect_shown(seeds)
        assert script.power_of(seeds, effect) == pytest.approx(0.8, abs=1e-6)
        assert script.seeds_needed(effect * 1.0001) == seeds


def table(tmp_path: Path, runs: dict[str, Any]) -> Any:
    (tmp_path / "results.json").write_text(json.dumps({"runs": runs}), encoding="utf-8")
    return script.table(tmp_path / "results.json")


def test_paired_differences(tmp_path: Path) -> None:
    """Differences of `a` are 1, 2, 3, those of `b` vary by rounding only, of `c` there is one."""
    scores = {"plain": [50, 60, 70], "a": [51, 62, 73], "b": [50.1, 60.1, 70.1], "c": [9]}
    entries = {f"{name}-seed{n}": one for name, own in scores.items() for n, one in enumerate(own)}
    runs = {name: {"scores": {"valid": {"accuracy": one, "loss": 1.0}}} for name, one in entries.items()}
    found = table(tmp_path, runs)
    assert list(found.index) == [("valid", "accuracy", "a"), ("valid", "accuracy", "b")]
    first, second = (row for _, row in found.iterrows())
    assert (first["seeds"], first["mean"], first["std"], first["to show"]) == (3, 2.0, 1.0, 0.5)
    assert first["seeds for it"] == 34 and first["shown by these"] == pytest.approx(script.effect_shown(3))
    assert second["seeds for it"] != second["seeds for it"], "not known"
    with pytest.raises(ValueError, match="no runs of plain training"):
        table(tmp_path, {})
