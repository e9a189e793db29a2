"""The example programs run, and do what they say."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(path: str) -> ModuleType:
    """An example as a module."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_thread")
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
        assert len(set(losses.values())) == len(METHODS), "every method trains in its own way"
    for method in METHODS - {"none"}:
        assert "drop_decoder.cross[1]" in (tmp_path / method / "log.txt").read_text()


@pytest.mark.usefixtures("one_thread")
def test_the_loop_learns_and_its_padding_does_not_matter() -> None:
    loop = example("custom_seq2seq/loop.py")
    losses = loop.train("ad_drop", epochs=2, sentences=64, width=16)
    assert losses[-1] < losses[0]
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
    pytest.importorskip("transformers")
    from tests.test_examples_inspect import saved

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
