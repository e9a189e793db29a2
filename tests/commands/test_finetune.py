"""`attn-reg finetune`: its plan, what it refuses, what a run is known by, its examples, the predictions it keeps."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_reg_plugin.cli import _parsed, main
from attn_reg_plugin.experiments import trained as trained_module
from attn_reg_plugin.experiments.fine_tuning import FineTuning
from attn_reg_plugin.experiments.methods import known_methods, select_methods
from attn_reg_plugin.experiments.predicted import file_of, read_predictions, write_predictions
from attn_reg_plugin.experiments.running import checks
from attn_reg_plugin.experiments.running import run as runs_module
from attn_reg_plugin.experiments.running.run import Run
from attn_reg_plugin.experiments.steps import from_arguments
from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.labelled import REGRESSION, TAGGING, LabelledTask, read_split
from attn_reg_plugin.labelled.metrics import SENTENCE_END, tag_codes
from attn_reg_plugin.regularizers.base.outputs import IGNORED
from tests.experiments.starting import task_of
from tests.models.hf_folders import make_encoder, make_mnli, make_toy

pytestmark = pytest.mark.usefixtures("one_thread")


def parsed(*words: str) -> FineTuning:
    return from_arguments(FineTuning, _parsed("finetune", words))


def planned(*words: str, methods: str = "plain") -> list[Run]:
    return parsed(*words).plan(select_methods(methods))


def said(run: Run) -> str:
    return " ".join(run.train_command())


def test_the_plan(rte: list[str]) -> None:
    words = [*rte, "--seeds", "1,2", "--batch-size", "10", "--epochs", "2", "--", "--no-grouping"]
    runs = parsed(*words).plan(select_methods("plain,ad_drop", ["ad_drop=--ad-drop-p 0.1"]))
    assert [one.folder.name for one in runs] == ["plain-seed1", "ad_drop-seed1", "plain-seed2", "ad_drop-seed2"]
    for part in (
        "--task attn_reg_text_classification --arch hf_encoder",
        "--labelled rte",
        "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric",
        "--total-num-update 10 ",
        " --no-grouping --attn-reg ad_drop --ad-drop-p 0.1 ",
    ):
        assert part in said(runs[1])
    assert runs[1].settings["labels"] == ["entailment", "not_entailment"]
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
    checks.check_runs([run])


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
    checks.check_runs([run])
    commas = [path.write_text(path.read_text().replace(",yes", ',"yes, sure"')) for path in folder.iterdir()]
    (other,) = planned(*words)
    assert len(commas) == 2 and "labels" not in other.flags and other.settings["labels"] == ["no", "yes, sure"]
    checks.check_runs([other])
    for wrong, reason in (
        ([*rte, *columns], "--: rte is a task with files of its own; leave --text-columns out"),
        (["classification", "hub", *rte[2:], *columns], "classification is for files of your own, but DATA is hub"),
        (
            ["clasification", *rte[1:], *columns],
            "unknown labelled task 'clasification'; .* own classification, regress",
        ),
        (["classification", "gone", *rte[2:], *columns], "gone is no folder; give the one with your"),
        (["classification", str(folder), *rte[2:]], "has 1 or 2 --text-columns, not 0"),
        ([*words, "--shortcut", "1", "--shortcut-words", "w1"], "has 1, but must have one for each of the 2"),
        (["tagging", str(folder), *rte[2:]], "has no train.conll"),
    ):
        with pytest.raises(ValueError, match=reason.removeprefix("--: ")):
            planned(*wrong)


def test_every_seed_trains_on_examples_of_its_own(rte: list[str]) -> None:
    """As fairseq-train reads them: so many of every class, the same for every method."""
    found = []
    words = [*rte, "--max-length", "40", "--seeds", "1,2", "--train-per-class", "9"]
    for run in planned(*words, methods="plain,ad_drop"):
        task = task_of(run)
        task.load_dataset("train")
        rows = task.dataset("train").rows
        assert sorted(row.label for row in rows) == [0] * 9 + [1] * 9
        found.append([row.input_ids.tolist() for row in rows])
    assert found[0] == found[1] != found[2] == found[3]


def test_updates_are_those_of_the_examples_that_are_trained_on(rte: list[str]) -> None:
    """Count what is held out of each class by the labels that are trained on, wrong ones too."""
    words = [*rte, "--max-length", "40", "--train-per-class", "7", "--held-out", "0.25", "--label-noise", "0.2"]
    for run in planned(*words, "--seeds", "1,2,3,4", "--batch-size", "1", "--epochs", "1"):
        task = task_of(run)
        task.load_dataset("train")
        assert run.flags["total-num-update"] == len(task.dataset("train").rows)


def test_updates_are_counted_for_one_process(rte: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpus = [word for word in rte if word != "--cpu"]
    for devices, words, expected in ((1, rte, False), (1, on_gpus, False), (2, rte, False), (2, on_gpus, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        assert ("--distributed-world-size 1" in said(planned(*words)[0])) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--methods", "untuned"], "unknown method 'untuned'"),
        (["--metric", "bleu"], "unknown metric 'bleu' of rte; the metrics are: accuracy, f1"),
        (["--train-examples", "49"], "--train-examples is 49, but there are 48 training examples"),
        (["--train-per-class", "49"], "--train-per-class is 49, but no class has more than "),
        (["--held-out", "0.001"], "--held-out 0.001 of 48 training examples is none"),
        (["--label-noise", "0.001"], "--label-noise 0.001 is 0 of 48 training examples, but it takes at least 1"),
        (["--", "--held-out=0.1"], "--train-flags has --held-out, which the setting held_out decides; give that"),
        (["--", "--task", "wnli"], "has --task, which the setting task decides"),
        (["--", "--validation-metrics", "f1"], "has --validation-metrics, which the setting metric decides"),
        (["--", "-a", "x"], "has -a, which the setting model decides"),
        (
            ["--method-flags", "plain=--shortcut 0.5"],
            "--method-flags: plain has --shortcut, which the setting shortcut decides; give that",
        ),
        (
            ["--shortcut", "0.5", "--shortcut-words", "w1"],
            "--shortcut-words has 1, but must have one for each of the 2",
        ),
        (["--max-length", "900"], "inputs of 900 tokens were asked for, but the length must be at least 4 and at most"),
        (["--model", "/nowhere/at/all"], "--hf-model: there is no folder /nowhere/at/all"),
        (["--shortcut", "0.5", "--shortcut-words", "w1,fishy"], "'fishy', which the model's tokenizer does not know"),
        (["--", "--attn-sites", "encoder.self[9]"], "ad_drop: --attn-sites 'encoder.self[9]'"),
        (lambda folder: os.truncate(folder / "encoder" / "model.safetensors", 900), "model.safetensors cannot be read"),
        (lambda folder: (folder / "encoder" / "config.json").write_text("{"), "neither a folder of a model nor a name"),
        (lambda folder: (folder / "encoder" / "tokenizer.json").unlink(), "tokenizer of"),
        (lambda folder: (folder / "data" / "dev.tsv").write_bytes(b"index\tx\0\n"), "dev.tsv, line 1: not text (a NUL"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(
    rte: list[str], change: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = change if isinstance(change, list) else []
    if callable(change):
        change(tmp_path)
    assert main(["finetune", *rte, "--max-length", "40", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.startswith("attn-reg finetune: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_can_work_is_let_through(rte: list[str]) -> None:
    checks.check_runs(planned(*rte, "--max-length", "40", methods=",".join(known_methods(FineTuning.without))))


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
    (tmp_path / "mnli" / "dev_mismatched.tsv.gz").touch()
    with pytest.raises(ValueError, match=r"has both dev_mismatched\.tsv and "):
        planned(*words)
    (tmp_path / "mnli" / "dev_mismatched.tsv.gz").unlink()
    (tmp_path / "mnli" / "dev_mismatched.tsv").write_text(text.replace("neutral", "-"))
    with pytest.raises(ValueError, match=r"dev_mismatched\.tsv, line \d+: the label is '-'"):
        planned(*words)


def test_updates_are_counted_with_the_flags_that_change_them(rte: list[str]) -> None:
    """Count the updates of 48 examples in batches of 16, 10 epochs."""

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
    for wrong in (["--update-freq", "x"], ["--update-freq", "0"], ["--batch-size", "0"], ["--max-epoch", "0"]):
        with pytest.raises(ValueError, match=f"^plain: (argument )?{wrong[0]}"):
            updates("--", *wrong)


def test_batches_are_counted_once_for_all_seeds(rte: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "attn_reg_plugin.experiments.running.checks._counted", lambda one, _: asked.append(one.method) or 7
    )
    runs = planned(*rte, "--seeds", "1,2", "--", "--max-tokens", "40", methods="plain,ad_drop")
    assert asked == ["plain", "ad_drop"] and {one.flags["total-num-update"] for one in runs} == {7}


@pytest.mark.parametrize("trained", ["mnli", "stsb", "wnut17", "swag"], indirect=True)
def test_predictions_are_kept_example_by_example(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = trained.labelled
    data = make_toy(tmp_path / "data", task.name)
    monkeypatch.setattr(trained_module, "load_trained", lambda run, cpu: trained)
    subsets = ["valid", "valid1"] if task.name == "mnli" else ["valid"]
    write_predictions(tmp_path, str(data), subsets, cpu=True)
    for subset in subsets:
        examples = read_split(task, data, subset)
        rows = trained.encode(examples)
        logits = trained.logits(rows)
        if task.kind == TAGGING:
            logits = [one[row.label != IGNORED] for one, row in zip(logits, rows, strict=True)]
        found = read_predictions(file_of(tmp_path, subset), task.kind, task.labels or ())
        for ours, expected in zip(found, decisions(task, logits, examples), strict=True):
            assert ours.tolist() == expected.tolist()
    file_of(tmp_path, "valid").write_text("prediction\tgold\nx\ty\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"valid\.tsv, line 2: 'x\\ty' isn't a prediction and its gold label"):
        read_predictions(file_of(tmp_path, "valid"), task.kind, task.labels or ())


def decisions(task: LabelledTask, logits: list[torch.Tensor], examples: list) -> tuple[Any, Any]:
    """Predictions and gold as the metrics take them; of tagged words each sentence with its end."""
    if task.kind == TAGGING:
        codes = torch.tensor(tag_codes(task.labels))
        rows = [
            torch.stack([codes[one.argmax(-1)], codes[list(e.labels)]]) for one, e in zip(logits, examples, strict=True)
        ]
        return tuple(torch.cat([torch.cat([pair, torch.full((2, 1), SENTENCE_END)], 1) for pair in rows], 1))
    predicted = torch.stack([one[0] if task.kind == REGRESSION else one.argmax() for one in logits])
    return predicted, torch.tensor([example.label for example in examples])


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
    said = capsys.readouterr().out
    assert said.count("(was done)") == 2 and ": training" not in said
    assert (tmp_path / "out" / "results.md").read_text(encoding="utf-8") == first
    with pytest.raises(ValueError, match="holds a run with other settings"):
        parsed(*words, "--", "--no-grouping").carry_out()


def texts_of(run: Run, split: str) -> list[tuple[list[str], int]]:
    """Read as fairseq-train does the first text's words and the label of every example."""
    task = task_of(run)
    task.load_dataset(split)
    rows = task.dataset(split).rows
    return [(task.tokenizer.decode(row.input_ids).split(" [SEP]")[0].split()[1:], row.label) for row in rows]


def test_what_is_held_out_is_validated_on_and_the_official_set_is_not(rte: list[str]) -> None:
    """The same examples for every method; planted words and wrong labels are in both parts."""
    words = [*rte, "--max-length", "40", "--held-out", "0.25"]
    (clean,), (plain, other) = (
        planned(*words),
        parsed(*words, "--label-noise", "0.5", "--shortcut", "1").plan(select_methods("plain,ad_drop")),
    )
    held_out, trained = texts_of(clean, "valid"), texts_of(clean, "train")
    every = texts_of(planned(*rte, "--max-length", "40")[0], "train")
    assert (len(held_out), len(trained)) == (12, 36) and sorted([*held_out, *trained]) == sorted(every)
    assert texts_of(plain, "valid") == texts_of(other, "valid") and texts_of(plain, "train") == texts_of(other, "train")
    wrong, planted = 0, set()
    for split, before in (("valid", held_out), ("train", trained)):
        after = texts_of(plain, split)
        assert [text[1:] for text, _ in after] == [text for text, _ in before]
        planted |= {(text[0], label) for text, label in after}
        wrong += sum(label != old for (_, label), (_, old) in zip(after, before, strict=True))
    assert wrong == 24 and len(planted) == 2 and len({word for word, _ in planted}) == 2


class Stand:
    """In place of the commands of a run: the log of a training, and predictions that are better with AD-DROP."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], path: Path, *_: Any, **__: Any) -> None:
        self.commands.append(command)
        folder = path.parent
        if "fairseq_cli.train" in command:
            records = [{"epoch": n, "valid_accuracy": str(50 + n % 2), "valid_num_updates": n} for n in (1, 2, 3, 4)]
            path.write_text("".join(f"x | {json.dumps(record)}\n" for record in records), encoding="utf-8")
            (folder / "checkpoints").mkdir()
            (folder / "checkpoints" / "checkpoint_best.pt").touch()
            return
        right = 14 if "plain" in folder.name else 17
        golds = ["entailment"] * right + ["not_entailment"] * (21 - right)
        file_of(folder, "valid").parent.mkdir()
        lines = ["prediction\tgold", *(f"entailment\t{gold}" for gold in golds)]
        file_of(folder, "valid").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_run_with_held_out_examples_reports_the_official_set(
    rte: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen by the held-out examples, and measured on the validation set once, with what was chosen."""
    runs = parsed(*rte, "--held-out", "0.25", "--shortcut", "0.5", "--seeds", "1,2").plan(
        select_methods("plain,ad_drop")
    )
    stand = Stand()
    monkeypatch.setattr(runs_module, "execute", stand)
    trial = replace(runs[0], folder=tmp_path / "trial", measured=False)
    trial.claim()
    trial.carry_out(lambda log: None)
    assert len(stand.commands) == 1 and trial.finished(), "a trial of a sweep doesn't look at the validation set"
    assert trial.result()["training"]["figures"]["accuracy"] == 51.0 and not trial.scores
    stand.commands.clear()
    for run in runs:
        run.claim()
        run.carry_out(lambda log: None)
    assert len(stand.commands) == 8 and all(run.finished() for run in runs)
    assert runs[0].result()["training"]["best_epoch"] == 3 and runs[0].result()["constant"] == ["valid"], "one class"
    assert runs[0].scores == {"valid": {"accuracy": pytest.approx(100 * 14 / 21)}, "held_out": {"accuracy": 51.0}}
    assert runs[1].scores["valid"] == {"accuracy": pytest.approx(100 * 17 / 21)}
    parsed(*rte, "--held-out", "0.25", "--shortcut", "0.5", "--seeds", "1,2", "--methods", "plain,ad_drop").carry_out()
    table = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert re.search(r"\| method +\| accuracy +\| accuracy − plain +\| accuracy held out +\|", table)
    assert "each run at its epoch with the best accuracy on the held-out examples" in table
    given = (
        r"training examples: --held-out 0\.25 --shortcut 0\.5 --shortcut-words w\d+,w\d+ --shortcut-at-evaluation none"
    )
    assert re.search(given, table)
    content = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert content["methods"][1]["differences"]["valid"]["accuracy"]["drawn"] == "seeds and examples"
    assert len(stand.commands) == 8, "what is done is not done again"
    checkpoints = runs[0].folder / "checkpoints"
    kept = ["checkpoint_1_5.pt", "attn_reg_state_5.pt", "average_last_1.pt"]
    for name in [*kept, "checkpoint_last.pt", "attn_reg_state_7.pt"]:
        (checkpoints / name).touch()
    runs[0].tidy()
    assert {path.name for path in checkpoints.iterdir()} == {*kept, "checkpoint_best.pt"}, "what was asked for stays"
