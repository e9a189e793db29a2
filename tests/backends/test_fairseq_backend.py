"""The fairseq backend: which sites it finds, what attaching leaves alone, and the attributions of a Transformer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from attn_reg_plugin import ADDrop, find_sites
from attn_reg_plugin.attention.attribution import Attributed
from attn_reg_plugin.attention.masks import PackedMask
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.backends.fairseq import FairseqBackend, padding_index
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.ad_drop import ad_drop
from attn_reg_plugin.regularizers.base.forward import Forward
from tests.backends.fairseq_models import HEADS, LAYERS, batch, transformer
from tests.backends.materialized import Materialized

SITES = [f"encoder.self[{i}]" for i in range(LAYERS)] + [
    f"decoder.{kind}[{i}]" for i in range(LAYERS) for kind in ("self", "cross")
]
PAD = 1


def pseudo_objective(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Σ log P(ŷ) over the real tokens, written out."""
    probabilities = torch.log_softmax(logits.float(), -1)
    best = probabilities.max(-1).values
    return (best * inputs["prev_output_tokens"].ne(PAD)).sum()


def test_every_attention_is_a_site_in_the_order_of_the_model() -> None:
    model = transformer()
    sites = find_sites(model, "*")
    assert [site.name for site in sites] == SITES
    assert sites[0].path == "encoder.layers.0.self_attn"
    assert sites[3].path == "decoder.layers.0.encoder_attn"
    assert all(model.get_submodule(site.path) is site.module for site in sites)


def test_an_attention_with_a_forward_of_its_own_is_no_site() -> None:
    class Own(MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = transformer()
    model.encoder.layers[0].self_attn.__class__ = Own
    assert "encoder.self[0]" not in [site.name for site in find_sites(model, "*")]


def test_what_a_forward_tells() -> None:
    """Its real tokens, and what a decoder's padding is called; an encoder's classes have none."""
    model, inputs = transformer(), batch()
    for args, kwargs in ((tuple(inputs.values()), {}), ((), inputs)):
        told = FairseqBackend().describe(model, args, kwargs)
        assert torch.equal(told["token_mask"], inputs["prev_output_tokens"].ne(PAD)) and told["padding_label"] == PAD
    del inputs["prev_output_tokens"]
    assert "padding_label" not in FairseqBackend().describe(model, (), inputs)
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
            assert sum("forward" in vars(module) for module in model.modules()) == len(SITES)
            assert torch.equal(model(**inputs)[0], expected)
            assert list(model.state_dict()) == list(state)
            assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert torch.equal(model(**inputs)[0], expected)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before


def test_a_refused_site_leaves_the_others_as_they_were() -> None:
    model = transformer()
    model.decoder.layers[1].self_attn.add_zero_attn = True
    with pytest.raises(ValueError, match=r"decoder\.self\[1\].*add_zero_attn"):
        ADDrop(sites="*").attach(model)
    assert not any("forward" in vars(module) for module in model.modules())


def direct_attributions(model: nn.Module, inputs: dict[str, Tensor], seed: int) -> list[Tensor]:
    """∂F/∂A of every attention by autograd through materialized maps; F with the model's own best words."""
    with Materialized() as written_out:
        torch.manual_seed(seed)
        objective = pseudo_objective(model(**inputs)[0], inputs)
    gradients = torch.autograd.grad(objective, written_out.maps)
    return [gradient.view(-1, HEADS, *gradient.shape[-2:]) for gradient in gradients]


@contextmanager
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The attributions that AD-DROP draws its masks from, in the order of the sites."""
    seen: list[Tensor] = []
    draw: Callable[..., Tensor] = ad_drop.sample_keep
    masks, before = ADDrop._masks, ADDrop.before_forward
    stacked: list[Tensor] = []
    of_sites: dict[AttentionSite, Tensor] = {}

    def listen(attribution: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stacked.append(attribution)
        return draw(attribution, *args, **kwargs)

    def split(method: ADDrop, calls: list[Attributed], *args: Any) -> list[PackedMask]:
        made = masks(method, calls, *args)
        of_sites.update(zip([site for site, *_ in calls], stacked.pop().chunk(len(calls)), strict=True))
        return made

    def in_order(method: ADDrop, forward: Forward) -> None:
        before(method, forward)
        seen.extend(of_sites[site] for site in method.attached_sites)

    with monkeypatch.context() as patch:
        patch.setattr(ad_drop, "sample_keep", listen)
        patch.setattr(ADDrop, "_masks", split)
        patch.setattr(ADDrop, "before_forward", in_order)
        yield seen


def assert_close_to_the_largest(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    """The largest error in units of the largest value."""
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_attribution_is_the_gradient_of_the_attention_map(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three kinds of site, with padding; attention dropout draws the same numbers on both sides."""
    model, inputs = transformer(dropout=0.1, attention_dropout=dropout), batch()
    expected = direct_attributions(model, inputs, seed=7)
    with ADDrop(p=0.3, q=0.3, sites="*", cross_tuning="off").attach(model), captured(monkeypatch) as ours:
        torch.manual_seed(7)
        model(**inputs)
    assert len(ours) == len(expected) == len(SITES)
    for attribution, gradient, name in zip(ours, expected, SITES, strict=True):
        assert gradient.abs().max() > 1e-4, name
        assert_close_to_the_largest(attribution, gradient, 1e-5)


def test_the_probe_without_dropout_sees_the_model_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch()
    model = transformer(dropout=0.3, attention_dropout=0.3)
    expected = direct_attributions(transformer(), inputs, seed=0)
    with (
        ADDrop(sites="*", cross_tuning="off", probe_dropout=False).attach(model),
        captured(monkeypatch) as ours,
    ):
        model(**inputs)
    for attribution, gradient in zip(ours, expected, strict=True):
        assert_close_to_the_largest(attribution, gradient, 1e-5)
    assert model.encoder.dropout_module.p == 0.3 and model.encoder.dropout_module.training


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
