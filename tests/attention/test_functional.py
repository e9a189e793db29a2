"""regularized_attention against softmax written out in loops: outputs, gradients, rows without a key, and sinks."""

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin.attention.attribution import gradient_attribution
from attn_reg_plugin.attention.calls import recording
from attn_reg_plugin.attention.functional import Inputs, attention_weights, regularized_attention
from attn_reg_plugin.attention.masks import PackedMask
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.ad_drop.integrated import integrated_attribution
from tests.attention.literal import causal, loop_attention, loop_weights, padding
from tests.attention.tiny_model import asked_site

B, H, T, S, D = 3, 2, 4, 5, 4
SHAPE = (B, H, T, S)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
VALID = {
    "none": None,
    "padding": padding([5, 3, 0], S),
    "causal": causal(S)[:T],
    "both": padding([5, 3, 0], S) & causal(S)[:T],
    "per key": torch.arange(S) % 3 != 1,
    "per query": (torch.arange(T) % 3 != 1)[:, None],
    "per example": torch.tensor([True, False, True])[:, None, None, None],
    "per head": (torch.arange(S) % 2 == torch.arange(H)[:, None])[:, None, :],
    "full": torch.rand(SHAPE, generator=torch.Generator().manual_seed(4)) < 0.6,
    "all false": torch.zeros(SHAPE, dtype=torch.bool),
    "scalar": torch.tensor(True),
}


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, H, S, D), (B, H, S, D)
    return [(2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


def keep_mask(seed=0, rate=0.5):
    """Random, with row 1 of head 0 and everything of example 1, head 1 dropped."""
    keep = torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) < rate
    keep[:, 0, 1] = False
    keep[1, 1] = False
    return keep


KEEP = {
    "nothing is asked": None,
    "all is kept": torch.ones(SHAPE, dtype=torch.bool),
    "some is": keep_mask(),
    "shared by heads": keep_mask()[:, :1],
    "nothing is kept": torch.zeros(SHAPE, dtype=torch.bool),
}


def assert_close(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kept", [*KEEP, "uniform"])
@pytest.mark.parametrize("mask", VALID)
def test_output_and_gradients_are_the_literal_ones(mask, kept, dtype):
    valid, keep = VALID[mask], KEEP.get(kept, KEEP["nothing is kept"])
    site = asked_site(uniform=lambda call: True) if kept == "uniform" else asked_site(keep=keep)
    ours = inputs(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    output = regularized_attention(*ours, valid=valid, site=site)
    expected = loop_attention(*exact, valid=valid, keep=keep)
    assert output.dtype == dtype and output.shape == (B, H, T, D)
    assert_close(output, expected, dtype)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    gradients = torch.autograd.grad((output * weight.to(dtype)).sum(), ours, allow_unused=True)
    literal = torch.autograd.grad((expected * weight).sum(), exact, allow_unused=True, materialize_grads=True)
    assert (gradients[0] is None) == (gradients[1] is None) == (kept == "uniform"), "it needs neither"
    for found, wanted in zip(gradients, literal, strict=True):
        assert found is None or found.isfinite().all()
        assert_close(torch.zeros_like(wanted) if found is None else found, wanted, dtype)


@pytest.mark.parametrize("sink", [None, (1, H, 1, 1), (B, H, T, 1)])
@pytest.mark.parametrize("biased", [None, "fixed", (B, H, T, S), (1, H, T, S), (B, 1, 1, S), (T, S)])
@pytest.mark.parametrize("mask", ["none", "both", "full"])
@pytest.mark.parametrize("kept", KEEP)
def test_bias_scale_sink_and_weights(biased, sink, mask, kept):
    query, key, value = inputs()
    generator = torch.Generator().manual_seed(3)
    shape = (1, H, T, S) if biased == "fixed" else biased
    bias = None if biased is None else torch.randn(shape, generator=generator, dtype=torch.float64)
    sink = None if sink is None else torch.randn(sink, generator=generator, dtype=torch.float64)
    options = {"valid": VALID[mask], "bias": bias, "scale": 0.3, "sink": sink}
    learned = [query, key, value, *([] if sink is None else [sink.requires_grad_()])]
    learned += [] if biased in (None, "fixed") else [bias.requires_grad_()]
    output = regularized_attention(query, key, value, site=asked_site(keep=KEEP[kept]), **options)
    expected = loop_attention(query, key, value, keep=KEEP[kept], **options)
    torch.testing.assert_close(output, expected)
    keep = None if KEEP[kept] is None else PackedMask.of(KEEP[kept], VALID[mask])
    weights = attention_weights(Inputs(query, key, key, **options), keep)
    torch.testing.assert_close(weights, loop_weights(query, key, keep=KEEP[kept], **options), rtol=1e-6, atol=1e-6)
    found, wanted = (
        torch.autograd.grad(result.square().sum(), learned, allow_unused=True, materialize_grads=True)
        if result.requires_grad
        else [torch.zeros_like(each) for each in learned]
        for result in (output, expected)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_never_nan_at_the_edge_of_the_dtype(dtype):
    large = torch.finfo(dtype).max ** 0.5 / 32
    for scale in (large, 1e-4):
        query, key, value = [(tensor.detach() * scale).requires_grad_() for tensor in inputs(dtype)]
        output = regularized_attention(query, key, value, valid=VALID["both"], site=asked_site(keep=keep_mask()))
        assert output.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), (query, key, value)))


@pytest.mark.parametrize("dropped", [False, True])
def test_padded_keys_and_values_never_matter(dropped):
    valid = padding([5, 3, 2], S) & causal(S)[:T]
    exists = valid.any(-2).squeeze(1)  # (B, S): some query sees the key
    keep = keep_mask() if dropped else None
    results = []
    for junk in (None, 1e4, -7.0):
        query, key, value = inputs(torch.float32)
        if junk is not None:
            padded = ~exists[:, None, :, None]
            key, value = (t.detach().masked_fill(padded, junk).requires_grad_() for t in (key, value))
        output = regularized_attention(query, key, value, valid=valid, site=asked_site(keep=keep))
        results.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value))))
        assert all(gradient.transpose(1, 2)[~exists].eq(0).all() for gradient in results[-1][2:])
    for other in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], other, strict=True))


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


@pytest.mark.parametrize("which", ["none", "nothing is asked", "in evaluation mode"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_inactive_site_is_plain_attention_bit_for_bit(which, dtype):
    made = None if which == "none" else asked_site()
    if which == "in evaluation mode":
        made = asked_site(keep=keep_mask())
        made.module = torch.nn.Module().eval()
    query, key, value = inputs(dtype)
    for valid, dropout_p in ((padding([5, 3, 2], S), 0.0), (padding([5, 3, 2], S), 0.3), (None, 0.0)):
        torch.manual_seed(2)
        plain = F.scaled_dot_product_attention(query, key, value, valid, dropout_p)
        torch.manual_seed(2)
        ours = regularized_attention(query, key, value, valid=valid, site=made, dropout_p=dropout_p)
        assert ours.equal(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attribution_beside_a_sink_is_of_real_keys(dtype):
    """B = ∂F/∂A over the S keys, A ⊙ ∫ ∂F/∂A for integrated gradients."""
    query, key, value = (tensor.detach() / 2 for tensor in inputs(dtype))
    valid, sink = padding([5, 3, 2], S), torch.randn(1, H, 1, 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = loop_weights(query, key, valid=valid, sink=sink).detach().requires_grad_()
    (expected,) = torch.autograd.grad((weights @ value).float().pow(3).sum(), weights)
    near = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.1}
    site = AttentionSite("encoder", "self", 0)

    def run():
        return regularized_attention(query, key, value, valid=valid, sink=sink, site=site).float().pow(3).sum()

    with recording([site]):
        (found,) = gradient_attribution(run(), [site])
    assert found.shape == SHAPE
    torch.testing.assert_close(found, expected.float(), **near)
    with recording([site], needs_weights=True):
        (integrated,) = integrated_attribution(run, [site], steps=2)
    # F is cubic in the map: ∂F/∂A(αA) = α² ∂F/∂A, of which two steps take α = ½ and 1
    torch.testing.assert_close(integrated, (weights * expected * 0.625).float().detach(), **near)
