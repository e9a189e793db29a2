"""The fairseq backend: which sites it finds, what attaching leaves alone, and the attributions of a Transformer."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.modules import MultiheadAttention
from torch import nn

from attn_reg_plugin import ADDrop, find_sites
from attn_reg_plugin.backends.fairseq import FairseqBackend, padding_index
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.ad_drop import ad_drop
from attn_reg_plugin.regularizers.base.hooks.forward import Forward, described
from tests.attention.tiny_model import EVERY
from tests.backends.fairseq_models import HEADS, batch, transformer
from tests.backends.materialized import Materialized

PAD = 1


def test_every_attention_is_a_site_in_the_order_of_the_model() -> None:
    model = transformer()
    sites = find_sites(model, "*")
    assert [site.name for site in sites] == EVERY
    assert sites[0].path == "encoder.layers.0.self_attn"
    assert sites[3].path == "decoder.layers.0.encoder_attn"
    assert all(model.get_submodule(site.path) is site.module for site in sites)

    class Own(MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    renamed = type("Renamed", (MultiheadAttention,), {})
    model.encoder.layers[0].self_attn.__class__, model.encoder.layers[1].self_attn.__class__ = Own, renamed
    assert [site.name for site in find_sites(model, "*")] == EVERY[1:], "not with a forward of its own"


def test_what_a_forward_tells() -> None:
    """A forward tells its real tokens and what a decoder's padding is called; an encoder's classes have none."""
    model, inputs = transformer(), batch()
    for args, kwargs in ((tuple(inputs.values()), {}), ((), inputs)):
        told = described([FairseqBackend()], Forward(model, args, kwargs))
        assert torch.equal(told["token_mask"], inputs["prev_output_tokens"].ne(PAD)) and told["padding_label"] == PAD
    del inputs["prev_output_tokens"]
    assert "padding_label" not in FairseqBackend().describe(model, inputs)
    assert padding_index(nn.Linear(2, 2)) is None
    unnamed = nn.Module()
    unnamed.decoder = nn.Module()
    unnamed.decoder.dictionary = Dictionary()
    assert padding_index(unnamed) == Dictionary().pad(), "every decoder of fairseq's has a dictionary"


@pytest.mark.parametrize("trained_before", [False, True])
def test_attaching_leaves_evaluation_and_state_alone_and_detaching_the_modules(trained_before: bool) -> None:
    """Also in a model that never trained, whose encoder fairseq sends down a fused path."""
    model, inputs = transformer(dropout=0.1), batch()
    if trained_before:
        model(**inputs)
    model.eval()
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    with torch.no_grad():
        expected, state = model(**inputs)[0], copy.deepcopy(model.state_dict())
        with ADDrop(sites="*", cross_tuning="off").attach(model):
            assert sum("forward" in vars(module) for module in model.modules()) == len(EVERY)
            assert torch.equal(model(**inputs)[0], expected)
            assert list(model.state_dict()) == list(state)
            assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert torch.equal(model(**inputs)[0], expected)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("odd", ["add_zero_attn", "use_xformers", "bias_k"])
def test_a_refused_site_leaves_the_others_as_they_were(odd: str) -> None:
    model = transformer()
    setattr(model.decoder.layers[1].self_attn, odd, nn.Parameter(torch.zeros(1, 1, 16)) if odd == "bias_k" else True)
    said = rf"decoder\.self\[1\].* {odd.removeprefix('use_')}, which cannot be regularized"
    with pytest.raises(ValueError, match=said):
        ADDrop(sites="*").attach(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_attribution_is_the_gradient_of_the_attention_map(dropout: float) -> None:
    """All three kinds of site, with padding; attention dropout draws the same numbers on both sides.

    F is Σ log P(ŷ) over the real tokens, written out, and its gradient autograd's, through materialized maps.
    """
    model, inputs = transformer(dropout=0.1, attention_dropout=dropout), batch()
    with Materialized() as written_out:
        torch.manual_seed(7)
        best = torch.log_softmax(model(**inputs)[0].float(), -1).max(-1).values
    objective = (best * inputs["prev_output_tokens"].ne(PAD)).sum()
    gradients = torch.autograd.grad(ad_drop.AGAINST_UNDERFLOW * objective, written_out.maps)
    expected = [gradient.view(-1, HEADS, *gradient.shape[-2:]) for gradient in gradients]
    draws = mock.patch.object(ad_drop, "sample_keep", wraps=ad_drop.sample_keep)
    groups = mock.patch.object(ADDrop, "_masks", autospec=True, side_effect=ADDrop._masks)
    with ADDrop(p=0.3, q=0.3, sites="*", cross_tuning="off").attach(model), draws as drawn, groups as grouped:
        torch.manual_seed(7)
        model(**inputs)
    ours = {}
    for group, call in zip(grouped.call_args_list, drawn.call_args_list, strict=True):
        names = [site.name for site, *_ in group.args[1]]
        ours |= zip(names, call.args[0].chunk(len(names)), strict=True)
    assert len(ours) == len(expected) == len(EVERY)
    for gradient, name in zip(expected, EVERY, strict=True):
        attribution = ours[name]
        assert gradient.abs().max() > 1e-4, name
        assert attribution.shape == gradient.shape
        assert (attribution - gradient).abs().max() <= 1e-5 * gradient.abs().max()


def test_a_model_that_was_trained_is_exported() -> None:
    """By TorchScript, as fairseq's Transformer supports it, once the regularizer is detached."""
    model, inputs = transformer(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with build("ad_drop", sites="*", cross_tuning="off").attach(model) as regularizer:
        for _ in range(2):
            model(**inputs)[0].log_softmax(-1)[..., 5].mean().backward()
            optimizer.step()
        assert regularizer.statistics.take()["regularized"] == 2
    scripted = torch.jit.script(model).eval()
    torch.testing.assert_close(scripted(**inputs)[0], model.eval()(**inputs)[0], atol=1e-5, rtol=0)
