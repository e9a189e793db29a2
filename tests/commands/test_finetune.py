"""`attn-reg finetune`: its plan, what it refuses, what a run is known by, the predictions that it keeps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

import numpy as np
import torch
from fairseq import tasks

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments import trained as trained_module
from attn_reg_plugin.experiments.checks import check_runs
from attn_reg_plugin.experiments.dry_run import parse_command
from attn_reg_plugin.experiments.fine_tuning import FineTuning
from attn_reg_plugin.experiments.methods import known_methods, select_methods
from attn_reg_plugin.experiments.predicted import file_of, read_predictions, write_predictions
from attn_reg_plugin.experiments.runs import Run
from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.labelled import IGNORED, REGRESSION, TAGGING, LabelledTask, read_split
from attn_reg_plugin.labelled.metrics import SENTENCE_END, tag_codes
from attn_reg_plugin.tasks.fairseq_settings import FAIRSEQ_SETTINGS
from tests.commands.conftest import fine_tuning_of as parsed
from tests.models.hf_folders import TOYS, make_encoder, make_mnli

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(*words: str, methods: str = "plain") -> list[Run]:
    return parsed(*words).plan(select_methods(methods))


def said(run: Run) -> str:
    """The command of a run's training, on a line."""
    return " ".join(run.train_command())


def test_the_plan(rte: list[str]) -> None:
    words = [*rte, "--seeds", "1,2", "--batch-size", "10", "--epochs", "2", "--", "--no-grouping"]
    runs = parsed(*words).plan(select_methods("plain,ad_drop", ["ad_drop=--ad-drop-p 0.1"]))
    assert [one.folder.name for one in runs] == ["plain-seed1", "ad_drop-seed1", "plain-seed2", "ad_drop-seed2"]
    assert "--task attn_reg_text_classification --arch hf_encoder" in said(runs[1]) and "--labelled rte" in said(
        runs[1]
    )
    assert "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric" in said(runs[1])
    assert "--total-num-update 10 " in said(runs[1]) and " --no-grouping --attn-reg ad_drop " in said(runs[1])
    assert runs[1].flags["ad-drop-p"] == "0.1" and runs[1].settings["labels"] == ["entailment", "not_entailment"]
    assert (runs[0].method, runs[0].title, runs[0].metric) == ("plain", "plain", ("accuracy", True))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--lr-scheduler polynomial_decay --warmup-updates 2 --total-num-update 30 "),
        (["--lr-scheduler", "fixed", "--warmup", "0"], "--lr-scheduler fixed --warmup-updates 0 --batch-size"),
        (["--lr-scheduler", "cosine"], "--lr-scheduler cosine --warmup-updates 2 --lr-period-updates 28 "),
        (["--lr-scheduler", "inverse_sqrt", "--warmup", "0"], "--lr-scheduler inverse_sqrt --warmup-updates 1 "),
        (
            ["--metric", "mcc"],
            "--best-checkpoint-metric mcc --maximize-best-checkpoint-metric --validation-metrics mcc,",
        ),
        (["--metric", "loss"], "--best-checkpoint-metric loss --optimizer"),
        (["--train-examples", "5"], "--total-num-update 10 .*--train-examples 5 --cpu"),
        (["--train-fraction", "0.25"], "--total-num-update 10 .*--train-fraction 0.25 --train-sample-seed 2"),
        (["--train-per-class", "9"], "--total-num-update 20 .*--train-per-class 9 --train-sample-seed 2"),
        (["--held-out", "0.25"], "--total-num-update 30 .*--held-out 0.25 --cpu"),
        (["--train-examples", "20", "--held-out", "0.25"], "--total-num-update 10 .*--held-out 0.25 --cpu"),
        (["--precision", "bfloat16"], "--max-length 40 --autocast bfloat16 --cpu"),
        (["--label-noise", "0.25"], "--label-noise 0.25 --cpu"),
        (
            ["--shortcut", "0.8", "--shortcut-words", "w1,w2"],
            "--shortcut 0.8 --shortcut-words w1,w2 --shortcut-at-evaluation none --cpu",
        ),
        (
            ["--shortcut", "1", "--shortcut-at-evaluation", "random"],
            "--shortcut 1.0 --shortcut-words w[0-9]+,w[0-9]+ --shortcut-at-evaluation random --cpu",
        ),
    ],
)
def test_settings_become_flags_that_fairseq_takes(rte: list[str], words: list[str], expected: str) -> None:
    (run,) = planned(*rte, "--max-length", "40", "--seeds", "2", *words)
    assert re.search(expected, said(run))
    check_runs([run])


def test_files_of_ones_own_are_described_by_flags(rte: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("train.csv", "valid.csv"):
        rows = [f'"w{n} w1","w2, w3",{"yes" if n % 2 else "no"}' for n in range(6)]
        (folder / name).write_text("\n".join(["title,body,answer", *rows]) + "\n", encoding="utf-8")
    columns = ["--text-columns", "title,body", "--label-column", "answer"]
    words = ["classification", str(folder), *rte[2:], "--max-length", "40", *columns]
    (run,) = planned(*words)
    assert "--text-columns title,body" in said(run) and "--labelled" not in said(run)
    assert (run.settings["task"], run.settings["labels"]) == ("mine", ["no", "yes"])
    check_runs([run])
    for words, reason in (
        ([*rte, *columns], "--: rte is a task with files of its own; leave --text-columns out"),
        (["classification", "hub", *rte[2:], *columns], "classification is for files of your own, but DATA is hub"),
        (["classification", str(folder), *rte[2:]], "has 1 or 2 --text-columns, not 0"),
        (["tagging", str(folder), *rte[2:]], "--file-format|has no training file|csv is not for tagging"),
    ):
        with pytest.raises(ValueError, match=reason.removeprefix("--: ")):
            planned(*words)


def test_every_seed_trains_on_examples_of_its_own(rte: list[str]) -> None:
    """As fairseq-train reads them: so many of every class, the same for every method."""
    found = []
    words = [*rte, "--max-length", "40", "--seeds", "1,2", "--train-per-class", "9"]
    for run in planned(*words, methods="plain,ad_drop"):
        args = parse_command(run.train_command(), "training")
        vars(args).update({f"attn_{name}": None for name, _ in FAIRSEQ_SETTINGS})  # which fairseq fills in later
        task = tasks.setup_task(args)
        task.load_dataset("train")
        rows = task.dataset("train").rows
        assert sorted(row.label for row in rows) == [0] * 9 + [1] * 9
        found.append([row.input_ids.tolist() for row in rows])
    assert found[0] == found[1] != found[2] == found[3]


@pytest.mark.parametrize(("devices", "alone"), [(1, False), (2, True)])
def test_updates_are_counted_for_one_process(
    rte: list[str], devices: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    for words, expected in ((rte, False), ([word for word in rte if word != "--cpu"], alone)):
        (run,) = planned(*words)
        assert ("--distributed-world-size 1" in said(run)) == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--methods", "untuned"], "unknown method 'untuned'"),
        (["--metric", "bleu"], "unknown metric 'bleu' of rte; the metrics are: accuracy, f1"),
        (["--train-examples", "49"], "--train-examples is 49, but there are 48 training examples"),
        (["--train-per-class", "49"], r"--train-per-class is 49, but no class has more than \d\d examples$"),
        (["--held-out", "0.001"], "--held-out 0.001 of 48 training examples is none"),
        (["--label-noise", "0.001"], "--label-noise 0.001 is 0 of 48 training examples, but it takes at least 1"),
        (["--", "--seed", "7"], "--train-flags has --seed, which the setting seeds decides; give that"),
        (["--", "--held-out=0.1"], "--train-flags has --held-out, which the setting held_out decides; give that"),
        (["--", "--best-checkpoint-metric", "loss"], "has --best-checkpoint-metric, which the setting metric decides"),
        *((["--", flag, "wnli"], f"has {flag}, which the setting task decides") for flag in ("--labelled", "--task")),
        *((["--", flag, "x"], f"has {flag}, which the setting model decides") for flag in ("--hf-model", "-a")),
        (["--", "--lr-scheduler", "cosine"], "has --lr-scheduler, which the setting lr_scheduler decides; give that"),
        (
            ["--method-flags", "plain=--shortcut 0.5"],
            "--method-flags: plain has --shortcut, which the setting shortcut decides; give that",
        ),
        (
            ["--shortcut", "0.5", "--shortcut-words", "w1"],
            "--shortcut-words has 1, but must have one for each of the 2",
        ),
    ],
)
def test_finetune_refuses(rte: list[str], words: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed(*rte, *words).carry_out()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--max-length", "900"], "inputs of 900 tokens were asked for, but the length must be at least 4 and at most"),
        (["--model", "/nowhere/at/all"], "--hf-model: there is no folder /nowhere/at/all"),
        (["--shortcut", "0.5", "--shortcut-words", "w1,fishy"], "'fishy', which the model's tokenizer does not know"),
        (["--model", "{data}"], "neither a folder of a model nor a name"),
        (["--", "--nonsense"], "plain: unrecognized arguments: --nonsense"),
        (["--", "--attn-sites", "encoder.self[9]"], "ad_drop: --attn-sites 'encoder.self[9]'"),
        (["--method-flags", "ad_drop=--ad-drop-q x"], "ad_drop: argument --ad-drop-q: invalid"),
        (["--", "--dropout", "3"], "plain: --dropout is 3.0, but must be in [0, 1)"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(
    rte: list[str], words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(data=tmp_path / "data") for word in words]
    assert main(["finetune", *rte, "--max-length", "40", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.startswith("attn-reg finetune: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: (folder / "encoder" / "model.safetensors").unlink(), "encoder has no weights"),
        (
            lambda folder: os.truncate(folder / "encoder" / "model.safetensors", 0),
            "model.safetensors cannot be read: it",
        ),
        (lambda folder: os.truncate(folder / "encoder" / "model.safetensors", 900), "model.safetensors cannot be read"),
        (lambda folder: (folder / "encoder" / "config.json").write_text("{"), "neither a folder of a model nor a name"),
        (lambda folder: (folder / "encoder" / "tokenizer.json").unlink(), "tokenizer of"),
        (lambda folder: (folder / "data" / "dev.tsv").write_bytes(b"index\tx\0\n"), "dev.tsv, line 1: not text (a NUL"),
    ],
)
def test_a_folder_that_cannot_work_is_said_too(
    rte: list[str], break_it: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it(tmp_path)
    assert main(["finetune", *rte, "--max-length", "40"]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_can_work_is_let_through(rte: list[str]) -> None:
    check_runs(planned(*rte, "--max-length", "40", methods=",".join(known_methods(FineTuning.without))))


# -- what a run is known by -------------------------------------------------------------------------------------------


def test_a_run_is_of_its_data_and_its_model(rte: list[str], tmp_path: Path) -> None:
    (before,) = planned(*rte)
    assert planned(*rte)[0].settings == before.settings
    with (tmp_path / "data" / "dev.tsv").open("a", encoding="utf-8") as file:
        file.write("21\tw1\tw2\tentailment\n")
    (changed,) = planned(*rte)
    make_encoder(tmp_path / "encoder", seed=2)
    (again,) = planned(*rte)
    assert before.settings["data"] != changed.settings["data"] == again.settings["data"]
    models = [one.settings["files"]["hf-model"] for one in (before, changed, again)]
    (tmp_path / "encoder" / "vocab.txt").write_text("other\n", encoding="utf-8")
    models.append(planned(*rte)[0].settings["files"]["hf-model"])
    assert models[0] == models[1] and len(set(models)) == 3


def test_a_run_is_of_its_further_validation_set(rte: list[str], tmp_path: Path) -> None:
    make_mnli(tmp_path / "mnli")
    words = ["mnli", str(tmp_path / "mnli"), *rte[2:]]
    (tmp_path / "mnli" / "dev_mismatched.tsv").rename(tmp_path / "further.tsv")
    settings = [planned(*words)[0].settings]
    text = (tmp_path / "further.tsv").read_text()
    for content in (text, text.replace("w1", "w2")):
        (tmp_path / "mnli" / "dev_mismatched.tsv").write_text(content)
        settings.append(planned(*words)[0].settings)
    assert [one["subsets"] for one in settings] == [["valid"], *[["valid", "valid1"]] * 2]
    assert "further" not in settings[0] and settings[1]["further"] != settings[2]["further"]


def test_updates_are_counted_with_the_flags_that_change_them(rte: list[str]) -> None:
    """Of 48 examples in batches of 16, 10 epochs."""

    def updates(*words: str) -> str:
        return str(planned(*rte, *words)[0].flags["total-num-update"])

    assert updates() == "30" and updates("--", "--update-freq", "2") == "20"
    assert updates("--", "--max-sentences=8", "--max-epoch", "3") == "18" and updates("--", "--max-update", "7") == "7"
    assert updates("--", "--max-epoch", "0", "--max-update", "70") == "70"
    skipped = updates("--max-length", "40", "--", "--skip-remainder-batch")
    assert skipped == "20", "fairseq leaves out the last batch of an epoch"
    fives = ("--max-length", "5", "--", "--max-tokens", "20")  # four of these inputs
    assert updates(*fives) == updates(*fives, "--batch-size=64") == "120"
    assert updates(*fives, "--max-epoch", "0", "--max-update", "70") == "70"
    assert updates("--", "--update-freq", "2,1") == "29", "two batches an update in the first epoch alone"
    for wrong in (["--update-freq", "x"], ["--batch-size", "0"], ["--max-epoch", "0"]):
        with pytest.raises(ValueError, match=f"^plain: (argument )?{wrong[0]}"):
            updates("--", *wrong)


def test_batches_are_counted_once_for_all_seeds(rte: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("attn_reg_plugin.experiments.checks._counted", lambda one, _: asked.append(one.method) or 7)
    runs = planned(*rte, "--seeds", "1,2", "--", "--max-tokens", "40", methods="plain,ad_drop")
    assert asked == ["plain", "ad_drop"] and {one.flags["total-num-update"] for one in runs} == {7}


def test_a_folder_that_fairseq_splits_is_refused(rte: list[str], tmp_path: Path) -> None:
    (tmp_path / "data").rename(tmp_path / "da:ta")
    with pytest.raises(ValueError, match=r"^DATA .*da:ta has ':', at which fairseq splits paths; give another folder$"):
        planned(*(word.replace(str(tmp_path / "data"), str(tmp_path / "da:ta")) for word in rte))


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["mnli", "stsb", "wnut17", "swag"], indirect=True)
def test_predictions_are_kept_example_by_example(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the logits' decisions."""
    task = trained.labelled
    data = make_mnli(tmp_path / "data") if task.name == "mnli" else TOYS[task.name][0](tmp_path / "data")
    monkeypatch.setattr(trained_module, "load_trained", lambda run, cpu: trained)
    subsets = ["valid", "valid1"] if task.name == "mnli" else ["valid"]
    write_predictions(tmp_path, str(data), subsets, cpu=True)
    for subset in subsets:
        rows = trained.encode(read_split(task, data, subset))
        found = read_predictions(file_of(tmp_path, subset), task.kind, task.labels or ())
        assert [part.tolist() for part in found] == decided(task, rows, trained.logits(rows))
    file_of(tmp_path, "valid").write_text("prediction\tgold\nx\ty\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"valid\.tsv, line 2: 'x\\ty' isn't a prediction and its gold label"):
        read_predictions(file_of(tmp_path, "valid"), task.kind, task.labels or ())


def decided(task: LabelledTask, rows: Sequence[Any], logits: Sequence[torch.Tensor]) -> list[list[float]]:
    """Predictions and gold labels as metrics take them."""
    if task.kind == REGRESSION:
        return [[float(row[0]) for row in logits], [row.label for row in rows]]
    if task.kind != TAGGING:
        return [[int(row.argmax()) for row in logits], [row.label for row in rows]]
    codes, found = np.array(tag_codes(task.labels)), ([], [])
    for row, one in zip(rows, logits, strict=True):
        words = row.label != IGNORED
        for part, tags in zip(found, (one.argmax(-1).numpy(), row.label), strict=True):
            part.extend([*codes[tags[words]].tolist(), SENTENCE_END])
    return list(found)


@pytest.mark.slow
def test_a_comparison_from_beginning_to_end(rte: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*rte, "--methods", "plain,ad_drop", "--epochs", "2", "--lr", "0.003", "--max-length", "40"]
    assert parsed(*words).carry_out() == 0
    assert "the same command goes on where it ended" in capsys.readouterr().out, "resuming is said at the start"
    first = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert re.search(r"\| plain +\|", first) and re.search(r"\| ad_drop +\|", first), "as they were typed"
    checkpoints = (tmp_path / "out" / "plain-seed1" / "checkpoints").glob("*.pt")
    assert {path.name for path in checkpoints} == {"checkpoint_best.pt"}
    content = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert content["methods"][1]["differences"]["valid"]["accuracy"]["drawn"] == "examples"
    for run in parsed(*words).plan(select_methods("plain,ad_drop")):
        predicted, gold = read_predictions(file_of(run.folder, "valid"), "classification", run.settings["labels"])
        assert run.scores["valid"]["accuracy"] == pytest.approx(100 * (predicted == gold).mean(), abs=0.01)
    assert parsed(*words).carry_out() == 0
    assert capsys.readouterr().out.count("(was done)") == 2
    assert (tmp_path / "out" / "results.md").read_text(encoding="utf-8") == first
    with pytest.raises(ValueError, match="holds a run with other settings"):
        parsed(*words, "--", "--no-grouping").carry_out()
