"""The runs that `attn-reg report` finds in folders, and which of them are averaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attn_reg_plugin.experiments import report_plots
from attn_reg_plugin.experiments.report_logs import lower_is_better
from attn_reg_plugin.experiments.report_page import page
from attn_reg_plugin.experiments.report_runs import compared, read_experiments
from attn_reg_plugin.experiments.run_settings import flags_of
from tests.experiments.run_folders import fairseq_log, make_comparison, make_fine_tuning, make_trainer

METHODS = {"plain": 20.0, "ad_drop": 22.0}


def test_what_shaped_a_run_beside_its_flags_tells_methods_apart(tmp_path: Path) -> None:
    """Runs of earlier versions, which recorded less of it, stand with later ones."""

    def record(folder: Path, **more: str) -> None:
        for run in folder.glob("*/run.json"):
            run.write_text(json.dumps({**json.loads(run.read_text(encoding="utf-8")), **more}), encoding="utf-8")

    folders = [make_fine_tuning(tmp_path / str(seed), METHODS, (seed,)) for seed in (1, 2, 3, 4)]
    record(folders[1], tokenizer="first", further="f")
    record(folders[2], tokenizer="second")
    (both,) = read_experiments(folders[:2])
    assert [len(group.runs) for group in both.groups] == [2, 2] and "tokenizer" not in both.groups[0].settings
    assert [len(group.runs) for one in read_experiments(folders[1:3]) for group in one.groups] == [1] * 4
    assert [len(group.runs) for one in read_experiments(folders[:3]) for group in one.groups] == [2, 2, 1, 1]
    for folder, path in zip(folders[:2], ("a/m.pt", "b/m.pt"), strict=True):
        record(folder, start="the same", flags=f"--finetune-from-model {path}")
    (both,) = read_experiments(folders[:2])
    assert [len(group.runs) for group in both.groups] == [2, 2], "the model lies elsewhere, but is the same"
    record(folders[3], metric="loss", start="the same", flags="--finetune-from-model a/m.pt")
    titles = [one.title for one in read_experiments([folders[0], folders[3]])]
    assert titles == ["rte", "rte (metric loss)"], "checkpoints chosen by another metric are others"


def test_a_part_drawn_anew_for_every_seed_is_no_other_method() -> None:
    part = "--lr 1 --train-fraction 0.5"
    assert flags_of(f"{part} --train-sample-seed 2 --total-num-update 9") == flags_of(f"{part} --total-num-update 8")
    assert flags_of("--train-examples 5 --total-num-update 9")["--total-num-update"] == "9"


def test_of_losses_and_errors_the_lower_is_the_better() -> None:
    lower = ["wer", "eval_WER", "validation loss", "best validation nll_loss", "test ter", "rmse 2", "error", "ECE"]
    higher = ["BLEU", "chrF test2013", "accuracy", "f1", "pearson", "accuracy held out", "mcc", "terms", "merit"]
    assert all(map(lower_is_better, lower)) and not any(map(lower_is_better, higher))


@pytest.mark.parametrize(
    ("ended", "seconds"),
    [
        ({"train_runtime": 2.0, "train_steps_per_second": 2.0}, 1.0),
        ({"train_runtime": 1.0, "train_steps_per_second": 2.0}, 1.0),
        ({"train_runtime": 0.5, "train_steps_per_second": 2.0}, 1.0),
        ({"train_runtime": 4000.0, "train_steps_per_second": 0.001}, 2000.0),
        ({"train_runtime": 2.0, "train_steps_per_second": 20.0}, 1.0),
        ({"train_runtime": 2.0}, 1.0),
    ],
)
def test_the_time_of_an_epoch_is_that_of_the_session_of_trainer_that_measured_it(
    ended: dict[str, float], seconds: float, tmp_path: Path
) -> None:
    """Of 4 steps in 2 epochs: all; the last 2; the last 1; with a rounded rate; a rate of planned steps; none."""
    state = make_trainer(tmp_path / "mine") / "checkpoint-4" / "trainer_state.json"
    content = json.loads(state.read_text(encoding="utf-8"))
    content["log_history"][-1] |= ended
    state.write_text(json.dumps(content), encoding="utf-8")
    (group,) = read_experiments([tmp_path])[0].groups
    assert group.seconds == [pytest.approx(seconds)]


def test_unfinished_runs_do_not_count_beside_finished_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_plots, "draw", lambda height, fill: "<svg/>")
    make_comparison(tmp_path / "runs", METHODS)
    gone = tmp_path / "runs" / "ad_drop-seed3"
    (gone / "result.json").unlink()
    (gone / "train.log").write_text(fairseq_log(1, 50.0), encoding="utf-8")
    (experiment,) = read_experiments([tmp_path / "runs"])
    score, (_, other) = "best validation nll_loss", experiment.groups
    assert [run.finished for run in other.runs] == [True, True, False] and set(other.values(score)) == {1, 2}
    assert len(compared(experiment, other, score).values) == 2 and len(other.curves("validation nll_loss")) == 2
    text = page([experiment], "title")
    assert "<td>2 + 1 unfinished</td>" in text and "Unfinished runs: left out where" in text
    for seed in (1, 2):
        (gone.with_name(f"ad_drop-seed{seed}") / "result.json").unlink()
    (experiment,) = read_experiments([tmp_path / "runs"])
    assert set(experiment.groups[1].values(score)) == {1, 2, 3}, "where none is finished, what the logs say so far"
    assert "<td>3 unfinished</td>" in page([experiment], "title")


def test_a_run_that_was_not_trained_has_no_epochs(tmp_path: Path) -> None:
    """Its only update is in the log as an epoch."""
    result = make_comparison(tmp_path, {"untuned": 20.0}, (1,)) / "untuned-seed1" / "result.json"
    content = json.loads(result.read_text(encoding="utf-8"))
    content["training"] |= {"epochs": 0, "seconds_per_epoch": None}
    result.write_text(json.dumps(content), encoding="utf-8")
    (group,) = read_experiments([tmp_path])[0].groups
    assert group.runs[0].figures.epochs == 0


def test_logs_in_a_folder_with_the_same_epochs_are_runs(tmp_path: Path) -> None:
    for method in METHODS:
        (tmp_path / f"{method}-seed1.log").write_text(fairseq_log(2, METHODS[method]), encoding="utf-8")
    (tmp_path / "generate.log").write_text("no training\n")
    (experiment,) = read_experiments([tmp_path])
    found = {group.title: group.values("best validation nll_loss") for group in experiment.groups}
    assert found == {method: {1: pytest.approx(loss + 0.04)} for method, loss in METHODS.items()}
    (tmp_path / "plain-seed1.log").unlink()
    (alone,) = tmp_path.glob("*-seed1.log")
    lines = alone.read_text(encoding="utf-8").splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if '"epoch": 2' in line)
    # the second epoch stands in both, as after a kill before its checkpoint
    (tmp_path / "more.log").write_text("".join(lines[place:]), encoding="utf-8")
    (group,) = read_experiments([tmp_path])[0].groups
    assert group.title == tmp_path.name, (
        "of a single training the folder is the run, also where it went on in another log"
    )
