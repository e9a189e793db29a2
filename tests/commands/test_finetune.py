"""`attn-reg finetune`: its plan, what it refuses, the predictions that it keeps, its table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

import numpy as np
import torch
from fairseq import tasks

from attn_reg_plugin import configuration
from attn_reg_plugin.cli import build_parser, main
from attn_reg_plugin.experiments import trained as trained_module
from attn_reg_plugin.experiments.checks import check_runs
from attn_reg_plugin.experiments.differences import differences
from attn_reg_plugin.experiments.fine_tuning import FineTuning, cells, summarize
from attn_reg_plugin.experiments.labelled_runs import LabelledData, LabelledRun, best_figures
from attn_reg_plugin.experiments.methods import Method, known_methods, select_methods
from attn_reg_plugin.experiments.predicted import file_of, read_predictions, write_predictions
from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.files import write_json
from attn_reg_plugin.labelled import REGRESSION, TAGGING, LabelledTask, find_task, read_split
from attn_reg_plugin.labelled.encoding import IGNORED
from attn_reg_plugin.labelled.metrics import SCORES, SENTENCE_END, tag_codes
from attn_reg_plugin.tasks.dry_run import parse_command
from attn_reg_plugin.tasks.fairseq_settings import FAIRSEQ_SETTINGS
from tests.models.hf_folders import SIZES, TOYS, make_mnli

pytestmark = pytest.mark.usefixtures("one_thread")


def parsed(*words: str) -> FineTuning:
    arguments = build_parser("finetune").parse_args(["finetune", *words])
    return configuration.from_arguments(FineTuning, arguments)


def planned(*words: str, methods: str = "plain") -> list[LabelledRun]:
    return parsed(*words).plan(select_methods(methods))


def test_the_plan(rte: list[str]) -> None:
    words = [*rte, "--seeds", "1,2", "--batch-size", "10", "--epochs", "2", "--", "--no-grouping"]
    runs = parsed(*words).plan(select_methods("plain,ad_drop", ["ad_drop=--ad-drop-p 0.1"]))
    assert [one.folder.name for one in runs] == ["plain-seed1", "ad_drop-seed1", "plain-seed2", "ad_drop-seed2"]
    command = runs[1].train_command()
    said = " ".join(command)
    assert "--task attn_reg_text_classification --labelled rte --arch hf_encoder" in said
    assert "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric" in said
    assert "--total-num-update 10 " in said and " --no-grouping --attn-reg ad_drop " in said
    assert said.endswith("--ad-drop-p 0.1")
    assert runs[0].settings() != runs[2].settings() and str(rte[1]) not in json.dumps(runs[0].settings())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--lr-scheduler polynomial_decay --warmup-updates 2 --total-num-update 30 "),
        (["--lr-scheduler", "fixed", "--warmup", "0"], "--lr-scheduler fixed --warmup-updates 0 --batch-size"),
        (["--lr-scheduler", "cosine"], "--lr-scheduler cosine --warmup-updates 2 --lr-period-updates 28 "),
        (["--lr-scheduler", "inverse_sqrt", "--warmup", "0"], "--lr-scheduler inverse_sqrt --warmup-updates 1 "),
        (
            ["--metric", "mcc"],
            "--best-checkpoint-metric mcc --maximize-best-checkpoint-metric --validation-metrics mcc,",
        ),
        (["--metric", "loss"], "--best-checkpoint-metric loss --save-dir"),
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
def test_settings_become_flags_that_fairseq_takes(rte: list[str], words: list[str], said: str) -> None:
    (run,) = planned(*rte, "--max-length", "40", "--seeds", "2", *words)
    assert re.search(said, " ".join(run.train_command()))
    check_runs([run])


def test_every_seed_trains_on_examples_of_its_own(rte: list[str]) -> None:
    """As fairseq-train reads them: so many of every class, the same for every method."""
    runs = parsed(*rte, "--max-length", "40", "--seeds", "1,2", "--train-per-class", "9").plan(
        select_methods("plain,ad_drop")
    )
    found = []
    for run in runs:
        args = parse_command(run.train_command(), "training")
        vars(args).update({f"attn_{name}": None for name, _ in FAIRSEQ_SETTINGS})  # which fairseq fills in later
        task = tasks.setup_task(args)
        task.load_dataset("train")
        rows = task.dataset("train").rows
        assert sorted(row.label for row in rows) == [0] * 9 + [1] * 9
        found.append([row.input_ids.tolist() for row in rows])
    assert found[0] == found[1] != found[2] == found[3]


def test_what_a_metric_chooses_is_a_setting_of_the_run(rte: list[str]) -> None:
    (plain,), (same,), (other,) = (planned(*rte, *more) for more in ([], ["--metric", "accuracy"], ["--metric", "mcc"]))
    assert plain.settings() == same.settings() and other.settings() == plain.settings() | {"metric": "mcc"}
    assert (plain.metrics, other.metrics) == (("accuracy",), ("mcc", "accuracy"))


@pytest.mark.parametrize(("devices", "said"), [(1, False), (2, True)])
def test_updates_are_counted_for_one_process(
    rte: list[str], devices: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    for words, expected in ((rte, False), ([word for word in rte if word != "--cpu"], said)):
        (run,) = planned(*words)
        assert ("--distributed-world-size 1" in " ".join(run.train_command())) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--patience", "0"], "--patience is 0, but must be at least 1"),
        (["--patience", "few"], "--patience is 'few', but must be a whole number"),
        (["--warmup", "1"], r"--warmup is 1.0, but must lie in \[0, 1\)"),
        *((["--lr", value], f"--lr is {value}, but must be above 0") for value in ("nan", "inf")),
        *((["--weight-decay", value], f"--weight-decay is {value}, but must be") for value in ("nan", "inf")),
        *((["--warmup", value], f"--warmup is {value}, but must lie") for value in ("nan", "inf")),
        (["--methods", "magic"], "unknown method 'magic'; the methods are: plain, own_attention_dropout"),
        (["--seeds", "x"], "--seeds is .x., but must be a whole number, or several with commas"),
        (["--metric", "bleu"], "--metric: unknown metric 'bleu' of rte; the metrics are: accuracy, f1"),
        (["--held-out", "1"], r"--held-out is 1.0, but must lie in \[0, 1\)"),
        (["--label-noise", "0.001"], "--label-noise 0.001 is 0 of 48 training examples, but it takes at least 1"),
        (["--", "--seed", "7"], "--train-flags has --seed, which the setting seeds decides; give that"),
        (["--", "--held-out=0.1"], "--train-flags has --held-out, which the setting held_out decides; give that"),
        (["--", "--best-checkpoint-metric", "loss"], "has --best-checkpoint-metric, which the setting metric decides"),
        *((["--", flag, "wnli"], f"has {flag}, which the setting task decides") for flag in ("--labelled", "--task")),
        *((["--", flag, "x"], f"has {flag}, which the setting model decides") for flag in ("--hf-model", "--arch")),
        (["--", "--lr-scheduler", "cosine"], "has --lr-scheduler, which the setting lr_scheduler decides; give that"),
        (
            ["--method-flags", "plain=--shortcut 0.5"],
            "--method-flags: plain has --shortcut, which the setting shortcut decides; give that",
        ),
        (["--label-noise", "-0.1"], r"--label-noise is -0.1, but must lie in \[0, 1\)"),
        (
            ["--shortcut", "0.5", "--shortcut-words", "w1"],
            "--shortcut-words has 1, but must have one for each of the 2",
        ),
        (["--lr-scheduler", "steps"], "--lr-scheduler is 'steps', but must be one of linear, fixed, cosine, inverse"),
        (["--train-fraction", "0"], r"--train-fraction is 0.0, but must lie in \(0, 1\]"),
        (
            ["--train-fraction", "0.5", "--train-per-class", "2"],
            "--train-fraction and --train-per-class cannot be given together",
        ),
    ],
)
def test_finetune_refuses(rte: list[str], words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parsed(*rte, *words).carry_out()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--max-length", "900"],
            "inputs of 900 tokens were asked for, but the length must be at least 4 and at most 40",
        ),
        (["--max-length", "0"], "--max-length is 0, but must be at least 1"),
        (["--model", "/nowhere/at/all"], "--hf-model: there is no folder /nowhere/at/all"),
        (["--shortcut", "0.5", "--shortcut-words", "w1,fishy"], "'fishy', which the model's tokenizer does not know"),
        (["--model", "{data}"], "neither a folder of a model nor a name"),
        (["--", "--nonsense"], "plain: unrecognized arguments: --nonsense"),
        (["--", "--attn-sites", "encoder.self[9]"], "AD-DROP: --attn-sites 'encoder.self[9]'"),
        (["--method-flags", "ad_drop=--ad-drop-q x"], "AD-DROP: argument --ad-drop-q: invalid"),
        (["--", "--dropout", "3"], "plain: --dropout is 3.0, but must be in [0, 1)"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(
    rte: list[str], words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(data=tmp_path / "data") for word in words]
    assert main(["finetune", *rte, "--max-length", "40", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("attn-reg finetune: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "encoder" / "model.safetensors").unlink(), "encoder has no weights"),
        (lambda folder: (folder / "encoder" / "config.json").write_text("{"), "neither a folder of a model nor a name"),
        (lambda folder: (folder / "encoder" / "tokenizer.json").unlink(), "tokenizer of"),
        (lambda folder: (folder / "data" / "dev.tsv").write_bytes(b"index\tx\0\n"), "dev.tsv, line 1: not text (a NUL"),
    ],
)
def test_a_folder_that_cannot_work_is_said_too(
    rte: list[str], break_it: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it(tmp_path)
    assert main(["finetune", *rte, "--max-length", "40"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_can_work_is_let_through(rte: list[str]) -> None:
    check_runs(planned(*rte, "--max-length", "40", methods=",".join(known_methods(FineTuning.without))))


def test_the_best_validation_is_that_of_the_chief_metric() -> None:
    log = TrainingLog()
    for epoch, (both, only) in enumerate([(70.0, 60.0), (75.0, 58.0), (75.0, 59.0), (74.0, 66.0)], start=1):
        record = {
            "epoch": epoch,
            "valid_accuracy_f1": str(both),
            "valid_accuracy": str(only),
            "valid_loss": str(abs(only - 58) + 0.5),
            "valid_num_updates": epoch,
        }
        log.add(f"x | valid | {json.dumps(record)}")
    assert best_figures(log, ("loss", "accuracy")) == (2, {"loss": 0.5, "accuracy": 58.0})
    assert best_figures(log, ("accuracy_f1", "accuracy")) == (3, {"accuracy_f1": 75.0, "accuracy": 59.0})
    with pytest.raises(ValueError, match='no validation with "mcc"'):
        best_figures(log, ("mcc",))


REST = {"epochs": 4, "best_epoch": 1, "seconds_per_epoch": None}


def _run(method: Method, score: float, seconds: float | None, other: float | None = None) -> Any:
    training = {"scores": {"accuracy": score}, "epochs": 4, "seconds_per_epoch": seconds}
    result, figures = {"training": training}, {"valid": training["scores"]}
    figures |= {} if other is None else {"valid1": {"accuracy": other}}
    how = {"metrics": ("accuracy",), "figures": lambda: figures, "examples": dict}
    return SimpleNamespace(method=method, seed=1, result=lambda: result, **how)


def test_the_table() -> None:
    plain, other = Method("plain", "plain", ()), Method("ad_drop", "AD-DROP", ())
    runs = [_run(plain, 60.0, 10.0), _run(other, 61.0, 15.0), _run(plain, 64.0, 14.0), _run(other, 67.0, 18.0)]
    header, body = cells(summarize([plain, other], runs))
    assert header == ["method", "accuracy", "epochs", "s/epoch", "time × plain", "seeds"]
    assert body[0] == ["plain", "62.00 ± 2.83", "4.0", "12.0 ± 2.8", "1.00", "2"]
    assert body[1][1:2] + body[1][4:] == ["64.00 ± 4.24", "1.38", "2"]


@pytest.mark.parametrize("trained", ["mnli", "stsb", "wnut17", "swag"], indirect=True)
def test_predictions_are_kept_example_by_example(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read back are the logits' decisions, and gives their metrics."""
    task = trained.labelled
    data = make_mnli(tmp_path / "data") if task.name == "mnli" else TOYS[task.name][0](tmp_path / "data")
    monkeypatch.setattr(trained_module, "load_trained", lambda run, cpu: trained)
    source = LabelledData(str(data), task)
    assert source.validations() == (("valid", "valid1") if task.name == "mnli" else ("valid",))
    write_predictions(tmp_path, str(data), source.validations(), cpu=True)
    run = LabelledRun(Method("plain", "plain", ()), 1, tmp_path, source, (), ())  # type: ignore[arg-type]
    write_json(tmp_path / "result.json", {"training": {"scores": dict.fromkeys(task.metrics, 1.0), **REST}})
    for subset, by_name in run.examples().items():
        rows = trained.encode(read_split(task, data, subset))
        both = decided(task, rows, trained.logits(rows))
        assert [part.tolist() for part in read_predictions(file_of(tmp_path, subset), task)] == both
        for name in task.metrics:
            score = SCORES[task.kind][name](*map(np.array, both))
            assert by_name[name].scores(np.ones((1, len(rows)), dtype=int)) == pytest.approx([score], abs=1e-6)
            assert run.figures()[subset][name] == (1.0 if subset == "valid" else score)
    assert run.finished()
    file_of(tmp_path, "valid").write_text("prediction\tgold\nx\ty\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"valid\.tsv, line 2: 'x\\ty' isn't a prediction and its gold label"):
        run.examples()


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


def test_mnli_has_both_validation_sets_in_its_table() -> None:
    plain, other = Method("plain", "plain", ()), Method("ad_drop", "AD-DROP", ())
    runs = [_run(plain, 60.0, 10.0, 55.0), _run(other, 61.0, 15.0, 57.0)]
    header, body = cells(summarize([plain, other], runs, differences(runs)), find_task("mnli").more_valid)
    assert header[1:5] == ["accuracy", "accuracy − plain", "accuracy mismatched", "accuracy mismatched − plain"]
    assert body[1][1:5] == ["61.00", "+1.00", "57.00", "+2.00"]


@pytest.mark.slow
def test_a_comparison_from_beginning_to_end(rte: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*rte, "--methods", "plain,ad_drop", "--epochs", "2", "--lr", "0.003", "--max-length", "40"]
    assert parsed(*words).carry_out() == 0
    first = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert "| plain |" in first and "| AD-DROP |" in first
    assert {path.name for path in (tmp_path / "out" / "plain-seed1" / "checkpoints").glob("*.pt")} == {
        "checkpoint_best.pt"
    }
    content = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert content["methods"][1]["differences"]["valid"]["accuracy"]["drawn"] == "examples"
    for run in parsed(*words).plan(select_methods("plain,ad_drop")):
        ones = np.ones((1, SIZES["dev"]), dtype=int)
        (score,) = run.examples()["valid"]["accuracy"].scores(ones)
        assert score == pytest.approx(run.figures()["valid"]["accuracy"], abs=0.01), "as the training measured it"
    capsys.readouterr()
    assert parsed(*words).carry_out() == 0
    assert capsys.readouterr().out.count("(was done)") == 2
    assert (tmp_path / "out" / "results.md").read_text(encoding="utf-8") == first
    with pytest.raises(ValueError, match="holds a run with other settings"):
        parsed(*words, "--", "--no-grouping").carry_out()
