"""Every method on transformers models: an encoder, a translator, and where families differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from attn_reg_plugin import ADDrop, AttendOut, AttentionLayerDrop, ScheduledDropout, find_sites
from attn_reg_plugin.regularizers import Outcome, Tokens
from attn_reg_plugin.regularizers.generator import embeddings_of
from attn_reg_plugin.regularizers.probing import without_dropout
from tests.backends.huggingface_models import FAMILIES, PAD, WORDS, batch, build, objective

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = ["bert", "albert", "marian", "t5", "llama"]


def train(model: nn.Module, inputs: dict[str, Tensor], seed: int = 2) -> Tensor:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    return loss.detach()


@pytest.mark.parametrize("attribution", ["gradient", "integrated", "attention", "random"])
@pytest.mark.parametrize("name", FEW)
def test_ad_drop_with_every_attribution(name: str, attribution: str) -> None:
    model, inputs = build(name, dropout=0.1), batch(name)
    plain = train(model, inputs)
    options = {"attribution": attribution, "integrated_steps": 2, "cross_tuning": "off"}
    with ADDrop(p=0.6, q=0.6, sites="*", **options).attach(model) as regularizer:
        assert not train(model, inputs).allclose(plain)
        counted = regularizer.statistics.take()
    for site in FAMILIES[name].sites:
        assert 0 < counted[f"dropped/{site}"] < counted[f"valid/{site}"]


@pytest.mark.parametrize("name", FEW)
def test_attention_layer_drop_is_the_mean_of_the_values(name: str) -> None:
    """Against the model's own attention with zero queries: without position bias, uniform over what is valid."""
    model, inputs = build(name), batch(name)
    plain = train(model, inputs)
    with AttentionLayerDrop(p=1.0, sites="*").attach(model):
        dropped = train(model, inputs)
    assert not dropped.allclose(plain)
    zeroed = {"albert": "query", "bert": "query", "marian": "q_proj", "llama": "q_proj", "t5": "q"}[name]
    with torch.no_grad():
        for site in find_sites(model, "*"):
            getattr(site.module, zeroed).weight.zero_()
            if getattr(site.module, zeroed).bias is not None:
                getattr(site.module, zeroed).bias.zero_()
            if getattr(site.module, "relative_attention_bias", None) is not None:
                site.module.relative_attention_bias.weight.zero_()
    torch.testing.assert_close(train(model, inputs), dropped, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_rows_that_lose_everything_are_the_mean_of_their_values(name: str) -> None:
    """Also with a position bias: dropping every position by a mask is attention LayerDrop."""
    model, inputs = build(name), batch(name)
    with AttentionLayerDrop(p=1.0, sites="*").attach(model):
        expected = train(model, inputs)
    with ScheduledDropout(schedule="drop *: 0:1", sites="*").attach(model) as regularizer:
        torch.testing.assert_close(train(model, inputs), expected, atol=1e-5, rtol=1e-5)
        counted = regularizer.statistics.take()
    assert all(counted[f"dropped/{site}"] == counted[f"valid/{site}"] for site in FAMILIES[name].sites)


@pytest.mark.parametrize("name", FEW)
def test_scheduled_dropout_drops_at_its_rate(name: str) -> None:
    model, inputs = build(name), batch(name)
    plain = train(model, inputs)
    with ScheduledDropout(schedule="drop *: 0:0.5", sites="*").attach(model) as regularizer:
        for seed in range(4):
            assert not train(model, inputs, seed).allclose(plain)
        counted = regularizer.statistics.take()
    rates = [float(counted[f"dropped/{site}"] / counted[f"valid/{site}"]) for site in FAMILIES[name].sites]
    assert all(0.3 < rate < 0.7 for rate in rates)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_probe_without_dropout_has_none(name: str) -> None:
    """Whether a family keeps its dropout in modules or in numbers."""
    model, inputs = build(name, dropout=0.5), batch(name)
    modes = [(m.training, getattr(m, "p", None), getattr(m, "dropout", None)) for m in model.modules()]
    expected = model.eval()(**inputs).logits
    model.train()
    assert not model(**inputs).logits.allclose(expected)
    with without_dropout(model):
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
    assert modes == [(m.training, getattr(m, "p", None), getattr(m, "dropout", None)) for m in model.modules()]


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_a_bfloat16_probe(name: str) -> None:
    model, inputs = build(name), batch(name)
    with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off", probe_dtype="bfloat16").attach(model) as regularizer:
        train(model, inputs)
        assert float(regularizer.statistics.take()["fallbacks"]) == 0
        assert all(site.keep is not None for site in regularizer.attached_sites)


@pytest.mark.parametrize("name", ["bert", "bart", "t5"])
def test_eager_models_still_return_their_attentions(name: str) -> None:
    """Also while they are regularized: zero where positions were dropped, and rows that sum to one."""
    model, inputs = build(name, attention="eager"), batch(name)
    with ADDrop(p=0.5, q=0.9, sites="encoder.self", cross_tuning="off").attach(model) as regularizer:
        outputs = model(**inputs, output_attentions=True)
        maps = outputs.attentions if name == "bert" else outputs.encoder_attentions
        for weights, site in zip(maps, regularizer.attached_sites, strict=True):
            alive = site.keep.any(-1, keepdim=True)
            assert (weights[~site.keep & alive] == 0).all() and (~site.keep & alive).any()
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_an_objective_of_the_users_own() -> None:
    model, inputs = build("bart"), batch("bart")
    seen = []

    def own(outputs: Any, told: Mapping[str, Any]) -> Tensor:
        seen.append(told)
        return objective("bart", inputs, outputs.logits)

    results = []
    for options in ({}, {"objective": own}):
        with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off", **options).attach(model):
            results.append(train(model, inputs))
    assert torch.equal(*results)
    assert torch.equal(seen[0]["targets"], inputs["labels"])


# -- AttendOut --------------------------------------------------------------------------------------------------------


class Labelled:
    """The model's own loss as AttendOut's problem."""

    def __init__(self, name: str) -> None:
        self.name = name

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Outcome:
        taken = ("input_ids", "attention_mask", "labels")
        return Outcome(model(**{name: inputs[name] for name in taken}).loss)

    def tokens(self, inputs: Mapping[str, Any]) -> dict[str, Tokens]:
        encoder = Tokens(inputs["input_ids"], inputs["attention_mask"].bool())
        if FAMILIES[self.name].stacks == "encoder":
            return {"encoder": encoder}
        labels = inputs["labels"].masked_fill(inputs["labels"] == -100, PAD)
        read = torch.cat([torch.full((len(labels), 1), 2), labels[:, :-1]], 1)
        return {"encoder": encoder, "decoder": Tokens(read, torch.ones_like(read, dtype=torch.bool))}

    def validation(self, n: int) -> Iterator[dict[str, Tensor]]:
        for index in torch.randint(3, (n,)).tolist():
            yield {key: value[index : index + 1] for key, value in batch(self.name).items()}


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "marian", "bart", "t5"])
def test_attend_out_plays_its_rounds(name: str) -> None:
    model, inputs = build(name), batch(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    regularizer = AttendOut(problem=Labelled(name), optimizer=optimizer, steps=2, sites="*")
    with regularizer.attach(model):
        for update in range(4):
            train(model, inputs, update)
            assert all(site.keep is not None for site in regularizer.attached_sites)
            optimizer.step()
            regularizer.end_update()
        assert regularizer.game.rounds == 2
        assert regularizer.game.last_round["generator_gnorm"] > 0
        defender = regularizer.game.defender.model
        assert defender.config._attn_implementation == "sdpa"
        assert not defender._forward_pre_hooks


EMBEDDINGS = {
    "bert": ("bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings"),
    "roberta": ("roberta.embeddings.word_embeddings", "roberta.embeddings.position_embeddings"),
    "electra": ("electra.embeddings.word_embeddings", "electra.embeddings.position_embeddings"),
    "marian": ("model.encoder.embed_tokens", "model.encoder.embed_positions"),
    "bart": ("model.encoder.embed_tokens", "model.encoder.embed_positions"),
    "m2m_100": ("model.encoder.embed_tokens", None),
    "t5": ("shared", None),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_embeddings_of_each_stack(name: str) -> None:
    """Tokens from their table; positions from the row that the model reads for the first token."""
    model = build(name)
    tokens, positions = EMBEDDINGS[name]
    stacks = {"encoder", "decoder"} if FAMILIES[name].stacks == "both" else {"encoder"}
    found = embeddings_of(model, stacks, find_sites(model, "*"))
    assert found.keys() == stacks
    assert found["encoder"].tokens.data_ptr() == model.get_submodule(tokens).weight.data_ptr()
    assert found["encoder"].tokens.shape[0] == WORDS
    if positions is None:
        assert found["encoder"].positions is None
        return
    read = []
    handle = model.get_submodule(positions).register_forward_hook(lambda m, a, output: read.append(output))
    model(**batch(name, full=True))
    handle.remove()
    rows = read[0].reshape(-1, read[0].size(-1))[:7]
    torch.testing.assert_close(found["encoder"].positions[: len(rows)], rows)
