"""`attn-reg evaluate`, and what `predict`, `export` and `finetune` refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

import torch

from attn_reg_plugin import configuration
from attn_reg_plugin.checkpoints import find_checkpoint
from attn_reg_plugin.cli import build_parser, main
from attn_reg_plugin.commands import predict
from attn_reg_plugin.experiments.checks import check_runs
from attn_reg_plugin.experiments.fine_tuning import FineTuning, cells, summarize
from attn_reg_plugin.experiments.labelled_runs import LabelledRun, best_figures
from attn_reg_plugin.experiments.methods import Method, known_methods, select_methods
from attn_reg_plugin.experiments.robustness import evaluate, folding
from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.labelled import TextExample, find_task, read_file
from attn_reg_plugin.models.hf_encoder import HFEncoderConfig, HFEncoderModel
from tests.models.hf_folders import make_encoder, make_rte, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
HANS = "gold_label\tsentence1\tsentence2\theuristic\tsubcase"


@pytest.fixture
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Trained:
    """An encoder for a row of the table, as it would come out of a run."""
    task = find_task(getattr(request, "param", "mnli"))
    cfg = SimpleNamespace(hf_model=str(make_encoder(tmp_path / "encoder")))
    torch.manual_seed(3)
    model = HFEncoderModel.build_model(HFEncoderConfig(), SimpleNamespace(labelled=task, cfg=cfg)).eval()
    return Trained(model, tokenizer(), task, 40, tmp_path / "checkpoint_best.pt")


def say(trained: Trained, classes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model decide for these classes, example by example."""
    logits = [torch.eye(3)[index] for index in classes]
    monkeypatch.setattr(Trained, "logits", lambda self, rows, batch_size=32: logits[: len(rows)])


def test_three_labels_are_folded_to_two(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("entailment", "subsequence"),
        ("non-entailment", "subsequence"),
        ("non-entailment", "constituent"),
        ("entailment", "constituent"),
        ("non-entailment", "constituent"),
    ]
    lines = [f"{label}\tw1 w2\tw3\t{heuristic}\tx" for label, heuristic in rows]
    path = tmp_path / "heuristics_evaluation_set.txt"
    path.write_text("\n".join([HANS, *lines]) + "\n", encoding="utf-8")
    say(trained, [0, 1, 2, 1, 0], monkeypatch)  # entailment, neutral, contradiction, neutral, entailment
    figures = evaluate(trained, "hans", str(tmp_path))
    assert figures == {
        "examples": 5,
        "accuracy": 60.0,
        "constituent": pytest.approx(100 / 3),
        "constituent, entailment": 0.0,
        "constituent, non-entailment": 50.0,
        "subsequence": 100.0,
        "subsequence, entailment": 100.0,
        "subsequence, non-entailment": 100.0,
    }
    assert evaluate(trained, "hans", str(path)) == figures


@pytest.mark.parametrize("trained", ["qqp"], indirect=True)
def test_paws_x(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [0, 1, 1, 0]
    lines = [f"{number}\tw1 w2\tw2 w1\t{label}" for number, label in enumerate(labels)]
    (tmp_path / "test_2k.tsv").write_text("\n".join(["id\tsentence1\tsentence2\tlabel", *lines]) + "\n")
    say(trained, [0, 1, 0, 1], monkeypatch)
    assert evaluate(trained, "paws-x", str(tmp_path)) == {"examples": 4, "accuracy": 50.0, "f1": 50.0}
    lines = ["id\tsentence1\tsentence2", *(line.rpartition("\t")[0] for line in lines)]
    (tmp_path / "test_2k.tsv").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="has no labels in the split 'test', so nothing can be measured"):
        evaluate(trained, "paws-x", str(tmp_path))


def predicted(trained: Trained, path: Path, words: Sequence[str] = ()) -> list[str]:
    """The lines that `attn-reg predict` writes."""
    out = path.with_name("predicted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "load_trained", lambda run, cpu: trained)
        assert main(["predict", "run", str(path), "--out", str(out), *words]) == 0
    return out.read_text(encoding="utf-8").splitlines()


def test_logits_come_in_the_order_of_the_examples(trained: Trained) -> None:
    texts = ["w1 w2 w3 w4", "w5", "w6 w7x w8", "w9 w10"]
    inputs = [tokenizer()(text, "w1", return_tensors="pt") for text in texts]
    rows = trained.encode([TextExample(1, text, "w1") for text in texts])
    with torch.no_grad():
        alone = [trained.model(**one)["logits"][0] for one in inputs]
    for found, expected in zip(trained.logits(rows, batch_size=3), alone, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_labels_in_a_file_to_predict_are_not_looked_at(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "hans.txt"
    path.write_text(f"{HANS}\nnon-entailment\tw1 w2\tw3\tx\tx\n\tw4\tw5\tx\tx\n", encoding="utf-8")
    found = predicted(trained, path, ["--batch-size", "1"])
    assert found[0] == "index\tprediction" and [line.split("\t")[0] for line in found[1:]] == ["0", "1"]
    assert {line.split("\t")[1] for line in found[1:]} <= set(trained.labelled.labels)


@pytest.mark.parametrize("trained", ["wnut17"], indirect=True)
def test_words_alone_are_tagged_as_with_labels(trained: Trained, tmp_path: Path) -> None:
    words = ["w1", "w7x", "w3", "", "w20x", "w2", ""]
    (tmp_path / "words").write_text("\n".join(words) + "\n", encoding="utf-8")
    (tmp_path / "labelled").write_text("\n".join(word and f"{word}\tO" for word in words) + "\n", encoding="utf-8")
    found = predicted(trained, tmp_path / "words")
    assert [line.split("\t")[0] for line in found] == words
    logits = trained.logits(trained.encode(list(read_file(trained.labelled, tmp_path / "labelled"))))
    first = [logits[0][place] for place in (1, 2, 4)] + [logits[1][place] for place in (1, 3)]
    names = [trained.labelled.labels[int(one.argmax())] for one in first]
    assert [line.split("\t")[1] for line in found if line] == names and len(set(names)) > 1


@pytest.mark.parametrize(
    ("row", "test", "said"),
    [
        ("cola", "paws-x", "paws-x tests classifiers of 2 texts, but the model was trained on 1"),
        ("qqp", "hans", "the model's label '0' means nothing in hans, whose test takes: entailment, neutral"),
        ("rte", "paws-x", "the model's label 'entailment' means nothing in paws-x"),
        ("stsb", "hans", "hans tests classifiers, but the model is one of regression"),
    ],
)
def test_models_that_do_not_fit_a_test(row: str, test: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        folding(find_task(row), find_task(test))


def test_two_labels_of_rte_are_the_tests() -> None:
    assert folding(find_task("rte"), find_task("hans")).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["predict", "{}", "{}/none.tsv"], "there is no file {}/none.tsv"),
        (["predict", "{}", "{}/file.tsv"], "{} has no checkpoint; looked for checkpoint_best.pt"),
        (["export", "{}", "{}"], "{} exists already: give a folder that does not, or an empty one"),
        (["predict", "{}/other.pt", "{}/file.tsv"], "{}/other.pt isn't a checkpoint of --arch hf_encoder"),
        (["predict", "{}/damaged.pt", "{}/file.tsv"], "{}/damaged.pt cannot be read: it is damaged"),
        (["evaluate", "{}/weights.pt", "--on", "hans", "--data", "x"], "{}/weights.pt is not a fairseq checkpoint"),
        (["evaluate", "{}", "--on", "hans", "--data", "x"], "{} has no checkpoint"),
    ],
)
def test_refusals(command: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.tsv").write_text("index\n", encoding="utf-8")
    torch.save({"cfg": {"model": {"arch": "transformer"}}, "model": {}}, tmp_path / "other.pt")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pt")
    (tmp_path / "damaged.pt").write_bytes(b"x")
    assert main([word.replace("{}", str(tmp_path)) for word in command]) == 2
    assert said.replace("{}", str(tmp_path)) in capsys.readouterr().err


@pytest.mark.parametrize("command", [["predict", "run", "file"], ["evaluate", "run", "--on", "hans", "--data", "x"]])
@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_a_batch_has_at_least_one_example(command: list[str], size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command, f"--batch-size={size}"])
    assert f"it is '{size}', but must be a whole number of at least 1" in capsys.readouterr().err


def test_the_best_checkpoint_is_found_before_the_last(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    names = ["checkpoints/checkpoint_last.pt", "checkpoint_last.pt", "checkpoints/checkpoint_best.pt"]
    for name in [*names, "checkpoint_best.pt"]:
        (tmp_path / name).touch()
        assert find_checkpoint(tmp_path) == tmp_path / name
    assert find_checkpoint(tmp_path / names[0]) == tmp_path / names[0]


# -- finetune ---------------------------------------------------------------------------------------------------------


def parsed(*words: str) -> FineTuning:
    arguments = build_parser("finetune").parse_args(["finetune", *words])
    return configuration.from_arguments(FineTuning, arguments)


def planned(*words: str, methods: str = "plain") -> list[LabelledRun]:
    return parsed(*words).plan(select_methods(methods))


@pytest.fixture
def rte(tmp_path: Path) -> list[str]:
    """The first arguments of a comparison on made-up data."""
    encoder = make_encoder(tmp_path / "encoder")
    data = make_rte(tmp_path / "data")
    return ["rte", str(data), "--out", str(tmp_path / "out"), "--model", str(encoder), "--cpu"]


def test_the_plan(rte: list[str]) -> None:
    words = [*rte, "--seeds", "1,2", "--batch-size", "10", "--epochs", "2", "--", "--no-grouping"]
    runs = parsed(*words).plan(select_methods("plain,ad_drop", ["ad_drop=--ad-drop-p 0.1"]))
    assert [one.folder.name for one in runs] == ["plain-seed1", "ad_drop-seed1", "plain-seed2", "ad_drop-seed2"]
    command = runs[1].train_command()
    said = " ".join(command)
    assert "--task attn_reg_text_classification --labelled rte --arch hf_encoder" in said
    assert "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric" in said
    assert "--total-num-update 10 " in said and said.endswith("--ad-drop-p 0.1 --no-grouping")
    assert runs[0].settings() != runs[2].settings() and str(rte[1]) not in json.dumps(runs[0].settings())


def test_a_run_is_of_its_data_and_its_model(rte: list[str], tmp_path: Path) -> None:
    before = planned(*rte)[0].settings()
    assert planned(*rte)[0].settings() == before
    with (tmp_path / "data" / "dev.tsv").open("a", encoding="utf-8") as file:
        file.write("21\tw1\tw2\tentailment\n")
    changed = planned(*rte)[0].settings()
    make_encoder(tmp_path / "encoder", seed=2)
    again = planned(*rte)[0].settings()
    assert before["data"] != changed["data"] == again["data"] and before["model"] == changed["model"] != again["model"]


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
        (["--methods", "magic"], "unknown method 'magic'; the methods are: plain, attention_dropout"),
        (["--seeds", "x"], "--seeds is .x., but must be a whole number, or several with commas"),
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
            "valid_num_updates": epoch,
        }
        log.add(f"x | valid | {json.dumps(record)}")
    assert best_figures(log, ("accuracy_f1", "accuracy")) == (3, {"accuracy_f1": 75.0, "accuracy": 59.0})
    with pytest.raises(ValueError, match='no validation with "mcc"'):
        best_figures(log, ("mcc",))


def _run(method: Method, score: float, seconds: float | None) -> Any:
    training = {"scores": {"accuracy": score}, "epochs": 4, "seconds_per_epoch": seconds}
    result, figures = {"training": training}, {"valid": training["scores"]}
    return SimpleNamespace(method=method, metrics=("accuracy",), result=lambda: result, figures=lambda: figures)


def test_the_table() -> None:
    plain, other = Method("plain", "plain", ()), Method("ad_drop", "AD-DROP", ())
    runs = [_run(plain, 60.0, 10.0), _run(other, 61.0, 15.0), _run(plain, 64.0, 14.0), _run(other, 67.0, 18.0)]
    header, body = cells(summarize([plain, other], runs))
    assert header == ["method", "accuracy", "epochs", "s/epoch", "time × plain", "seeds"]
    assert body[0] == ["plain", "62.00 ± 2.83", "4.0", "12.0 ± 2.8", "1.00", "2"]
    assert body[1][1:2] + body[1][4:] == ["64.00 ± 4.24", "1.38", "2"]


@pytest.mark.slow
def test_a_comparison_from_beginning_to_end(rte: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*rte, "--methods", "plain,ad_drop", "--epochs", "2", "--lr", "0.003", "--max-length", "40"]
    assert parsed(*words).carry_out() == 0
    first = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert "| plain |" in first and "| AD-DROP |" in first
    assert {path.name for path in (tmp_path / "out" / "plain-seed1" / "checkpoints").glob("*.pt")} == {
        "checkpoint_best.pt"
    }
    capsys.readouterr()
    assert parsed(*words).carry_out() == 0
    assert capsys.readouterr().out.count("(was done)") == 2
    assert (tmp_path / "out" / "results.md").read_text(encoding="utf-8") == first
    with pytest.raises(ValueError, match="holds a run with other settings"):
        parsed(*words, "--", "--no-grouping").carry_out()
