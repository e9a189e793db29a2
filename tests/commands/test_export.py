"""`attn-reg export`, and the trained encoder that it takes out of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attn_reg_plugin.checkpoints import find_checkpoint
from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments import trained as trained_module
from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.labelled import TextExample
from tests.models.hf_folders import tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["w1 w2 w3 w4", "w5", "w6 w7x w8", "w9 w10"]


def test_logits_come_in_the_order_of_the_examples(trained: Trained) -> None:
    inputs = [tokenizer()(text, "w1", return_tensors="pt") for text in TEXTS]
    rows = trained.encode([TextExample(1, text, "w1") for text in TEXTS])
    with torch.no_grad():
        alone = [trained.model(**one)["logits"][0] for one in inputs]
    for found, expected in zip(trained.logits(rows, batch_size=3), alone, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_an_exported_encoder_says_what_the_trained_one_says(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.setattr(trained_module, "load_trained", lambda run: trained)
    assert main(["export", "run", str(tmp_path / "out")]) == 0
    assert "BertForSequenceClassification of" in capsys.readouterr().out
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.model_max_length == trained.longest
    inputs = tokenizer(TEXTS, ["w1"] * 4, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    expected = trained.logits(trained.encode([TextExample(1, text, "w1") for text in TEXTS]))
    assert torch.allclose(logits, torch.stack(expected), atol=1e-6)
    assert model.config.id2label[0] == trained.labelled.labels[0]


def test_a_mean_pooled_encoder_stays(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trained_module, "load_trained", lambda run: trained)
    monkeypatch.setattr(trained.model, "mean_pooled", True)
    assert main(["export", "run", str(tmp_path / "out")]) == 2 and not (tmp_path / "out").exists()
    assert "run: transformers has no head for --pooling mean" in capsys.readouterr().err


def test_export_onto_a_full_disk(
    trained: Trained, tmp_path: Path, limited: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trained_module, "load_trained", lambda run: trained)
    before, out = sorted(tmp_path.iterdir()), tmp_path / "a" / "b"
    limited(5000)
    assert main(["export", "run", str(out)]) == 2
    limited()
    assert f"attn-reg export: {out}: the file is larger" in capsys.readouterr().err  # after transformers' progress bar
    assert sorted(tmp_path.iterdir()) == before
    assert main(["export", "run", str(out)]) == 0 and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["export", "{}", "{}/out"], "{} has no checkpoint; looked for checkpoint_best.pt"),
        (["export", "{}", "{}"], "{} exists already: give a folder that does not, or an empty one"),
        (["export", "{}/other.pt", "{}/out"], "{}/other.pt isn't a checkpoint of --arch hf_encoder"),
        (["export", "{}/damaged.pt", "{}/out"], "{}/damaged.pt cannot be read: it is damaged"),
        (["export", "{}/weights.pt", "{}/out"], "{}/weights.pt is not a fairseq checkpoint"),
    ],
)
def test_refusals(command: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"cfg": {"model": {"arch": "transformer"}}, "model": {}}, tmp_path / "other.pt")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pt")
    (tmp_path / "damaged.pt").write_bytes(b"x")
    assert main([word.replace("{}", str(tmp_path)) for word in command]) == 2
    assert said.replace("{}", str(tmp_path)) in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_best_checkpoint_is_found_before_the_last(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    names = ["checkpoints/checkpoint_last.pt", "checkpoint_last.pt", "checkpoints/checkpoint_best.pt"]
    for name in [*names, "checkpoint_best.pt"]:
        (tmp_path / name).touch()
        assert find_checkpoint(tmp_path) == tmp_path / name
    assert find_checkpoint(tmp_path / names[0]) == tmp_path / names[0]
