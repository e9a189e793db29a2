"""regularized_attention against softmax written out in loops: outputs, gradients, rows without a key, and sinks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_reg_plugin.attention.attribution import gradient_attribution
from attn_reg_plugin.attention.calls import recording
from attn_reg_plugin.attention.functional import attention_weights, regularized_attention, uniform_attention
from attn_reg_plugin.attention.masks import candidate_region, drop_candidates
from attn_reg_plugin.attention.requests import Recording
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.ad_drop.integrated import integrated_attribution
from tests.attention.literal import causal, loop_attention, loop_weights, padding
from tests.attention.tiny_model import asked_site

pytestmark = pytest.mark.usefixtures("one_thread")

B, H, T, S, D = 3, 2, 4, 5, 4
SHAPE = (B, H, T, S)
LENGTHS = [5, 3, 0]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
VALID = {
    "none": None,
    "padding": padding(LENGTHS, S),
    "causal": causal(S)[:T],
    "both": padding(LENGTHS, S) & causal(S)[:T],
    "per key": torch.arange(S) % 3 != 1,
    "per query": (torch.arange(T) % 3 != 1)[:, None],
    "per example": torch.tensor([True, False, True])[:, None, None, None],
    "per head": (torch.arange(S) % 2 == torch.arange(H)[:, None])[:, None, :],
    "full": torch.rand(SHAPE, generator=torch.Generator().manual_seed(4)) < 0.6,
    "all false": torch.zeros(SHAPE, dtype=torch.bool),
    "scalar": torch.tensor(True),
}


def inputs(dtype=torch.float64, seed=0, keys=S):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, H, keys, D), (B, H, keys, D)
    return [(2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


def keep_mask(seed=0, rate=0.5):
    """Random, with row 1 of head 0 and everything of example 1, head 1 dropped."""
    keep = torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) < rate
    keep[:, 0, 1] = False
    keep[1, 1] = False
    return keep


def assert_close(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("mask", VALID)
def test_output_and_gradients_are_the_literal_ones(mask, dropped, dtype):
    valid, keep = VALID[mask], keep_mask() if dropped else None
    ours = inputs(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    output = regularized_attention(*ours, valid=valid, site=asked_site(keep=keep))
    expected = loop_attention(*exact, valid=valid, keep=keep)
    assert output.dtype == dtype
    assert output.shape == (B, H, T, D)
    assert_close(output, expected, dtype)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    gradients = torch.autograd.grad((output * weight.to(dtype)).sum(), ours)
    literal = torch.autograd.grad((expected * weight).sum(), exact, allow_unused=True, materialize_grads=True)
    for ours_, literal_ in zip(gradients, literal, strict=True):
        assert ours_.isfinite().all()
        assert_close(ours_, literal_, dtype)


def test_scores_dropout_is_minus_infinity_before_the_softmax():
    query, key, value = inputs()
    keep, valid = keep_mask(1, 0.6), padding([5, 3, 2], S)
    keep[..., 0] = True  # no row is empty, so that -inf alone says everything
    scores = query @ key.mT / D**0.5
    expected = scores.masked_fill(~(keep & valid), float("-inf")).softmax(-1) @ value
    actual = regularized_attention(query, key, value, valid=valid, site=asked_site(keep=keep))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dead_rows_are_the_mean_of_the_valid_values(dtype):
    query, key, value = inputs(dtype)
    valid = padding([5, 3, 0], S)
    nothing = torch.zeros(SHAPE, dtype=torch.bool)
    output = regularized_attention(query, key, value, valid=valid, site=asked_site(keep=nothing))
    for b, n in enumerate([5, 3]):
        mean = value[b, :, :n].double().mean(1, keepdim=True).expand(H, T, D)
        assert_close(output[b], mean, dtype)
    assert output[2].eq(0).all()
    gradient_q, gradient_k, gradient_v = torch.autograd.grad(output.sum(), (query, key, value))
    assert gradient_q.eq(0).all()
    assert gradient_k.eq(0).all()
    assert_close(gradient_v[0], torch.full((H, S, D), T / 5, dtype=torch.float64), dtype)
    assert gradient_v[2].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_never_nan_at_the_edge_of_the_dtype(dtype):
    large = torch.finfo(dtype).max ** 0.5 / 32
    for scale in (large, 1e-4):
        query, key, value = [(tensor.detach() * scale).requires_grad_() for tensor in inputs(dtype)]
        output = regularized_attention(query, key, value, valid=VALID["both"], site=asked_site(keep=keep_mask()))
        assert output.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), (query, key, value)))


def test_query_of_a_dead_row_gets_no_gradient():
    query, key, value = inputs()
    keep = keep_mask()
    output = regularized_attention(query, key, value, site=asked_site(keep=keep), valid=VALID["padding"])
    (gradient,) = torch.autograd.grad(output.square().sum(), query)
    live = (keep & VALID["padding"]).any(-1)
    assert gradient[~live].eq(0).all()
    several = (keep & VALID["padding"]).sum(-1) > 1
    assert gradient[several].ne(0).any(-1).all()


@pytest.mark.parametrize("dropped", [False, True])
def test_padded_keys_and_values_never_matter(dropped):
    valid = padding([5, 3, 2], S) & causal(S)[:T]
    exists = valid.any(-2).squeeze(1)  # (B, S): some query sees the key
    keep = keep_mask() if dropped else None
    results = []
    for junk in (None, 1e4, -7.0):
        query, key, value = inputs(torch.float32)
        if junk is not None:
            key, value = (
                t.detach().masked_fill(~exists[:, None, :, None], junk).requires_grad_() for t in (key, value)
            )
        output = regularized_attention(query, key, value, valid=valid, site=asked_site(keep=keep))
        gradients = torch.autograd.grad(output.square().sum(), (query, key, value))
        results.append((output, *gradients))
        for gradient in gradients[1:]:
            assert gradient.transpose(1, 2)[~exists].eq(0).all()
    for other in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("biased", [(B, H, T, S), (1, H, T, S), (B, 1, 1, S), (T, S)])
@pytest.mark.parametrize("mask", ["none", "both", "full"])
@pytest.mark.parametrize("dropped", [False, True])
def test_bias_and_scale(biased, mask, dropped):
    query, key, value = inputs()
    bias = torch.randn(biased, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    options = {"valid": VALID[mask], "bias": bias, "scale": 0.3}
    keep = keep_mask() if dropped else None
    output = regularized_attention(query, key, value, site=asked_site(keep=keep), **options)
    expected = loop_attention(query, key, value, keep=keep, **options)
    torch.testing.assert_close(output, expected)
    everything = (query, key, value, bias)
    for ours, literal in zip(
        torch.autograd.grad(output.square().sum(), everything),
        torch.autograd.grad(expected.square().sum(), everything),
        strict=True,
    ):
        torch.testing.assert_close(ours, literal)


@pytest.mark.parametrize("mask", ["none", "padding", "full"])
@pytest.mark.parametrize("dropped", [False, True])
def test_attention_dropout_draws_like_dropout_of_the_softmax(mask, dropped):
    query, key, value = inputs(torch.float32)
    keep = keep_mask() if dropped else None
    weights = loop_weights(query, key, valid=VALID[mask], keep=keep)
    torch.manual_seed(1)
    expected = F.dropout(weights, 0.4) @ value
    torch.manual_seed(1)
    actual = regularized_attention(query, key, value, valid=VALID[mask], site=asked_site(keep=keep), dropout_p=0.4)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(actual, weights @ value)


@pytest.mark.parametrize("mask", VALID)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_weights(mask, dropped, biased):
    query, key, _ = inputs()
    bias = torch.randn(1, H, T, S, dtype=torch.float64) if biased else None
    options = {"valid": VALID[mask], "keep": keep_mask() if dropped else None, "scale": 0.4, "bias": bias}
    weights = attention_weights(query, key, **options)
    torch.testing.assert_close(weights, loop_weights(query, key, **options), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mask", VALID)
def test_uniform_site(mask, dtype):
    query, key, value = inputs(dtype)
    output = regularized_attention(query, key, value, valid=VALID[mask], site=asked_site(uniform=lambda call: True))
    expected = loop_attention(
        query.double(), key.double(), value.double(), valid=VALID[mask], keep=torch.zeros(SHAPE, dtype=torch.bool)
    )
    assert output.shape == (B, H, T, D)
    assert_close(output, expected, dtype)
    assert output.isfinite().all()
    gradient_q, gradient_v = torch.autograd.grad(output.sum(), (query, value), allow_unused=True)
    assert gradient_q is None
    assert gradient_v.isfinite().all()


def test_uniform_attention_needs_no_query():
    value = torch.randn(2, 3, 4, 5)
    assert uniform_attention(value, None, 7).shape == (2, 3, 7, 5)
    torch.testing.assert_close(uniform_attention(value, None, 1)[:, :, 0], value.mean(2))


@pytest.mark.parametrize("which", ["none", "nothing is asked", "in evaluation mode"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_inactive_site_is_plain_attention_bit_for_bit(which, dtype):
    made = None if which == "none" else asked_site()
    if which == "in evaluation mode":
        made = asked_site(keep=keep_mask())
        made.module = torch.nn.Module().eval()
    query, key, value = inputs(dtype)
    valid = padding([5, 3, 2], S)
    for dropout_p in (0.0, 0.3):
        torch.manual_seed(2)
        plain = F.scaled_dot_product_attention(query, key, value, valid, dropout_p)
        torch.manual_seed(2)
        ours = regularized_attention(query, key, value, valid=valid, site=made, dropout_p=dropout_p)
        assert ours.equal(plain)
    assert regularized_attention(query, key, value, site=made).equal(F.scaled_dot_product_attention(query, key, value))


def test_keep_everything_is_plain_attention():
    query, key, value = inputs(torch.float32)
    everything = torch.ones(SHAPE, dtype=torch.bool)
    for valid in (None, padding([5, 3, 2], S)):
        plain = regularized_attention(query, key, value, valid=valid)
        torch.testing.assert_close(
            regularized_attention(query, key, value, valid=valid, site=asked_site(keep=everything)), plain
        )


def test_batch_of_one_with_one_query_and_one_key():
    query, key, value = (torch.randn(1, 1, 1, D, requires_grad=True) for _ in range(3))
    one = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    for keep in (one, ~one):
        output = regularized_attention(query, key, value, valid=one, site=asked_site(keep=keep))
        torch.testing.assert_close(output, value)
    assert regularized_attention(query, key, value, valid=~one, site=asked_site(keep=one)).eq(0).all()


def test_keep_outside_valid_changes_nothing():
    query, key, value = inputs()
    keep, valid = keep_mask(), VALID["both"]
    inside = regularized_attention(query, key, value, valid=valid, site=asked_site(keep=keep & valid))
    assert regularized_attention(query, key, value, valid=valid, site=asked_site(keep=keep)).equal(inside)


@pytest.mark.parametrize("learned", [False, True])
def test_a_mask_for_all_heads_beside_a_bias_for_each(learned):
    """Whether the bias gets a gradient or not; and where a row loses everything the bias is gone as well."""
    query, key, value = (tensor.detach() for tensor in inputs())
    bias = torch.randn(1, H, T, S, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    shared = torch.rand((B, 1, T, S), generator=torch.Generator().manual_seed(5)) < 0.6
    shared[:, :, 1] = False
    valid = padding([5, 3, 4], S)
    found = regularized_attention(
        query, key, value, valid=valid, site=asked_site(keep=shared), bias=bias.clone().requires_grad_(learned)
    )
    each = shared.expand(SHAPE)
    expected = regularized_attention(query, key, value, valid=valid, site=asked_site(keep=each), bias=bias)
    assert_close(found, expected, torch.float64)
    assert_close(found[:, :, 1], uniform_attention(value, valid, T)[:, :, 1], torch.float64)


def test_a_bfloat16_probe_with_a_bias():
    query, key, value = inputs(torch.bfloat16)
    bias = torch.randn(1, H, T, S, generator=torch.Generator().manual_seed(3)).bfloat16()
    plain = regularized_attention(query, key, value, bias=bias)
    probed = regularized_attention(query, key, value, bias=bias, site=asked_site(recording=Recording()))
    assert_close(probed, plain, torch.bfloat16)


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_of_numbers_is_refused_by_name(active, dtype):
    states, site = torch.randn(1, 1, 3, 2), asked_site(**({"uniform": lambda call: True} if active else {}))
    valid = torch.ones(1, 1, 1, 3, dtype=dtype)
    with pytest.raises(
        TypeError, match=rf"^valid is a tensor of {dtype}, but must be a tensor of torch.bool, True = attend$"
    ):
        regularized_attention(states, states, states, valid=valid, site=site)
    for call in (lambda: candidate_region(states, valid, 0.5), lambda: drop_candidates(states > 0, valid, 0.5)):
        with pytest.raises(TypeError, match=r"^valid is a tensor of"):
            call()
    with pytest.raises(TypeError, match=r"^valid is a list, but must be a tensor of torch.bool"):
        regularized_attention(states, states, states, valid=[[True] * 3], site=site)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_bias_that_is_a_mask_is_refused(dtype):
    """Idle it would be one, active its 0 and 1 would be added to the scores."""
    states, bias = torch.randn(1, 1, 3, 2), torch.ones(3, 3, dtype=dtype)
    for site in (None, asked_site(keep=torch.ones(1, 1, 3, 3, dtype=torch.bool))):
        with pytest.raises(TypeError, match=rf"^bias is a tensor of {dtype}, but must be floating-point.* as valid"):
            regularized_attention(states, states, states, site=site, bias=bias)


WITH_SINK = (2, 3, 4, 5)  # B, H, T, S


def written_out(scores: Tensor, sink: Tensor, live: Tensor) -> Tensor:
    """A over the keys, (B, H, T, S): the sink takes its share and is left out."""
    column = sink.expand(*scores.shape[:-1], 1)
    joined = torch.cat([scores.masked_fill(~live, float("-inf")), column], -1)
    return joined.softmax(-1)[..., :-1]


@pytest.fixture
def case() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    b, h, t, s = WITH_SINK
    tensors = {name: torch.randn(b, h, n, 6, generator=generator) for name, n in (("q", t), ("k", s), ("v", s))}
    valid = torch.arange(s) < torch.tensor([5, 3]).view(b, 1, 1, 1)
    keep = torch.rand(WITH_SINK, generator=generator) > 0.3
    keep[0, 1, 2] = False  # a row that lost everything
    keep[0, 0, :, 0] = True
    sink = torch.randn(1, h, 1, 1, generator=generator)
    bias = torch.randn(WITH_SINK, generator=generator)
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
    uniform = (case["valid"] / case["valid"].sum(-1, keepdim=True)).expand(WITH_SINK)
    weights = torch.where(live.any(-1, keepdim=True), written_out(scores, sink, live), uniform)
    torch.testing.assert_close(output, weights @ value)
    torch.testing.assert_close(attention_weights(query, case["k"], keep=case["keep"], **options), weights)
    found, expected = (torch.autograd.grad(x.square().sum(), (query, sink)) for x in (output, weights @ value))
    torch.testing.assert_close(found, expected)
    assert found[1].abs().sum() > 0


def test_without_a_mask_and_without_valid_keys(case: dict[str, Tensor]) -> None:
    """A row that never had a key stays zero, whatever the sink."""
    q, k, v, sink = case["q"], case["k"], case["v"], case["sink"]
    everything = torch.ones(WITH_SINK, dtype=torch.bool)
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
    assert found.shape == WITH_SINK
    torch.testing.assert_close(found, expected.float(), **near)
    with recording([site], needs_weights=True):
        ((_, integrated),) = integrated_attribution(run, [site], steps=2, nodes="gauss-legendre")
    # F is cubic in the map: ∫ 3α² dα = 1, which two nodes give exactly
    torch.testing.assert_close(integrated, (weights * expected / 3).float().detach(), **near)
