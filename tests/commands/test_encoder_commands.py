"""`attn-reg evaluate`, and what `predict` and `export` refuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

import torch

from attn_reg_plugin.checkpoints import find_checkpoint
from attn_reg_plugin.cli import main
from attn_reg_plugin.commands import predict
from attn_reg_plugin.experiments import robustness_table
from attn_reg_plugin.experiments.report_runs import compared, read_experiments
from attn_reg_plugin.experiments.robustness import evaluate, folding
from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.files import read_json, write_json
from attn_reg_plugin.labelled import TextExample, find_task, read_file
from tests.models.hf_folders import tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
HANS = "gold_label\tsentence1\tsentence2\theuristic\tsubcase"


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


def fine_tuned(folder: Path, task: str = "mnli", **more: object) -> Path:
    """A finished run of `attn-reg finetune`, as far as its files go."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "checkpoint_best.pt").write_text(folder.name)
    settings = {"task": task, "data": "d", "model": "m", "seed": int(folder.name[-1]), "flags": "--lr 1", **more}
    write_json(folder / "run.json", settings)
    write_json(folder / "result.json", {"training": {"scores": {"accuracy": 1.0}}})
    return folder


@pytest.fixture
def evaluated(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Four finished runs and one that is not, and the names of the runs whose models are loaded."""
    out, loaded = tmp_path / "mnli", []
    out.mkdir()
    write_json(out / "results.json", {"methods": [{"method": m, "title": m.upper()} for m in ("plain", "own")]})
    for name in ("own-seed1", "own-seed2", "plain-seed1", "plain-seed2"):
        fine_tuned(out / name)
    (out / "own-seed3").mkdir()
    write_json(out / "own-seed3" / "run.json", {"task": "mnli"})
    rows = [("entailment", "b"), ("non-entailment", "b"), ("non-entailment", "a/c"), ("entailment", "a/c")]
    lines = [HANS, *(f"{label}\tw1 w2\tw3\t{group}\tx" for label, group in rows)]
    (tmp_path / "hans.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    #: run -> its decisions: right are 3 and 4 of the method's, 2 and 2 of plain training's
    decisions = {"own-seed1": [0, 1, 2, 1], "own-seed2": [0, 1, 2, 0], "plain": [0, 0, 0, 0]}

    def load(run: Path, cpu: bool) -> Trained:
        loaded.append(run.name)
        say(trained, decisions[run.name if run.name in decisions else "plain"], monkeypatch)
        return trained

    monkeypatch.setattr(robustness_table, "load_trained", load)
    return out, loaded


def interrupt() -> None:
    raise KeyboardInterrupt


def test_all_runs_of_a_comparison_are_a_table(
    evaluated: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, loaded = evaluated
    line = ["evaluate", str(out), "--on", "hans", "--data", str(tmp_path / "hans.txt"), "--cpu"]
    with pytest.MonkeyPatch.context() as patch:  # interrupted in the third run, whose measuring has begun
        measure = robustness_table.predict
        patch.setattr(robustness_table, "predict", lambda *args: measure(*args) if len(loaded) < 3 else interrupt())
        assert main(line) == 130 and len(loaded) == 3 and not (out / "hans" / "results.json").exists()
    assert "interrupted; the same command goes on" in capsys.readouterr().out
    assert main(line) == 0
    assert loaded == ["plain-seed1", "plain-seed2", "own-seed1", "own-seed1", "own-seed2"]
    loaded.clear()
    said = capsys.readouterr().out
    assert "own-seed3 is not finished, so it is left out" in said and "1/4 PLAIN, seed 1: accuracy 50.00 (was" in said
    content = read_json(out / "hans" / "results.json")
    own = content["methods"][1]
    assert (own["title"], own["seeds"], own["figures"]["test"]["accuracy"]["mean"]) == ("OWN", 2, 87.5)
    assert own["figures"]["a/c, entailment"]["accuracy"] == {"mean": 50.0, "std": pytest.approx(70.71, abs=0.01)} | {
        "seeds": 2
    }
    found = own["differences"]["test"]["accuracy"]
    assert (found["mean"], found["seeds"], found["drawn"]) == (37.5, 2, "seeds and examples")
    assert own["differences"]["a/c"]["accuracy"]["mean"] == 25.0 and found["low"] < 37.5 < found["high"]
    table = (out / "hans" / "results.md").read_text(encoding="utf-8")
    assert table.startswith("| method | accuracy | accuracy − plain | accuracy a/c | accuracy b | seeds |")
    assert "| OWN | *87.50 ± 17.68* | *+37.50 [" in table and "three labels are folded to two" in table
    (experiment,) = read_experiments([out / "hans"])
    assert experiment.title == "mnli → hans" and experiment.scores == ["accuracy", "accuracy a/c", "accuracy b"]
    ends = {"test": "accuracy", "a/c": "accuracy a/c", "b": "accuracy b"}
    for subset, score in ends.items():
        found, reported = own["differences"][subset]["accuracy"], compared(experiment, experiment.groups[1], score)
        assert (reported.interval, reported.drawn) == ((found["low"], found["high"]), "seeds and examples")
    assert main(["power", str(out / "hans" / "results.json")]) == 0
    assert "+37.50" in capsys.readouterr().out, "the table is a pilot for the number of seeds, too"
    # nothing is measured again but what has another checkpoint
    assert main(line) == 0 and not loaded
    assert capsys.readouterr().out.count("(was done)") == 4 and read_json(out / "hans" / "results.json") == content
    (out / "own-seed2" / "checkpoints" / "checkpoint_best.pt").write_text("other")
    assert main(line) == 0 and loaded == ["own-seed2"]
    # several runs do as well
    runs = [str(out / name) for name in ("plain-seed1", "own-seed1")]
    assert main(["evaluate", *runs, *line[2:], "--out", str(tmp_path / "two")]) == 0
    assert loaded == ["own-seed2", "plain-seed1", "own-seed1"]
    assert read_json(tmp_path / "two" / "results.json")["methods"][1]["differences"]["test"]["accuracy"]["seeds"] == 1
    (experiment,) = read_experiments([tmp_path / "two"])
    assert compared(experiment, experiment.groups[1], "accuracy").drawn == "examples", "an interval of one seed, too"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{}/gone", "{}/mnli"], "{}/gone is no finished run of attn-reg finetune, and no folder with such runs in it"),
        (["{}/mnli/own-seed3", "{}/mnli"], "{}/mnli/own-seed3 is no finished run of attn-reg finetune"),
        (["{}/mnli/own-seed1", "{}/b/own-seed2"], "--out is missing: the runs lie in several folders"),
        (["{}/mnli", "--out", "{}/x.json"], "--out is {}/x.json, but the table of several runs is a folder"),
        (["{}/mnli", "{}/b/own-seed2", "--out", "o"], "{}/b/own-seed2: hans tests classifiers, but the model is one"),
        (["{}/mnli", "{}/c/own-seed2", "--out", "o"], "plain-seed1 and {}/c/own-seed2 differ in the pretrained model"),
        (["{}/mnli", "{}/d/own-seed3", "--out", "o"], "plain-seed1 and {}/d/own-seed3 differ in --train-examples, so"),
        (
            ["{}/mnli", "{}/e/own-seed3", "--out", "o"],
            "own-seed1 and {}/e/own-seed3 differ in --lr, so no row averages",
        ),
        (["{}/mnli", "{}/mnli/own-seed1"], "{}/mnli/own-seed1 and {}/mnli/own-seed1 are the same method and seed"),
        (["{}/mnli", "--split", "gone", "--data", "{}"], "for the split 'gone' of task hans"),
    ],
)
def test_runs_that_are_no_table(
    words: list[str], said: str, evaluated: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fine_tuned(tmp_path / "b" / "own-seed2", "stsb")
    fine_tuned(tmp_path / "c" / "own-seed2", model="other")
    fine_tuned(tmp_path / "d" / "own-seed3", flags="--lr 1 --train-examples 20")
    fine_tuned(tmp_path / "e" / "own-seed3", flags="--lr 2")
    words = [word.replace("{}", str(tmp_path)) for word in words]
    assert main(["evaluate", "--on", "hans", "--data", str(tmp_path / "hans.txt"), *words]) == 2
    assert said.replace("{}", str(tmp_path)) in capsys.readouterr().err
    assert not evaluated[1] and not (evaluated[0] / "hans").exists(), "refused before anything is measured"


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
