"""The example of planted shortcuts: its score is that of whole tokens, and its table counts what it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import torch

from attn_reg_plugin import ADDrop, recording
from attn_reg_plugin.attention.attribution import gradients_of
from attn_reg_plugin.attention.tokens import TokenBias
from attn_reg_plugin.labelled import find_task
from attn_reg_plugin.models.hf_encoder import HFEncoderConfig, HFEncoderModel
from tests.models.hf_folders import make_encoder, tokenizer
from tests.test_examples import example

TEXTS = ["w1 w2 w3 w4", "w5 w6 w7", "w8 w9", "w1"]


@pytest.fixture
def look(tmp_path: Path) -> tuple:
    """The example, a random classifier with two classes, and its tokenizer."""
    task = SimpleNamespace(labelled=find_task("rte"), cfg=SimpleNamespace(hf_model=str(make_encoder(tmp_path / "e"))))
    torch.manual_seed(1)
    model = HFEncoderModel.build_model(HFEncoderConfig(), task).model
    with torch.no_grad():  # so that the words decide
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return example("shortcuts/look.py"), model.eval(), tokenizer()


def test_the_score_is_the_gradient_of_a_bias_in_all_attentions(look) -> None:
    look, model, words = look
    inputs = words(TEXTS, padding=True, return_tensors="pt")
    found = look.token_scores(model, inputs)
    regularizer, bias = ADDrop(p=0.0, cross_tuning="off"), TokenBias()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with regularizer.attach(model):  # in evaluation the model's forward clears no request
        for site in regularizer.attached_sites:
            site.module.train()
        with recording(regularizer.attached_sites, tokens=dict.fromkeys(regularizer.attached_sites, bias)):
            objective = model(**inputs).logits.max(-1).values.sum()
            (expected,) = gradients_of(objective, bias.leaves)
    assert found.abs().max() > 1e-4
    assert torch.allclose(found, expected, atol=1e-6, rtol=1e-4)


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
