"""sentence-transformers and SetFit: embeddings of several texts, scores of pairs, and the losses made of them."""

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
from tests.huggingface.trainers import weights

st = pytest.importorskip("sentence_transformers")
cross = pytest.importorskip("sentence_transformers.cross_encoder")
losses = pytest.importorskip("sentence_transformers.losses")
cross_losses = pytest.importorskip("sentence_transformers.cross_encoder.losses")
pytestmark = pytest.mark.clients

FIRST, SECOND = sentences(40), sentences(40, 2)
PAIRS = {"anchor": FIRST, "positive": SECOND}
#: outputs without an F: the sentence names what to do
NO_F = r"objective=.*attention_dropout, attention_layer_drop, head_drop, layer_drop"


def ranking(model: Any) -> Any:
    return losses.MultipleNegativesRankingLoss(model)


def nested(model: Any) -> Any:
    """Draws sizes at random and replaces the model's forward while it runs."""
    return losses.MatryoshkaLoss(model, ranking(model), [32, 16, 8], n_dims_per_step=2)


def cached(model: Any) -> Any:
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)


SCORES = "the outputs' scores"
#: of each client: its model, the loss, the labels beside the texts, and what the log says; None where there is no F
CLIENTS: dict[str, tuple[str, Any, list[Any] | None, str | None]] = {
    "ranking": ("bert", ranking, None, None),
    "nested": ("bert", nested, None, None),
    "cached": ("bert", cached, None, None),
    "similarity": ("bert", losses.CosineSimilarityLoss, [i % 5 / 4 for i in range(40)], None),
    "pairs": ("pairs", cross_losses.BinaryCrossEntropyLoss, [float(i % 2) for i in range(40)], SCORES),
    "classes": ("classes", cross_losses.CrossEntropyLoss, [i % 3 for i in range(40)], SCORES),
}
EMBEDDING = [name for name, client in CLIENTS.items() if client[3] is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    folder_of(made / "bert", "BertModel")
    for name, labels in (("pairs", 1), ("classes", 3)):
        folder_of(made / name, "BertForSequenceClassification", num_labels=labels)
    return made


def make(folder: Path, client: str, callbacks: list[Any], options: dict[str, Any]) -> Any:
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
        loss=chosen(model),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("client", ["pairs", "classes"])
def test_a_cross_encoder(folder: Path, tmp_path: Path, client: str, caplog: Any) -> None:
    ours = check_client(partial(make, folder, client), "encoder.self", CLIENTS[client][3], caplog)
    ours.save_model(str(tmp_path))
    check_saved(tmp_path, ours.model, type(ours.model)(str(tmp_path), device="cpu"))


@pytest.mark.parametrize("client", [name for name in EMBEDDING if name != "cached"])
def test_losses_of_embeddings_with_methods_that_draw_at_random(folder: Path, client: str) -> None:
    for name, options in (("attention_dropout", {"p": 0.4}), ("head_drop", {"p": 0.5}), ("layer_drop", {"p": 0.5})):
        few = {"max_steps": 4, "logging_steps": 4}
        log = trained(partial(make, folder, client), build(name, **options), **few).state.log_history[0]
        assert log["loss"] > 0 and 0.1 < log["attn_reg/drop_rate"] < 0.9, (name, log)


@pytest.mark.parametrize("client", EMBEDDING)
def test_ad_drop_is_refused_where_outputs_hold_no_f(folder: Path, client: str) -> None:
    trainer = make(folder, client, [AttnRegCallback(ADDrop())], {})
    with pytest.raises(ValueError, match=NO_F):
        trainer.train()
    assert trainer.state.global_step == 0


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
        ours = trained(make_setfit, build("attention_dropout", p=0.4))
        with pytest.raises(ValueError, match=NO_F):
            trained(make_setfit, ADDrop())
    ours.model.save_pretrained(str(tmp_path))
    loaded = setfit.SetFitModel.from_pretrained(str(tmp_path), device="cpu")
    check_saved(tmp_path, ours.model.model_body, loaded.model_body)
    assert torch.equal(loaded.predict(FIRST[:5]), ours.model.predict(FIRST[:5]))


def test_setfits_head(folder: Path) -> None:
    """Trained end to end: F is what the head makes of an embedding."""
    setfit = pytest.importorskip("setfit")
    shared = {"device": "cpu", "use_differentiable_head": True, "head_params": {"out_features": 2}}
    model = setfit.SetFitModel.from_pretrained(str(folder / "bert"), **shared)

    def objective(outputs: Any, inputs: Any) -> torch.Tensor:
        return model.model_head(outputs["sentence_embedding"])[0].max(-1).values.sum()

    before = weights(model.model_body)
    with ADDrop(p=0.5, q=0.5, cross_tuning="off", objective=objective).attach(model.model_body) as regularizer:
        rates = {"body_learning_rate": 1e-3, "head_learning_rate": 1e-2}
        model.fit(FIRST[:24], [i % 2 for i in range(24)], num_epochs=1, batch_size=8, end_to_end=True, **rates)
        counted = regularizer.statistics.take()
    assert counted["regularized"] == counted["forwards"] == 3
    assert 0.1 < float(counted["dropped/encoder.self[0]"] / counted["valid/encoder.self[0]"]) < 0.4
    assert not torch.equal(weights(model.model_body), before)
