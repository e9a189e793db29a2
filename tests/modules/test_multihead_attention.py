"""RegularizedMultiheadAttention beside fairseq's own: the same module until its site is active."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.modules import MultiheadAttention

from attn_reg_plugin import AttentionSite
from attn_reg_plugin.modules import RegularizedMultiheadAttention

B, H, T, S, C = 3, 4, 5, 7, 16
KINDS = ("self", "causal", "cross")


def stock_attention(kind: str, dropout: float = 0.0, **options: Any) -> MultiheadAttention:
    """fairseq's attention as its Transformer builds it."""
    cross = kind == "cross"
    torch.manual_seed(1)
    return MultiheadAttention(
        C, H, dropout=dropout, self_attention=not cross, encoder_decoder_attention=cross, **options
    ).train()


def adopted(module: MultiheadAttention) -> RegularizedMultiheadAttention:
    """A copy of `module` that holds a site."""
    module = copy.deepcopy(module)
    site = AttentionSite("encoder", "self", 0, module=module)
    RegularizedMultiheadAttention.adopt(module, site)
    return module


def arguments(kind: str, padding: bool, seed: int = 2) -> dict[str, Any]:
    """What a Transformer layer passes: (T, B, C) tensors that require gradients, and masks."""
    torch.manual_seed(seed)
    query = torch.randn(T, B, C, requires_grad=True)
    memory = torch.randn(S, B, C, requires_grad=True) if kind == "cross" else query
    given: dict[str, Any] = {"query": query, "key": memory, "value": memory}
    if padding:
        mask = torch.zeros(B, memory.size(0), dtype=torch.bool)
        mask[0, -2:] = mask[1, -1:] = True
        given["key_padding_mask"] = mask
    if kind == "causal":
        given["attn_mask"] = torch.triu(torch.full((T, T), float("-inf")), 1)
    if kind == "cross":
        given["static_kv"] = True
    return given


def gradients(module: MultiheadAttention, given: dict[str, Any], output: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a random projection of `output` with respect to the inputs and every parameter."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    wanted = [given["query"], *([given["key"]] if given["key"] is not given["query"] else []), *module.parameters()]
    return list(torch.autograd.grad((output * direction).sum(), wanted, allow_unused=True, materialize_grads=True))


@pytest.fixture(params=[(kind, padding) for kind in KINDS for padding in (False, True)], ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[str, bool]]:
    return request.param


def test_adopting_changes_neither_parameters_nor_state_dict() -> None:
    module = stock_attention("self")
    before, parameters = module.state_dict(), dict(module.named_parameters())
    RegularizedMultiheadAttention.adopt(module, AttentionSite("encoder", "self", 0, module=module))
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    assert isinstance(module, MultiheadAttention)


def test_release_restores_the_class_and_leaves_nothing_behind() -> None:
    module = stock_attention("self")
    attributes = set(vars(module))
    RegularizedMultiheadAttention.adopt(module, AttentionSite("encoder", "self", 0, module=module))
    assert type(module) is RegularizedMultiheadAttention
    module.release()
    assert type(module) is MultiheadAttention
    assert set(vars(module)) == attributes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_an_inactive_site_changes_no_bit(case: tuple[str, bool], training: bool, need_weights: bool) -> None:
    stock = stock_attention(case[0], dropout=0.3).train(training)
    ours = adopted(stock)
    results = []
    for module in (stock, ours):
        given = arguments(*case)
        torch.manual_seed(4)
        output, weights = module(**given, need_weights=need_weights)
        results.append((output, weights, gradients(module, given, output), torch.rand(())))
    (output, weights, grads, draw), (our_output, our_weights, our_grads, our_draw) = results
    assert torch.equal(our_output, output)
    assert (our_weights is None) == (weights is None)
    assert weights is None or torch.equal(our_weights, weights)
    assert all(torch.equal(a, b) for a, b in zip(our_grads, grads, strict=True))
    assert torch.equal(our_draw, draw), "another number of random draws"


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_masks_do_not_act_in_evaluation(kind: str) -> None:
    stock = stock_attention(kind, dropout=0.3).eval()
    ours = adopted(stock)
    given = arguments(kind, True)
    ours.attn_site.ask(keep=torch.zeros(B, H, T, given["key"].size(0), dtype=torch.bool))
    assert torch.equal(ours(**given)[0], stock(**given)[0])


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_incremental_decoding_takes_fairseqs_path(kind: str) -> None:
    stock = stock_attention(kind).eval()
    ours = adopted(stock)
    given = arguments(kind, True)
    ours.attn_site.ask(keep=torch.zeros(B, H, 1, 1, dtype=torch.bool))
    with torch.no_grad():
        outputs = []
        for module in (stock, ours):
            state: dict[str, Any] = {}
            steps = [_decode_step(module, kind, given, state, t) for t in range(T)]
            outputs.append(torch.cat(steps))
    assert torch.equal(outputs[0], outputs[1])
    ours.train()
    with torch.no_grad():
        assert torch.equal(_decode_step(ours, kind, given, {}, 0), outputs[0][:1]), "also in training mode"


def _decode_step(
    module: MultiheadAttention, kind: str, given: dict[str, Any], state: dict[str, Any], t: int
) -> torch.Tensor:
    step = given["query"][t : t + 1]
    if kind == "self":
        return module(step, step, step, incremental_state=state)[0]
    padding = given["key_padding_mask"]
    return module(step, given["key"], given["value"], padding, incremental_state=state, static_kv=True)[0]


@pytest.mark.parametrize("weights", ["none", "mean", "heads"])
def test_keeping_everything_is_stock_attention(case: tuple[str, bool], weights: str) -> None:
    kind, padding = case
    stock = stock_attention(kind)
    ours = adopted(stock)
    wanted = {"need_weights": weights != "none", "need_head_weights": weights == "heads"}
    results = []
    for module in (stock, ours):
        given = arguments(kind, padding)
        keys = given["key"].size(0)
        ours.attn_site.ask(keep=torch.ones(B, H, T, keys, dtype=torch.bool))
        # static_kv sends fairseq down the path that knows need_head_weights; the other one averages them away
        chosen = {**given, "static_kv": True} if weights == "heads" else given
        output, maps = module(**chosen, **wanted)
        results.append((output, maps, gradients(module, given, output)))
    (output, maps, grads), (our_output, our_maps, our_grads) = results
    torch.testing.assert_close(our_output, output, atol=1e-6, rtol=0)
    for ours_, theirs in zip(our_grads, grads, strict=True):
        torch.testing.assert_close(ours_, theirs, atol=1e-5, rtol=1e-5)
    if weights == "none":
        assert our_maps is None
        return
    assert our_maps.shape == ((H, B, T, keys) if weights == "heads" else (B, T, keys))
    torch.testing.assert_close(our_maps, maps, atol=1e-6, rtol=0)


def test_returned_weights_carry_gradients_to_queries_and_keys(case: tuple[str, bool]) -> None:
    stock = stock_attention(case[0])
    ours = adopted(stock)
    results = []
    for module in (stock, ours):
        given = arguments(*case)
        ours.attn_site.ask(keep=torch.ones(B, H, T, given["key"].size(0), dtype=torch.bool))
        _, maps = module(**{**given, "static_kv": True}, need_head_weights=True)
        results.append(gradients(module, given, maps))
    assert results[1][0].abs().max() > 1e-3
    for ours_, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours_, theirs, atol=1e-6, rtol=1e-5)


def test_masked_attention_is_the_equation(case: tuple[str, bool]) -> None:
    """Each row softmaxes over what is kept; a row that loses everything is uniform over its valid keys."""
    ours = adopted(stock_attention(case[0]))
    given = arguments(*case)
    keys = given["key"].size(0)
    keep = torch.rand(B, H, T, keys, generator=torch.Generator().manual_seed(5)) < 0.6
    keep[:, 1, 2] = False
    ours.attn_site.ask(keep=keep)
    output, maps = ours(**given, need_head_weights=True)
    valid = torch.ones(B, H, T, keys, dtype=torch.bool)
    if "key_padding_mask" in given:
        valid &= ~given["key_padding_mask"][:, None, None, :]
    if "attn_mask" in given:
        valid &= given["attn_mask"] == 0
    q, k, v = (
        projection(x).view(-1, B, H, C // H).permute(1, 2, 0, 3)
        for projection, x in ((ours.q_proj, given["query"]), (ours.k_proj, given["key"]), (ours.v_proj, given["key"]))
    )
    expected = torch.zeros(B, H, T, keys)
    for b, h, t in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(T)).tolist():
        left = valid[b, h, t] & keep[b, h, t]
        if left.any():
            scores = (k[b, h] @ q[b, h, t]) / (C // H) ** 0.5
            expected[b, h, t, left] = torch.softmax(scores[left], 0)
        elif valid[b, h, t].any():
            expected[b, h, t, valid[b, h, t]] = 1.0 / valid[b, h, t].sum()
    assert (expected[:, 1, 2].count_nonzero(-1) == valid[:, 1, 2].sum(-1)).all()
    torch.testing.assert_close(maps, expected.transpose(0, 1), atol=1e-6, rtol=0)
    mixed = ours.out_proj((expected @ v).permute(2, 0, 1, 3).reshape(T, B, C))
    torch.testing.assert_close(output, mixed, atol=2e-6, rtol=0)


MASKS = {
    "bool": lambda: torch.triu(torch.ones(T, T, dtype=torch.bool), 1),
    "-1e8": lambda: torch.triu(torch.full((T, T), -1e8), 1),
    "-1e4": lambda: torch.triu(torch.full((T, T), -1e4), 1),
    "finite bias": lambda: torch.arange(T * T).view(T, T) / 10.0,
    "bias and -inf": lambda: torch.triu(torch.full((T, T), float("-inf")), 1) + torch.eye(T),
    "a head each": lambda: torch.randn(B * H, T, T, generator=torch.Generator().manual_seed(6)),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_form_of_attention_mask_means_what_it_means_to_fairseq(name: str) -> None:
    stock = stock_attention("self")
    ours = adopted(stock)
    ours.attn_site.ask(keep=torch.ones(B, H, T, T, dtype=torch.bool))
    given = {**arguments("self", False), "attn_mask": MASKS[name]()}
    torch.testing.assert_close(ours(**given)[0], stock(**given)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("padding", [False, True])
def test_a_uniform_site_needs_neither_queries_nor_keys(padding: bool) -> None:
    ours = adopted(stock_attention("cross"))
    given = arguments("cross", padding)
    ours.attn_site.ask(keep=torch.zeros(B, H, T, S, dtype=torch.bool))
    expected, _ = ours(**given)
    called: list[str] = []
    for name in ("q_proj", "k_proj"):
        getattr(ours, name).register_forward_hook(lambda *_, name=name: called.append(name))
    ours.attn_site.clear()
    ours.attn_site.ask(uniform=lambda call: True)
    output, maps = ours(**given, need_weights=False)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
    assert maps is None and called == []


@pytest.mark.parametrize(
    ("options", "named"), [({"add_bias_kv": True}, "bias_k"), ({"add_zero_attn": True}, "add_zero_attn")]
)
def test_attention_with_extra_keys_is_refused(options: dict[str, bool], named: str) -> None:
    module = stock_attention("self", **options)
    with pytest.raises(ValueError, match=rf"encoder\.self\[0\] \(layers\.0\).*{named}, which cannot be regularized"):
        RegularizedMultiheadAttention.adopt(module, AttentionSite("encoder", "self", 0, "layers.0", module))
    assert type(module) is MultiheadAttention and not hasattr(module, "attn_site")


def test_a_mask_of_another_shape_is_refused() -> None:
    ours = adopted(stock_attention("self"))
    ours.attn_site.ask(keep=torch.ones(B, H, T, T + 1, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="saw different inputs"):
        ours(**arguments("self", False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dead_row_is_finite_in_half_precision(dtype: torch.dtype) -> None:
    ours = adopted(stock_attention("self")).to(dtype)
    given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in _halves().items()}
    ours.attn_site.ask(keep=torch.zeros(B, H, T, T, dtype=torch.bool))
    output, maps = ours(**given, need_head_weights=True)
    assert output.dtype == dtype and output.isfinite().all() and maps.isfinite().all()
    assert (maps[:, 0, :, -2:] == 0).all(), "padding has no weight"


def _halves() -> dict[str, torch.Tensor]:
    given = arguments("causal", True)
    return {key: value.detach() for key, value in given.items()}
