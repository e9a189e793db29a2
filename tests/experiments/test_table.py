"""The table: means over seeds, relative times, Markdown."""

from __future__ import annotations

import io
import statistics
from typing import Any

import pytest
from rich.console import Console

from attn_reg_plugin.experiments.differences import Difference
from attn_reg_plugin.experiments.methods import Method
from attn_reg_plugin.experiments.table import cells, markdown, statistics_notes, summarize, terminal_table

PLAIN, OTHER = Method("plain", "plain", ()), Method("ad_drop", "AD-DROP", ())


def _result(bleu: float, seconds: float | None, subsets: tuple[str, ...] = ("test",)) -> dict[str, Any]:
    return {
        "training": {"best_valid_loss": 3.0 + bleu / 100, "loss": "nll_loss", "seconds_per_epoch": seconds},
        "translation": {"scores": {subset: {"bleu": bleu, "chrf": bleu + 20} for subset in subsets}},
    }


def test_means_and_standard_deviations_over_seeds() -> None:
    results = {
        "plain": [_result(10, 2.0), _result(13, 2.0)],
        "ad_drop": [_result(20, 2.5), _result(20, 2.9)],
    }
    plain, other = summarize([PLAIN, OTHER], results)
    assert plain.bleu["test"].mean == 11.5
    assert plain.bleu["test"].std == pytest.approx(statistics.stdev([10, 13]))
    assert plain.relative_time == 1.0
    assert other.relative_time == pytest.approx(1.35)
    assert other.bleu["test"].std == 0.0


def test_the_cells_of_one_seed_have_no_deviation() -> None:
    header, body = cells(
        summarize([PLAIN, OTHER], {"plain": [_result(10, 2.0)], "ad_drop": [_result(12.346, 3.0)]}), "nll_loss"
    )
    assert header == ["method", "BLEU", "chrF", "best valid nll_loss", "s/epoch", "time × plain", "seeds"]
    assert body == [
        ["plain", "10.00", "30.00", "3.100", "2.00", "1.00", "1"],
        ["AD-DROP", "12.35", "32.35", "3.123", "3.00", "1.50", "1"],
    ]


def test_several_test_sets_and_unknown_times() -> None:
    rows = summarize([OTHER], {"ad_drop": [_result(12, None, ("test", "test1")), _result(14, None, ("test", "test1"))]})
    header, body = cells(rows, "loss")
    assert header[1:5] == ["BLEU test", "chrF test", "BLEU test1", "chrF test1"]
    assert body[0][1] == "13.00 ± 1.41"
    assert body[0][-3:] == ["–", "–", "2"]


def test_without_plain_there_is_no_relative_time() -> None:
    (row,) = summarize([OTHER], {"ad_drop": [_result(12, 2.0)]})
    assert row.relative_time is None and row.seconds_per_epoch is not None


def test_differences_have_a_column_and_few_seeds_are_grey() -> None:
    found = {"ad_drop": {"test": {"bleu": Difference(2.0, -0.5, 4.0, 2, "seeds and examples")}}}
    results = {"plain": [_result(10, 2.0)] * 3, "ad_drop": [_result(12, 2.0)] * 2}
    rows = summarize([PLAIN, OTHER], results, found)
    header, body = cells(rows, "loss")
    assert header[:4] == ["method", "BLEU", "BLEU − plain", "chrF"]
    assert [line[2] for line in body] == ["–", "+2.00 [-0.50, +4.00]"]
    plain, other = markdown(header, body, []).splitlines()[2:4]
    assert "*" not in plain, "three seeds are enough"
    assert other == "| AD-DROP | *12.00 ± 0.00* | *+2.00 [-0.50, +4.00]* | *32.00 ± 0.00* | *3.120 ± 0.000* | " + (
        "*2.00 ± 0.00* | *1.00* | 2 |"
    )
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(terminal_table(header, body))
    shown = console.file.getvalue()
    assert "\x1b[2m12.00 ± 0.00" in shown and "\x1b[2m10.00" not in shown and "10.00 ± 0.00" in shown
    assert statistics_notes(rows) == [
        "± standard deviation over seeds",
        "− plain: mean difference to the run of the same seed [95 % interval: bootstrap over seeds and examples]; "
        "of all figures in results.json",
        "in italics, in a terminal grey: fewer than 3 seeds",
    ]


def test_markdown() -> None:
    text = markdown(["method", "BLEU"], [["plain", "1.00"]], ["a note"])
    assert text == "| method | BLEU |\n|---|---|\n| plain | 1.00 |\n\n- a note\n"
