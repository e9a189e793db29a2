"""The table: means over seeds, times, what is marked, and its forms."""

import dataclasses
import io
import json
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from attn_reg_plugin.experiments.report.differences import Difference, interval
from attn_reg_plugin.experiments.report.examples import of_kept
from attn_reg_plugin.experiments.report.results import RunResult, lower_is_better, result_of
from attn_reg_plugin.experiments.report.table import (
    Few,
    Row,
    cells,
    figure_of,
    markdown,
    notes_of,
    publish,
    summarize,
    terminal_table,
)
from attn_reg_plugin.experiments.running.run import read_runs
from tests.experiments.report.run_folders import make_comparison, make_fine_tuning


def run(
    method: str, seed: int, bleu: float, seconds: float | None = 2.0, subsets: tuple[str, ...] = ("test",)
) -> RunResult:
    scores = {(subset, name): bleu + more for subset in subsets for name, more in (("bleu", 0.0), ("chrf", 20.0))}
    return RunResult(method, method, seed, Path("none"), scores | {("valid", "nll_loss"): 3 + bleu / 100}, seconds, 4)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_means_deviations_and_relative_times() -> None:
    runs = [run("plain", 1, 10), run("plain", 2, 13), run("ad_drop", 1, 20, 2.5), run("ad_drop", 2, 20, 2.9)]
    plain, other = summarize(runs)
    assert plain.figures["test"]["bleu"].mean == 11.5
    assert plain.figures["test"]["bleu"].std == pytest.approx(statistics.stdev([10, 13]))
    assert plain.relative_time == 1.0 and other.relative_time == pytest.approx(1.35)
    assert other.figures["test"]["bleu"].std == 0.0 and other.differences["test"]["bleu"].mean == 8.5
    (alone,) = summarize(runs[2:])
    assert alone.relative_time is None and alone.seconds_per_epoch == figure_of([2.5, 2.9]) and not alone.differences
    assert [row.relative_time for row in summarize([*runs, run("untuned", 1, 5, None)])][-1] is None


def test_the_cells_of_a_single_seed_have_no_deviation() -> None:
    header, body = cells(summarize([run("plain", 1, 10), run("ad_drop", 1, 12.346, 3.0)]))
    assert header == [
        *("method", "BLEU", "BLEU − plain", "chrF", "best valid nll_loss"),
        *("elapsed s/epoch", "elapsed × plain", "seeds"),
    ]
    assert body == [
        ["plain", "10.00", "–", "30.00", "3.100", "2.00", "1.00", "1"],
        ["ad_drop", "12.35", "+2.35", "32.35", "3.123", "3.00", "1.50", "1"],
    ]


def test_several_test_sets_and_unknown_times() -> None:
    runs = [run("ad_drop", seed, 10.0 + 2 * seed, None, ("test", "test1")) for seed in (1, 2)]
    header, body = cells(summarize(runs), {"test": "test", "test1": "test1"})
    assert header[1:5] == ["BLEU test", "chrF test", "BLEU test1", "chrF test1"]
    assert body[0][1] == "13.00 ± 1.41" and body[0][-3:] == ["–", "–", "2"]
    earlier = dataclasses.replace(runs[0], method="plain", epochs=2)
    header, body = cells(summarize([*runs, earlier]))
    assert [line[header.index("epochs")] for line in body] == ["4", "2"], "patience ended one earlier"


def test_few_seeds_are_in_italics_and_dim_and_brackets_and_bars_are_text() -> None:
    difference = {"test": {"bleu": Difference(2.0, -0.5, 4.0, 2, "seeds and examples")}}
    three, two = {"test": {"bleu": figure_of([10.0] * 3)}}, {"test": {"bleu": figure_of([12.0] * 2)}}
    rows = [Row("plain", "plain", 3, three), Row("ad", "[red] $p$ a|b", 2, two, differences=difference)]
    header, body = cells(rows)
    plain, other = (" ".join(line.split()) for line in markdown(header, body, []).splitlines()[2:4])
    assert "*" not in plain, "three seeds are enough"
    assert other == r"| [red] $p$ a\|b | *12.00 ± 0.00* | *+2.00 [-0.50, +4.00]* | – | – | 2 |"
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(terminal_table(header, body))
    assert "\x1b[2m12.00 ± 0.00" in shown(console) and "\x1b[2m10.00" not in shown(console)
    assert "[red] $p$ a|b" in shown(console)
    assert notes_of(rows) == [
        "± standard deviation over seeds",
        "− plain: mean difference to the run of the same seed [95 % interval over seeds and examples]",
        "elapsed: wall-clock seconds in updates, which other work on the machine lengthens",
        "in italics, in a terminal dim: fewer than 3 seeds",
    ]


def test_a_run_that_predicts_one_class_is_said(tmp_path: Path) -> None:
    """Two such runs look like a clean tie."""
    make_fine_tuning(tmp_path, {"plain": (20, 20, 20), "ad_drop": (20, 20, 18)})
    rows = summarize([result_of(one) for one in read_runs(tmp_path)])
    assert {row.method: row.constant for row in rows} == {"plain": [1, 2, 3], "ad_drop": [1, 2]}
    _, body = cells(rows[:1])
    assert body[0][1] == "96.67 ± 5.77 †" and not isinstance(body[0][1], Few)
    (said,) = [note for note in notes_of(rows) if note.startswith("† ad_drop")]
    assert "seeds 1, 2: one output for every example" in said


def test_runs_that_were_best_in_the_last_epoch_are_said(tmp_path: Path) -> None:
    """With more epochs they might be better; where only the last is validated that says nothing."""
    risen = "runs that were best in the last epoch, so that more may change the order: "
    make_fine_tuning(tmp_path / "rte", {"plain": (11, 13), "ad_drop": (15, 16)})
    path = tmp_path / "rte" / "ad_drop-seed1" / "result.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"best_epoch": 3', '"best_epoch": 2'), encoding="utf-8")
    runs = read_runs(tmp_path / "rte")
    assert risen + "ad_drop (1 of 2); plain (2 of 2)" in notes_of(summarize([result_of(one) for one in runs]))
    for one in runs:
        one.flags["validate-interval"] = "3"
    assert not [note for note in notes_of(summarize([result_of(one) for one in runs])) if note.startswith(risen)]
    make_comparison(tmp_path / "en-ro", {"plain": 20.0})
    rows = summarize([result_of(one) for one in read_runs(tmp_path / "en-ro")])
    assert not [note for note in notes_of(rows) if note.startswith(risen)], "the fifth of six epochs"


def test_runs_that_could_not_show_a_method_are_said(tmp_path: Path) -> None:
    """As one epoch of cross-tuning, or a training within the warm-up; and other runs of the folder."""
    root = make_comparison(tmp_path, {"plain": 20.0, "ad_drop": 21.0}, (1, 2))
    log, settings = root / "ad_drop-seed2" / "train.log", root / "ad_drop-seed2" / "run.json"
    acted = log.read_text().replace('"train_nll_loss"', '"train_attn_reg/regularized": "0.5", "train_nll_loss"')
    log.write_text(acted)
    settings.write_text(settings.read_text().replace('"lr": 0.001', '"lr": 0.001, "warmup-updates": 61'))
    runs = read_runs(root)
    plain, other = summarize([result_of(run) for run in runs])[::-1]
    assert (plain.idle, plain.warming, other.idle, other.warming) == ([], [], [1], [2])
    publish(root, runs[:2], [], Console(file=io.StringIO()))
    notes = (root / "results.md").read_text()
    assert (
        "(one epoch of cross-tuning is plain): ad_drop (1 of 2)" in notes and "lower --warmup: ad_drop (1 of 2" in notes
    )
    assert f"2 other runs in {root} are not in this table" in notes


def test_a_table_is_published(tmp_path: Path) -> None:
    make_comparison(tmp_path, {"plain": 20.0, "ad_drop": 22.0})
    runs = sorted(read_runs(tmp_path), key=lambda one: one.method != "plain")
    console = Console(file=io.StringIO(), width=60)
    publish(tmp_path, runs, ["of made-up runs"], console)
    assert "│ ad_drop │ 22.20 ± 0.10 │ +2.00 [+2.00, +2.00] │" in shown(console), "as wide as the table"
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert len(text.splitlines()) == 2 + 6 + 8, "a line a method, and a line a run"
    assert [row["method"] for row in content["methods"]] == ["plain", "ad_drop"] and content["task"] == "en-ro"
    assert content["methods"][1]["figures"]["test"]["bleu"] == {"mean": 22.2, "std": pytest.approx(0.1), "seeds": 3}
    assert content["runs"]["ad_drop-seed2"]["flags"]["lr"] == 0.001 and content["signatures"] == ["BLEU tok:13a"]
    lines = (tmp_path / "results.md").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("| method") and "- of made-up runs" in lines


def test_intervals_and_epochs_are_in_the_results(tmp_path: Path) -> None:
    make_fine_tuning(tmp_path, {"plain": (11, 13, 12), "ad_drop": (15, 13, 16)})
    publish(
        tmp_path, sorted(read_runs(tmp_path), key=lambda one: one.method != "plain"), [], Console(file=io.StringIO())
    )
    content = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert content["runs"]["ad_drop-seed1"]["examples"] == {"valid": {"accuracy": "1" * 15 + "0" * 5}}
    assert content["runs"]["ad_drop-seed1"]["curves"]["validation accuracy"] == {"1": 25.0, "2": 50.0, "3": 75.0}
    kept = [
        [
            of_kept("accuracy", content["runs"][f"{method}-seed{seed}"]["examples"]["valid"]["accuracy"])
            for seed in (1, 2, 3)
        ]
        for method in ("ad_drop", "plain")
    ]
    written = content["methods"][1]["differences"]["valid"]["accuracy"]
    assert interval(list(zip(*kept, strict=True))) == (written["low"], written["high"])
    assert written["drawn"] == "seeds and examples"


def test_names_of_scores_that_are_better_the_lower() -> None:
    lower = ["wer", "eval_WER", "validation loss", "nll_loss", "test ter", "rmse 2", "error"]
    higher = ["bleu", "chrF test2013", "accuracy", "f1", "pearson", "accuracy held out", "mcc", "terms", "merit"]
    assert all(map(lower_is_better, lower)) and not any(map(lower_is_better, higher))
