"""The example programs run, and do what they say."""

import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

from attn_reg_plugin import find_sites, recording
from attn_reg_plugin.attention.attribution import gradients_of
from attn_reg_plugin.attention.tokens import TokenBias
from attn_reg_plugin.labelled import find_task
from tests.loading import example
from tests.models.hf_folders import make_model, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_attend_out_in_a_loop_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    right, game = example("attend_out/loop.py").main()
    printed = capsys.readouterr().out.splitlines()
    assert game.state_dict()["rounds"] == 10 and [line.split(":")[0] for line in printed] == [
        f"round {i}" for i in range(1, 11)
    ]
    assert right > 0.8, "three languages: a third is chance"


METHODS = {"none", "ad_drop", "attend_out", "attention_layer_drop", "scheduled_dropout"}


@pytest.mark.slow
def test_both_faces_with_every_method_by_one_command(tmp_path: Path) -> None:
    sizes = ["--sentences", "128", "--epochs", "3", "--width", "16", "--out", str(tmp_path)]
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / "custom_seq2seq" / "run.py"), *sizes],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    rows = [line.split() for line in finished.stdout.splitlines() if line.endswith("nats a letter")]
    for face, chance in (("loop", math.log(0x250)), ("fairseq", 4.6)):
        losses = {method: float(loss) for name, method, loss, *_ in rows if name == face}
        assert set(losses) == METHODS and all(loss < chance for loss in losses.values())
        assert face == "fairseq" or len(set(losses.values())) == len(METHODS), "fairseq's are rounded"
    logs = {method: (tmp_path / method / "log.txt").read_text() for method in METHODS}
    perplexities = {tuple(re.findall(r"ppl ([\d.]+)", log)) for log in logs.values()}
    assert len(perplexities) == len(METHODS), "every method trains in its own way"
    for method in METHODS - {"none"}:
        assert "drop_decoder.cross[1]" in logs[method]


def test_neither_padding_nor_what_follows_matters_to_the_loops_model() -> None:
    loop = example("custom_seq2seq/loop.py")
    model = loop.Translator(width=16).eval()
    source, target = loop.letters(["Hello."]), loop.letters(["Salut."], [loop.START])
    padded = torch.nn.functional.pad(source, (0, 5))
    assert torch.allclose(model(source, target), model(padded, target), atol=1e-5)
    longer = torch.nn.functional.pad(target, (0, 3), value=7)
    assert torch.allclose(model(source, longer)[:, : target.size(1)], model(source, target), atol=1e-5)


def test_checkpoints_are_averaged_once_each(tmp_path: Path) -> None:
    """Half precision in fp32, whole numbers as they are; the last checkpoint is one of the others."""
    for name, updates in {"checkpoint_1_10": 10, "checkpoint_2_20": 20, "checkpoint_last": 20}.items():
        model = {"weight": torch.full((2,), updates).half(), "version": torch.tensor([3])}
        torch.save({"model": model, "optimizer_history": [{"num_updates": updates}]}, tmp_path / f"{name}.pt")
    average = example("wmt16/average.py")
    average.main([*map(str, tmp_path.glob("checkpoint_*.pt")), "--out", str(tmp_path / "mean.pt")])
    found = torch.load(tmp_path / "mean.pt", weights_only=True)["model"]
    assert found["weight"].tolist() == [15.0, 15.0] and found["weight"].dtype == torch.float32
    assert found["version"].tolist() == [3]
    torch.save({"model": {"weight": torch.ones(3)}}, tmp_path / "other.pt")
    with pytest.raises(SystemExit):
        average.main([*map(str, tmp_path.glob("*.pt")), "--out", str(tmp_path / "none.pt")])


def test_predictions_are_those_of_the_model(tmp_path: Path) -> None:
    """A line per example, in GLUE's format, whatever the batches."""
    folder, examples = saved(tmp_path / "model", tmp_path), tmp_path / "test.tsv"
    rows = [f'{n}\tw{n} "w3\tw{n + 1} w5 w6' for n in range(5)]
    examples.write_text("\n".join(["index\tsentence1\tsentence2", *rows]) + "\n", encoding="utf-8")
    predict, columns = example("glue/predict.py"), ["--columns", "sentence1", "sentence2"]
    for size in (2, 5):
        out = tmp_path / f"{size}.tsv"
        predict.main([str(folder), str(examples), *columns, "--out", str(out), "--batch-size", str(size)])
        header, *lines = (line.split("\t") for line in out.read_text(encoding="utf-8").splitlines())
        assert header == ["index", "prediction"] and [line[0] for line in lines] == list("01234")
        assert {line[1] for line in lines} <= {"entailment", "not_entailment"}
    assert out.read_text(encoding="utf-8") == (tmp_path / "2.tsv").read_text(encoding="utf-8")
    one = [str(folder), str(examples), "--columns", "sentence1", "--out", str(out)]
    examples.write_text("sentence1\nw1 w2\rw3\nw4\n", encoding="utf-8")
    predict.main(one)
    assert len(out.read_text(encoding="utf-8").splitlines()) == 3
    examples.write_text("sentence1\nw1\n\nw4\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"test\.tsv, line 3: 0 fields, but the file's columns are 1"):
        predict.main(one)


COLUMNS = ["sentence1", "sentence2", "label"]


def saved(folder: Path, root: Path, seed: int = 3, row: str = "rte") -> Path:
    make_model(root / f"encoder{seed}{row}", row, seed).model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    texts = [" ".join(f"w{(3 * n + k) % 20}" for k in range(2 + n % 5)) for n in range(12)]
    labels = ["entailment", "not_entailment"] * 6
    frame = pd.DataFrame({"index": range(12), "sentence1": texts, "sentence2": texts[::-1], "label": labels})
    frame.to_csv(tmp_path / "examples.tsv", sep="\t", index=False)
    return tmp_path / "examples.tsv"


def test_the_limits_of_what_is_dropped_and_the_maps_are_the_models_own(examples: Path, tmp_path: Path) -> None:
    """p = 0 is plain evaluation, p = 1 is the same whatever comes first, and in between it isn't."""
    probe = example("inspect/probe.py")
    probe.RATIOS = (0.0, 0.5, 1.0)
    model, words = probe.load(probe.exported(saved(tmp_path / "model", tmp_path)))
    data = list(probe.batches(probe.read(examples, COLUMNS, model.config.label2id), words, 5))
    found = probe.dropping(model, data, "*").set_index(["dropped", "p"])["loss"]
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(model.eval()(**x).logits, y, reduction="sum") for x, y in data]
    nothing = sum(losses).item() / 12
    assert found["nothing", 0.0] == pytest.approx(nothing, abs=1e-6)
    for which in probe.WHICH:
        assert found[which, 0.0] == pytest.approx(nothing, abs=1e-5)
        assert found[which, 1.0] == pytest.approx(found["random", 1.0], abs=1e-6)
    assert len({round(found[which, 0.5], 7) for which in probe.WHICH}) == 3
    tokens, attentions, attributions = probe.maps(model, words, ["w1 w2", "w3"])
    assert tokens == ["[CLS]", "w1", "w2", "[SEP]", "w3", "[SEP]"]
    for one, other in zip(attentions, attributions, strict=True):
        torch.testing.assert_close(one.sum(-1), torch.ones(one.shape[:-1]))
        assert other.shape == one.shape and other.abs().sum() > 0


def test_probe_writes_its_pictures(examples: Path, tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "model", tmp_path), tmp_path / "out"
    command = [sys.executable, EXAMPLES / "inspect" / "probe.py", folder, examples, "--out", out, "--columns", *COLUMNS]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert len(pd.read_csv(out / "probe.csv")) == 1 + 3 * 5
    for name in ("dropping.png", "maps.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_robustness_is_measured_by_heuristic_and_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    robustness = example("inspect/robustness.py")
    rows = [("entailment", "a"), ("non-entailment", "a"), ("non-entailment", "b"), ("entailment", "b")]
    lines = [f"{label}\tw1 w2\tw{n}\t{heuristic}" for n, (label, heuristic) in enumerate(rows)]
    hans = tmp_path / "hans.txt"
    hans.write_text("\n".join(["gold_label\tsentence1\tsentence2\theuristic", *lines]) + "\n", encoding="utf-8")
    for name, seed in (("plain-seed1", 1), ("plain-seed2", 2), ("own-seed1", 3)):
        saved(tmp_path / "models" / name, tmp_path, seed, "mnli")
    (model, *_) = sorted((tmp_path / "models").iterdir())
    assert set(robustness.predict(model, robustness.read_hans(hans))) <= set(find_task("mnli").labels)
    said = {"plain-seed1": ["entailment", "neutral", "contradiction", "neutral"], "own-seed1": ["entailment"] * 4}
    said["plain-seed2"] = ["entailment", "entailment", "neutral", "entailment"]
    monkeypatch.setattr(robustness, "predict", lambda folder, examples: said[folder.name])
    monkeypatch.setattr(sys, "argv", ["x", str(model.parent), "--hans", str(hans), "--out", str(tmp_path / "out")])
    robustness.main()
    found = pd.read_csv(tmp_path / "out" / "robustness.csv").set_index(["method", "seed", "group"])["accuracy"]
    right = {"a, entailment": 100, "a, non-entailment": 100, "b, non-entailment": 100, "b, entailment": 0, "all": 75}
    assert found["plain", 1].to_dict() == right
    assert found["own", 1, "all"] == 50 and "own-seed1: 50.00 (one label for every example)" in capsys.readouterr().out
    table = " ".join((tmp_path / "out" / "robustness.md").read_text(encoding="utf-8").split())
    assert "| plain | a, non-entailment | 50 | 70.71 | 2 |" in table
    assert (tmp_path / "out" / "robustness.png").read_bytes().startswith(b"\x89PNG")
    hans.write_text("sentence1\tsentence2\tlabel\n" + 4 * "w1\tw2\t0\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["x", str(model.parent), "--pairs", str(hans)])
    with pytest.raises(SystemExit, match="own-seed1 says entailment, but the labels of the pairs are 0"):
        robustness.main()
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "--pairs", str(hans)])
    with pytest.raises(SystemExit):
        robustness.main()
    assert f"{tmp_path} has no runs" in capsys.readouterr().err


TEXTS = ["w1 w2 w3 w4", "w5 w6 w7", "w8 w9", "w1"]


@pytest.fixture
def look(tmp_path: Path) -> tuple:
    """The example of planted shortcuts, a random classifier with two classes, and its tokenizer."""
    model = make_model(tmp_path / "encoder", "rte", seed=1).model
    with torch.no_grad():  # so that the words decide
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return example("shortcuts/look.py"), model.eval(), tokenizer()


def test_the_score_is_the_gradient_of_a_bias_in_all_attentions(look, request) -> None:
    look, model, words = look
    model.double()
    torch.set_default_dtype(torch.float64)
    request.addfinalizer(partial(torch.set_default_dtype, torch.float32))
    inputs = words(TEXTS, padding=True, return_tensors="pt")
    found = look.token_scores(model, inputs)
    bias = TokenBias()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    sites = find_sites(model.train())
    with recording(sites, tokens=dict.fromkeys(sites, bias)):
        (expected,) = gradients_of(model(**inputs).logits.max(-1).values.sum(), bias.leaves)
    assert found.abs().max() > 1e-4
    assert torch.allclose(found, expected, atol=1e-9, rtol=0)


def test_the_table_counts_right_and_wrong_words(look, monkeypatch) -> None:
    look, model, words = look
    monkeypatch.setattr(look, "exported", lambda run: run)
    monkeypatch.setattr(look, "load", lambda run: (model, words))

    def predicted(texts: list[str]) -> list[int]:
        return [int(model(**words([text], return_tensors="pt")).logits.argmax()) for text in texts]

    clean = predicted(TEXTS)
    labels = [clean[0], 1 - clean[1], clean[2], 1 - clean[3]]
    row = look.table(Path("run"), TEXTS, labels, ["w10", "w11"])
    for name, given in ("with the right word", labels), ("with the wrong word", [1 - label for label in labels]):
        texts = [f"{('w10', 'w11')[label]} {text}" for label, text in zip(given, TEXTS, strict=True)]
        right = sum(one == label for one, label in zip(predicted(texts), labels, strict=True))
        assert row[name] == pytest.approx(25.0 * right)
    assert row["clean"] == pytest.approx(50.0)
    assert 0 < row["score of the planted word, %"] < 100
