"""transformers models whose attention runs several times in a forward, and caches that a user passes."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from attn_reg_plugin import ADDrop, AttentionLayerDrop, find_sites
from attn_reg_plugin.regularizers import Combination
from attn_reg_plugin.regularizers import build as build_method
from tests.attention.tiny_model import keep_of
from tests.backends.huggingface_models import HEADS, LAYERS, PAD, WORDS, build, ids

OBJECTIVE = {"objective": lambda outputs, inputs: outputs[..., :5].square().sum()}


class Siamese(nn.Module):
    """A sentence encoder for pairs of texts."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        outputs = [self.encoder(input_ids=ids, attention_mask=ids.ne(PAD).long()) for ids in (first, second)]
        return torch.stack([each.last_hidden_state[:, 0] for each in outputs], 1)


def texts() -> tuple[Tensor, Tensor]:
    return ids([7, 4, 2], 7, 3)[0], ids([3, 7, 6], 7, 4)[0]


def step(model: nn.Module, *inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(*inputs)[..., :3].square().sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("unit", ["position", "token"])
def test_calls_without_gradients_keep_all(unit: str) -> None:
    """Only the last runs of hrm_text's layers have gradients: the others have no attribution."""
    config = transformers.HrmTextConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    graded = {site.module: list[bool]() for site in find_sites(model, "*")}
    for module in graded:
        module.register_forward_pre_hook(lambda module, _: graded[module].append(torch.is_grad_enabled()))
    ids = torch.randint(4, WORDS, (2, 7), generator=torch.Generator().manual_seed(3))
    with ADDrop(p=1.0, q=1.0, unit=unit, sites="*", cross_tuning="off").attach(model) as regularizer:
        model(input_ids=ids)
        calls = [call for site in regularizer.attached_sites for call in site.calls.made]
        began = [one for site in regularizer.attached_sites for one in graded[site.module][len(site.calls.made) :]]
        causal = torch.ones(7, 7, dtype=torch.bool).tril()
        assert {*began} == {True, False}, "after the probe"
        assert [not (keep_of(call) | ~causal).all() for call in calls] == began
        assert regularizer.summary()["drop_rate"] == 1.0, "of the calls that are attributed"


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_one_encoder_for_two_texts(name: str) -> None:
    """ALBERT's layers share an attention besides: each of its sites runs once a text."""
    model = Siamese(build(name).base_model).train()
    plain = step(model, *texts())
    with ADDrop(p=1.0, q=1e-30, cross_tuning="off", **OBJECTIVE).attach(model) as regularizer:
        torch.testing.assert_close(step(model, *texts()), plain, atol=1e-5, rtol=1e-4)
        counted = regularizer.statistics.take()
    real = HEADS * sum(7 * int(ids.ne(PAD).sum()) for ids in texts())
    assert [counted[f"valid/encoder.self[{layer}]"] for layer in range(LAYERS)] == [real] * LAYERS
    results = []
    for method in (ADDrop(p=1.0, q=1.0, cross_tuning="off", **OBJECTIVE), AttentionLayerDrop(p=1.0)):
        with method.attach(model):
            results.append(step(model, *texts())[0])
    torch.testing.assert_close(*results)
    assert not results[0].allclose(plain[0])


def test_a_layer_that_one_text_goes_without_leaves_the_other_its_mask() -> None:
    """ALBERT's layers share an attention, of which each site has its own calls."""
    model, ours = Siamese(build("albert").base_model).train(), ADDrop(p=0.4, q=1.0, cross_tuning="off", **OBJECTIVE)
    pair, ran = torch.randint(4, WORDS, (2, 3, 7), generator=torch.Generator().manual_seed(3)), set()
    with ours.attach(model):
        model(*pair)
        expected = {site.name: [keep_of(call) for call in site.calls.made] for site in ours.attached_sites}
    with Combination([ours, build_method("layer_drop", p=0.5)]).attach(model):
        for seed in range(10):
            torch.manual_seed(seed)
            model(*pair)
            for site in ours.attached_sites:
                ran.add(tuple(call.index for call in site.calls.made))
                for call in site.calls.made:
                    assert keep_of(call).equal(expected[site.name][call.index]), (site.name, call.index)
    assert ran == {(), (0,), (1,), (0, 1)}


@pytest.mark.parametrize("attribution", ["gradient", "integrated"])
@pytest.mark.parametrize("kind", ["StaticCache", "DynamicCache"])
def test_a_cache_of_the_users_grows_by_one_forward(kind: str, attribution: str) -> None:
    model = build("llama")
    ids, _ = texts()

    def run() -> tuple[Tensor, int]:
        options = {"max_cache_len": 12} if kind == "StaticCache" else {}
        cache = getattr(transformers, kind)(config=model.config, **options)
        with torch.no_grad():
            model(input_ids=ids[:1, :3], past_key_values=cache, use_cache=True)
        loss = model(input_ids=ids[:1, 3:], labels=ids[:1, 3:], past_key_values=cache, use_cache=True).loss
        loss.backward()
        return loss.detach(), int(cache.get_seq_length())

    plain = run()
    options = {"attribution": attribution, "integrated_steps": 2}
    with ADDrop(p=1.0, q=1e-30, sites="*", cross_tuning="off", **options).attach(model) as regularizer:
        found = run()
        assert all(site.keep is not None for site in find_sites(model, "*"))
        assert regularizer.statistics.take()["forwards"] == 1
    torch.testing.assert_close(found[0], plain[0])
    assert found[1] == plain[1] == 7
