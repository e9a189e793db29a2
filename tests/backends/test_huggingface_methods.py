"""Every method on models of transformers and fairseq: an encoder, a translator, and where families differ."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_reg_plugin import ADDrop, AttentionLayerDrop, find_sites
from attn_reg_plugin.regularizers import build as method
from attn_reg_plugin.regularizers.attend_out.generator import embeddings_of
from attn_reg_plugin.regularizers.base.hooks.put_back import without_dropout
from attn_reg_plugin.regularizers.layer_drop import Layer
from tests.backends.huggingface_models import FAMILIES, WORDS, batch, build


def train(model: nn.Module, inputs: dict[str, Tensor], seed: int = 2) -> Tensor:
    model.zero_grad()
    torch.manual_seed(seed)
    outputs = model(**inputs)
    loss = outputs[0].log_softmax(-1)[..., 5].mean() if isinstance(outputs, tuple) else outputs.loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    return loss.detach()


@pytest.mark.parametrize(
    "name", ["bert", "albert", "marian", "t5", "llama", "deberta_v3", "mpnet", "xlnet", "longformer"]
)
def test_attention_layer_drop_is_the_mean_of_the_values(name: str) -> None:
    """Against the model's own attention with zero queries: without position bias, uniform over what is valid."""
    model, inputs = build(name), batch(name)
    plain = train(model, inputs)
    with AttentionLayerDrop(p=1.0, sites="*").attach(model):
        dropped = train(model, inputs)
    assert not dropped.allclose(plain)
    zeroed = re.compile(
        r"(query|query_\w+|q|q_proj|relative_attention_bias)\.(weight|bias)$|rel_embed|\.(q|r_\w_bias)$"
    )
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if zeroed.search(part):
                parameter.zero_()
    torch.testing.assert_close(train(model, inputs), dropped, atol=1e-5, rtol=1e-5)


def made(name: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and its inputs, also of fairseq."""
    if name == "fairseq":
        import tests.backends.fairseq_models as models

        return models.transformer(**options), models.batch()
    return build(name, **options), batch(name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("fairseq", "bert", "distilbert", "modernbert", "marian", "llama", "mpnet")),
        ("fairseq", {"checkpoint_activations": True}),
    ],
)
def test_layer_drop_is_the_model_without_the_layers(name: str, options: dict[str, Any]) -> None:
    model, inputs = made(name, **options)
    regularizer, seen = method("layer_drop", p=0.5, sites="*"), set()
    for seed in range(4):
        rest, _ = made(name)
        with regularizer.attach(model):
            ours = train(model, inputs, seed)
            layers = [handle for handle in regularizer._attachment.handles if isinstance(handle, Layer)]
            gone = [layer.path for layer in layers if layer.calls[0].left_out]
        for path in reversed(gone):
            parent, _, index = path.rpartition(".")
            del rest.get_submodule(parent)[int(index)]
        if name == "llama":  # whose loop counts
            rest.config.num_hidden_layers -= len(gone)
        torch.testing.assert_close(ours, train(rest, inputs, seed))
        seen.add(len(gone))
    assert len(seen) > 1


def test_a_layer_that_others_need_gives_that_although_it_is_left_out() -> None:
    """T5's first layer computes the position bias of all."""
    model, rest, inputs = build("t5"), build("t5"), batch("t5")
    with torch.no_grad():
        attention, feed_forward = rest.encoder.block[0].layer
        for linear in (attention.SelfAttention.o, feed_forward.DenseReluDense.wo):
            linear.weight.zero_()  # nothing is added to the states
    with method("layer_drop", p=1.0, sites="encoder.self[0]").attach(model):
        for _ in range(2):
            torch.testing.assert_close(train(model, inputs), train(rest, inputs))
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert bias.grad.abs().sum() > 0


OWN_DROPOUT = {"bert": "attention_probs_dropout_prob", "albert": "attention_probs_dropout_prob"}
OWN_DROPOUT |= dict.fromkeys(["deberta", "deberta_v3", "mpnet"], "attention_probs_dropout_prob")
OWN_DROPOUT |= dict.fromkeys(["marian", "llama", "fairseq"], "attention_dropout")


@pytest.mark.parametrize("name", OWN_DROPOUT)
def test_weights_dropout_is_the_models_own(name: str) -> None:
    """The kernel draws the same numbers, whether the configuration asks for them or a site."""
    (own, inputs), (ours, _) = made(name, **{OWN_DROPOUT[name]: 0.3}), made(name)
    expected = train(own, inputs)
    with method("attention_dropout", p=0.3, sites="*").attach(ours):
        torch.testing.assert_close(train(ours, inputs), expected)
    assert not expected.allclose(train(ours, inputs))


@pytest.mark.parametrize("name", [*FAMILIES, "fairseq"])
def test_a_probe_without_dropout_has_none(name: str) -> None:
    """Whether a family keeps its dropout in modules or in numbers."""
    model, inputs = made(name, **({"attention_dropout": 0.5} if name == "fairseq" else {}), dropout=0.5)

    def logits() -> Tensor:
        outputs = model(**inputs)
        return outputs[0] if name == "fairseq" else outputs.logits

    modes = [(m.training, getattr(m, "p", None), getattr(m, "dropout", None)) for m in model.modules()]
    expected = model.eval() and logits()
    model.train()
    assert not logits().allclose(expected)
    with without_dropout(model):
        torch.testing.assert_close(logits(), expected, atol=1e-5, rtol=1e-5)
    assert modes == [(m.training, getattr(m, "p", None), getattr(m, "dropout", None)) for m in model.modules()]


@pytest.mark.parametrize("name", ["bert", "bart", "t5", "deberta", "deberta_v3", "mpnet", "xlnet"])
def test_eager_models_still_return_their_attentions(name: str) -> None:
    """Also while they are regularized: zero where positions were dropped, and rows that sum to one."""
    model, inputs = build(name, attention="eager"), batch(name, full=name.startswith("deberta"))  # it masks queries
    with ADDrop(p=0.5, q=0.9, sites="encoder.self", cross_tuning="off").attach(model) as regularizer:
        outputs = model(**inputs, output_attentions=True)
        maps = outputs.attentions if FAMILIES[name].stacks == "encoder" else outputs.encoder_attentions
        for weights, site in zip(maps, regularizer.attached_sites, strict=True):
            alive = site.keep.any(-1, keepdim=True)
            assert (weights[~site.keep & alive] == 0).all() and (~site.keep & alive).any()
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


EMBEDDINGS = {
    "bert": ("bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings"),
    "roberta": ("roberta.embeddings.word_embeddings", "roberta.embeddings.position_embeddings"),
    "electra": ("electra.embeddings.word_embeddings", "electra.embeddings.position_embeddings"),
    "marian": ("model.encoder.embed_tokens", "model.encoder.embed_positions"),
    "bart": ("model.encoder.embed_tokens", "model.encoder.embed_positions"),
    "m2m_100": ("model.encoder.embed_tokens", None),
    "t5": ("shared", None),
    "deberta_v3": ("deberta.embeddings.word_embeddings", None),
    "mpnet": ("mpnet.embeddings.word_embeddings", "mpnet.embeddings.position_embeddings"),
    "xlnet": ("transformer.word_embedding", None),
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
