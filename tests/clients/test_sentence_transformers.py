"""sentence-transformers and SetFit: embeddings of several texts, scores of pairs, and the losses made of them."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.regularizers import ADDrop, AttendOut, build
from tests.clients.tiny import QUIET, check_client, check_saved, folder_of, sentences, trained

st = pytest.importorskip("sentence_transformers")
cross = pytest.importorskip("sentence_transformers.cross_encoder")
losses = pytest.importorskip("sentence_transformers.losses")
cross_losses = pytest.importorskip("sentence_transformers.cross_encoder.losses")
pytestmark = pytest.mark.clients

FIRST, SECOND = sentences(40), sentences(40, 2)
PAIRS = {"anchor": FIRST, "positive": SECOND}
STEP, SCORES = "the whole step, by a probe of it: the outputs have no logits", "the outputs' scores"
ONE = "by a probe of it: the outputs are one number an example, which has no pseudo label"


def ranking(model: Any) -> Any:
    return losses.MultipleNegativesRankingLoss(model)


def nested(model: Any) -> Any:
    """Draws sizes at random and replaces the model's forward while it runs."""
    return losses.MatryoshkaLoss(model, ranking(model), [32, 16, 8], n_dims_per_step=2)


def cached(model: Any) -> Any:
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)


#: of each client: its model, the loss, the labels beside the texts, and what the log says
CLIENTS: dict[str, tuple[str, Any, list[Any] | None, str]] = {
    "ranking": ("bert", ranking, None, STEP),
    "nested": ("bert", nested, None, STEP),
    "similarity": ("bert", losses.CosineSimilarityLoss, [i % 5 / 4 for i in range(40)], STEP),
    "pairs": ("pairs", cross_losses.BinaryCrossEntropyLoss, [float(i % 2) for i in range(40)], ONE),
    "classes": ("classes", cross_losses.CrossEntropyLoss, [i % 3 for i in range(40)], SCORES),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    folder_of(made / "bert", "BertModel")
    for name, labels in (("pairs", 1), ("classes", 3)):
        folder_of(made / name, "BertForSequenceClassification", num_labels=labels)
    return made


def make(folder: Path, client: str, callbacks: list[Any], options: dict[str, Any], loss: Any = None) -> Any:
    kind, chosen, labels, _ = CLIENTS[client]
    embeds = kind == "bert"
    if embeds:
        model: Any = st.SentenceTransformer(str(folder / kind), device="cpu")
    else:
        model = cross.CrossEncoder(str(folder / kind), device="cpu")
    trainer = st.SentenceTransformerTrainer if embeds else cross.CrossEncoderTrainer
    arguments = st.SentenceTransformerTrainingArguments if embeds else cross.CrossEncoderTrainingArguments
    return trainer(
        model=model,
        args=arguments(output_dir=str(folder / "out"), **{**QUIET, **options}),
        train_dataset=Dataset.from_dict(PAIRS | ({} if labels is None else {"label": labels})),
        loss=(loss or chosen)(model),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_a_trainer_of_sentence_transformers(folder: Path, tmp_path: Path, client: str, caplog: Any) -> None:
    ours = check_client(partial(make, folder, client), "encoder.self", CLIENTS[client][3], caplog)
    ours.save_model(str(tmp_path))
    check_saved(tmp_path, ours.model, type(ours.model)(str(tmp_path), device="cpu"))


def test_checkpointing_of_activations_changes_nothing(folder: Path) -> None:
    found = []
    for options in ({}, {"gradient_checkpointing": True}):
        ours = trained(partial(make, folder, "ranking"), ADDrop(p=0.5, q=0.5, cross_tuning="update:2"), **options)
        found.append(ours.state.log_history[0]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_other_methods_act_in_every_forward(folder: Path) -> None:
    for method in (build("attention_dropout", p=0.4), build("ad_drop+mixout", mixout={"p": 0.3})):
        log = trained(partial(make, folder, "ranking"), method, max_steps=4, logging_steps=4).state.log_history[0]
        assert log["loss"] > 0 and (method.name != "attention_dropout" or log["drop_encoder.self[0]"] > 0.2)


def test_kept_regions_of_each_forward(folder: Path) -> None:
    """They need no objective, unless what is missing is to be probed."""
    kept = trained(partial(make, folder, "ranking"), ADDrop(probe="kept", on_miss="plain"), logging_steps=10)
    plain, regularized = kept.state.log_history[:2]
    assert plain["regularized"] == 0 and regularized["regularized"] == regularized["kept_hit_rate"] == 1
    assert 0 < regularized["drop_encoder.self[0]"] < 0.3
    with pytest.raises(ValueError, match=r"type dict; .*; or use on_miss='plain', which needs no objective$"):
        trained(partial(make, folder, "ranking"), ADDrop(probe="kept"))


def test_a_loss_with_cached_gradients_and_an_embedding_without_a_loss_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="SentenceTransformer runs again inside a backward, as with losses"):
        trained(partial(make, folder, "ranking", loss=cached), ADDrop(cross_tuning="update:1"))
    model = st.SentenceTransformer(str(folder / "bert"), device="cpu").train()
    with ADDrop(cross_tuning="off").attach(model), pytest.raises(ValueError, match="what embeddings are for is known"):
        model(model.preprocess(FIRST[:3]))


def test_an_attacker_without_tokens_is_refused_at_the_start(folder: Path) -> None:
    trainer = make(folder, "ranking", [AttnRegCallback(AttendOut(steps=2, reward_subset="train"))], {})
    with pytest.raises(ValueError, match=r"an example of 'train' gives SentenceTransformer none \(the batch has: "):
        trainer.train()
    assert trainer.state.global_step == 0


def test_setfit(folder: Path, tmp_path: Path, caplog: Any) -> None:
    setfit = pytest.importorskip("setfit")
    data = Dataset.from_dict({"text": FIRST[:24], "label": [i % 2 for i in range(24)]})
    quiet = {"max_steps": 20, "batch_size": 4, "logging_steps": 20, "report_to": "none", "save_strategy": "no"}

    def make_setfit(callbacks: list[Any], options: dict[str, Any]) -> Any:
        model = setfit.SetFitModel.from_pretrained(str(folder / "bert"), device="cpu")
        args = setfit.TrainingArguments(output_dir=str(folder / "out"), seed=3, **quiet, **options)
        return setfit.Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)

    with caplog.at_level(logging.ERROR, "setfit"):
        ours = check_client(make_setfit, "encoder.self", STEP, caplog, lambda trainer: trainer.model.model_body)
    ours.model.save_pretrained(str(tmp_path))
    loaded = setfit.SetFitModel.from_pretrained(str(tmp_path), device="cpu")
    check_saved(tmp_path, ours.model.model_body, loaded.model_body)
    assert torch.equal(loaded.predict(FIRST[:5]), ours.model.predict(FIRST[:5]))
