"""Attention with a sink (one more key, of a learned score and without a value), against the softmax written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import gradient_attribution, integrated_attribution
from attn_reg_plugin.attention.calls import recording
from attn_reg_plugin.attention.functional import attention_weights, regularized_attention
from attn_reg_plugin.attention.sites import AttentionSite
from tests.attention.tiny_model import asked_site

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (2, 3, 4, 5)  # B, H, T, S


def written_out(scores: Tensor, sink: Tensor, live: Tensor) -> Tensor:
    """A over the keys, (B, H, T, S): the sink takes its share and is left out."""
    column = sink.expand(*scores.shape[:-1], 1)
    joined = torch.cat([scores.masked_fill(~live, float("-inf")), column], -1)
    return joined.softmax(-1)[..., :-1]


@pytest.fixture
def case() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    b, h, t, s = SHAPE
    tensors = {name: torch.randn(b, h, n, 6, generator=generator) for name, n in (("q", t), ("k", s), ("v", s))}
    valid = torch.arange(s) < torch.tensor([5, 3]).view(b, 1, 1, 1)
    keep = torch.rand(SHAPE, generator=generator) > 0.3
    keep[0, 1, 2] = False  # a row that lost everything
    keep[0, 0, :, 0] = True
    sink = torch.randn(1, h, 1, 1, generator=generator)
    bias = torch.randn(SHAPE, generator=generator)
    return {**tensors, "valid": valid, "keep": keep, "sink": sink, "bias": bias}


@pytest.mark.parametrize("each_query", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_masked_attention(case: dict[str, Tensor], biased: bool, each_query: bool) -> None:
    """Output and gradients, the sink's too; a row that lost all its keys is the mean of the valid values."""
    query, value, bias = case["q"].requires_grad_(), case["v"], case["bias"] if biased else None
    sink = (case["sink"] * torch.ones(2, 3, 4, 1) if each_query else case["sink"]).clone().requires_grad_()
    site = asked_site(keep=case["keep"])
    options = {"valid": case["valid"], "bias": bias, "sink": sink}
    output = regularized_attention(query, case["k"], value, site=site, **options)
    scores = query @ case["k"].transpose(-1, -2) * 6**-0.5 + (0.0 if bias is None else bias)
    live = case["keep"] & case["valid"]
    uniform = (case["valid"] / case["valid"].sum(-1, keepdim=True)).expand(SHAPE)
    weights = torch.where(live.any(-1, keepdim=True), written_out(scores, sink, live), uniform)
    torch.testing.assert_close(output, weights @ value)
    torch.testing.assert_close(attention_weights(query, case["k"], keep=case["keep"], **options), weights)
    found, expected = (torch.autograd.grad(x.square().sum(), (query, sink)) for x in (output, weights @ value))
    torch.testing.assert_close(found, expected)
    assert found[1].abs().sum() > 0


def test_without_a_mask_and_without_valid_keys(case: dict[str, Tensor]) -> None:
    """A row that never had a key stays zero, whatever the sink."""
    q, k, v, sink = case["q"], case["k"], case["v"], case["sink"]
    everything = torch.ones(SHAPE, dtype=torch.bool)
    expected = written_out(q @ k.transpose(-1, -2) * 6**-0.5, sink, everything) @ v
    torch.testing.assert_close(regularized_attention(q, k, v, sink=sink), expected)
    nothing = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    site = asked_site(keep=case["keep"])
    for used in (None, site):
        assert (regularized_attention(q, k, v, valid=nothing, sink=sink, site=used) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attribution_is_of_real_keys(case: dict[str, Tensor], dtype: torch.dtype) -> None:
    """B = ∂F/∂A over the S keys, A ⊙ ∫ ∂F/∂A for integrated gradients."""
    q, k, v, sink = (case[name].to(dtype) for name in ("q", "k", "v", "sink"))
    site = AttentionSite("encoder", "self", 0)
    weights = written_out(q @ k.transpose(-1, -2) * 6**-0.5, sink, case["valid"]).requires_grad_()
    objective = (weights @ v).float().pow(3).sum()
    (expected,) = torch.autograd.grad(objective, weights)
    near = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.1}

    def run() -> Tensor:
        return regularized_attention(q, k, v, valid=case["valid"], sink=sink, site=site).float().pow(3).sum()

    with recording([site]):
        (found,) = gradient_attribution(run(), [site])
    assert found.shape == SHAPE
    torch.testing.assert_close(found, expected.float(), **near)
    with recording([site], needs_weights=True):
        ((_, integrated),) = integrated_attribution(run, [site], steps=2, nodes="gauss-legendre")
    # F is cubic in the map: ∫ 3α² dα = 1, which two nodes give exactly
    torch.testing.assert_close(integrated, (weights * expected / 3).float().detach(), **near)
