"""Power of the paired t-test: against published values and a simulation; and what is read from comparisons."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.report.power import Pilot, effect_shown, power_of, read_pilots, seeds_needed


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


def test_differences_that_vary_by_rounding_only_do_not_vary() -> None:
    """Four of 277 examples more with every seed."""
    right = [(150, 154), (160, 164), (171, 175)]
    values = [100 * after / 277 - 100 * before / 277 for before, after in right]
    pilot = Pilot("", "a", "valid", "accuracy", 3, statistics.fmean(values), statistics.stdev(values), 2)
    assert pilot.deviation > 0 and not pilot.varies


def results(folder: Path, runs: dict[str, Any], title: str = "{}") -> Path:
    folder.mkdir()
    rows = [{"method": name, "title": title.format(name.upper())} for name in ("plain", "a", "b")]
    (folder / "results.json").write_text(json.dumps({"methods": rows, "runs": runs}), encoding="utf-8")
    return folder


def encoder(score: float, **more: Any) -> dict[str, Any]:
    return {"scores": {"valid": {"accuracy": score, "loss": 1.0}}, **more}


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Differences of `a` 1, 2, 3, of `b` 0, 4; seed 9 is plain training's alone."""
    scores = {"plain": [50, 60, 70], "a": [51, 62, 73], "b": [50, 64]}
    runs = {f"{name}-seed{n}": encoder(score) for name, own in scores.items() for n, score in enumerate(own, start=1)}
    return results(tmp_path / "three", {**runs, "plain-seed9": encoder(1.0)})


def test_what_is_read_are_paired_differences(three: Path) -> None:
    first, second, both = read_pilots(three / "results.json")
    assert (first.method, first.metric, first.seeds, first.mean, first.deviation) == ("A", "accuracy", 3, 2.0, 1.0)
    assert (second.method, second.seeds, second.mean) == ("B", 2, 2.0) and second.deviation == pytest.approx(8**0.5)
    assert both.deviation == pytest.approx(((2 * 1 + 1 * 8) / 3) ** 0.5), "variances, weighted by degrees of freedom"
    low, high = first.interval()
    assert low < 1.0 < high and (low, high) == (pytest.approx(0.5207, abs=1e-4), pytest.approx(6.2847, abs=1e-4))


def test_results_of_earlier_versions_are_read(tmp_path: Path) -> None:
    def run(chosen: float, reported: float) -> dict[str, Any]:
        chosen_by = {"training": {"scores": {"accuracy": chosen}}}
        return {**chosen_by, "reported": {"scores": {"valid": {"accuracy": reported}}}}

    runs = {"plain-seed1": run(9, 50), "plain-seed2": run(9, 50), "a-seed1": run(99, 51), "a-seed2": run(0, 53)}
    (only,) = read_pilots(results(tmp_path / "held", runs))
    assert (only.mean, only.subset) == (2.0, "valid"), "what is reported counts, and not what was chosen by"
    bleu = [{"translation": {"scores": {"test": {"bleu": 20.0 + n, "bleu_signature": "x"}}}} for n in (0, 0, 1, 3)]
    (only,) = read_pilots(results(tmp_path / "mt", dict(zip(runs, bleu, strict=True))))
    assert (only.mean, only.metric) == (2.0, "bleu")


def test_translations_have_bleu_and_chrf(tmp_path: Path) -> None:
    runs = {
        f"{name}-seed{n}": {"scores": {"test": {"bleu": 20 + n * k, "chrf": 40.0}, "valid": {"nll_loss": 2.0 * n}}}
        for k, name in enumerate(("plain", "a"), start=1)
        for n in (1, 2)
    }
    bleu, chrf = read_pilots(results(tmp_path / "mt", runs))
    assert (bleu.metric, bleu.worth, bleu.mean) == ("bleu", 0.3, 1.5) and (chrf.metric, chrf.deviation) == ("chrf", 0.0)
    assert main(["power", str(tmp_path / "mt"), "--out", str(tmp_path / "power.md")]) == 0
    table = (tmp_path / "power.md").read_text(encoding="utf-8")
    line = next(" ".join(line.split()) for line in table.splitlines() if "| chrf" in line)
    assert line == "| A | chrf | 2 | +0.00 | 0.00 | 0.3 | – | – |" and "nothing is known of their deviation" in table


def test_the_command(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "power.md"
    assert main(["power", str(three), "--difference", "1", "--out", str(out)]) == 0
    assert "all methods" in capsys.readouterr().out
    table = out.read_text(encoding="utf-8")
    line = f"| A | accuracy | 3 | +2.00 | 1.00 [0.52, 6.28] | 1 | {seeds_needed(1.0)} | {effect_shown(3):.2f} |"
    assert line in " ".join(table.split())
    assert main(["power", str(three), "--out", str(tmp_path / "power.json")]) == 0
    content = json.loads((tmp_path / "power.json").read_text(encoding="utf-8"))
    assert content["rows"][0]["seeds_needed"] == seeds_needed(0.5) == 34


def test_no_figure_of_a_wide_table_is_cut_off(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    title = "the method {} with its options " + "and so on " * 15
    runs = json.loads((three / "results.json").read_text(encoding="utf-8"))["runs"]
    assert main(["power", str(three), str(results(tmp_path / "long", runs, title))]) == 0
    table = capsys.readouterr().out
    assert "…" not in table and title.format("A").strip() in table and table.count("1.00 [0.52, 6.28]") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{three}", "--power", "1"], r"--power is 1.0, but must lie in (0, 1)"),
        (["{three}", "--power", "0.01"], "--power is 0.01, but must be above --level, 0.05"),
        (["{three}", "--difference", "0"], "--difference is 0.0, but must be above 0"),
        (["{nowhere}"], "nowhere"),
        (["{other}"], "holds no runs, so it isn't the results.json"),
        (["{single}"], "has no method with two seeds that plain has, too"),
    ],
)
def test_refusals(three: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    single = results(tmp_path / "single", {"plain-seed1": encoder(1.0), "a-seed1": encoder(2.0)})
    paths = {"three": three, "nowhere": tmp_path / "nowhere.json", "other": tmp_path / "other.json", "single": single}
    assert main(["power", *(word.format(**paths) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("attn-reg power: ") and error.count("\n") == 1
