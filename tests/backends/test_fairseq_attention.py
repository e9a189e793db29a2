"""fairseq's attention with a site beside the stock one: the same module until the site is active."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from attn_reg_plugin import find_sites
from attn_reg_plugin.attention.calls import opened
from attn_reg_plugin.attention.sites import AttentionSite
from tests.attention.literal import loop_weights

B, H, T, S, C = 3, 4, 5, 7, 16
CASES = [(kind, padding) for kind in ("self", "causal", "cross") for padding in (False, True)]


def attention(kind: str, dropout: float = 0.0) -> tuple[MultiheadAttention, AttentionSite]:
    """An attention as fairseq's Transformer builds it, and its site, which is not open."""
    torch.manual_seed(1)
    cross = kind == "cross"
    module = MultiheadAttention(C, H, dropout=dropout, self_attention=not cross, encoder_decoder_attention=cross)
    return module, find_sites(nn.ModuleList([module]), "*")[0]


def arguments(kind: str, padding: bool) -> dict[str, Any]:
    """Arguments of a Transformer layer's attention: (T, B, C) tensors that require gradients, and masks."""
    torch.manual_seed(2)
    query = torch.randn(T, B, C, requires_grad=True)
    memory = torch.randn(S, B, C, requires_grad=True) if kind == "cross" else query
    given: dict[str, Any] = {"query": query, "key": memory, "value": memory}
    if padding:
        given["key_padding_mask"] = torch.zeros(B, memory.size(0), dtype=torch.bool)
        given["key_padding_mask"][0, -2:] = given["key_padding_mask"][1, -1:] = True
    if kind == "causal":
        given["attn_mask"] = torch.triu(torch.full((T, T), float("-inf")), 1)
    return given | ({"static_kv": True} if kind == "cross" else {})


def gradients(module: MultiheadAttention, given: dict[str, Any], output: Tensor) -> list[Tensor]:
    """Gradients of a random projection of `output` with respect to the inputs and every parameter."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    wanted = [given["query"], *([given["key"]] if given["key"] is not given["query"] else []), *module.parameters()]
    return list(torch.autograd.grad((output * direction).sum(), wanted, retain_graph=True, materialize_grads=True))


def all_of(keys: int) -> Tensor:
    return torch.ones(B, H, T, keys, dtype=torch.bool)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_inactive_site_changes_no_bit(case: tuple[str, bool], training: bool, need_weights: bool) -> None:
    """Output, weights, gradients and the next random number."""
    module, site = attention(case[0], dropout=0.3)
    module.train(training)
    results: list[list[Tensor]] = []
    for within in (nullcontext(), opened([site])):
        given = arguments(*case)
        torch.manual_seed(4)
        with within:
            output, weights = module(**given, need_weights=need_weights)
            results.append([output, *gradients(module, given, output), torch.rand(())])
            results[-1] += [] if weights is None else [weights]
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_incremental_decoding_takes_fairseqs_path(kind: str, training: bool) -> None:
    module, site = attention(kind)
    module.train(training)
    given, outputs = arguments(kind, True), []
    for within in (nullcontext(), opened([site])):
        state: dict[str, Any] = {}
        with within, torch.no_grad():
            site.ask(keep=torch.zeros(B, H, 1, 1, dtype=torch.bool))
            for t in range(T):
                step = given["query"][t : t + 1]
                memory = (given["key"],) * 2 if kind == "cross" else (step, step)
                padding = given["key_padding_mask"] if kind == "cross" else None
                outputs.append(module(step, *memory, padding, state, static_kv=kind == "cross")[0])
    assert all(map(torch.equal, outputs[:T], outputs[T:]))


@pytest.mark.parametrize("weights", ["none", "mean", "heads"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeping_everything_is_stock_attention(case: tuple[str, bool], weights: str) -> None:
    """Output and returned weights, and the gradients of both."""
    module, site = attention(case[0])
    results = []
    for within in (nullcontext(), opened([site])):
        given = arguments(*case)
        keys = given["key"].size(0)
        # static_kv sends fairseq down the path that knows need_head_weights; the other one averages them away
        chosen = {**given, "static_kv": True} if weights == "heads" else given
        with within:
            site.ask(keep=all_of(keys))
            output, maps = module(**chosen, need_weights=weights != "none", need_head_weights=weights == "heads")
        results.append([output, *gradients(module, given, output)])
        if weights == "heads":
            assert maps.shape == (H, B, T, keys)
            results[-1] += [maps, *gradients(module, given, maps)]
        assert (maps is None) == (weights == "none")
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


def test_a_dropped_attention_returns_the_uniform_weights() -> None:
    module, site = attention(CASES[0][0])
    with opened([site]):
        site.ask(uniform=lambda call: True)
        _, maps = module(**arguments(CASES[0][0], False), need_head_weights=True)
    torch.testing.assert_close(maps, torch.full_like(maps, 1 / maps.size(-1)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masked_attention_is_the_equation(case: tuple[str, bool]) -> None:
    """Each row softmaxes over what is kept; a row that loses everything is uniform over its valid keys."""
    module, site = attention(case[0])
    given = arguments(*case)
    keys = given["key"].size(0)
    keep = torch.rand(B, H, T, keys, generator=torch.Generator().manual_seed(5)) < 0.6
    keep[:, 1, 2] = False
    with opened([site]):
        site.ask(keep=keep)
        output, maps = module(**given, need_head_weights=True)
    valid = all_of(keys)
    if "key_padding_mask" in given:
        valid &= ~given["key_padding_mask"][:, None, None, :]
    if "attn_mask" in given:
        valid &= given["attn_mask"] == 0
    q, k, v = (
        project(given[name]).view(-1, B, H, C // H).permute(1, 2, 0, 3)
        for project, name in ((module.q_proj, "query"), (module.k_proj, "key"), (module.v_proj, "key"))
    )
    expected = loop_weights(q, k, valid=valid, keep=keep)
    assert (expected[:, 1, 2].count_nonzero(-1) == valid[:, 1, 2].sum(-1)).all()
    torch.testing.assert_close(maps, expected.transpose(0, 1), atol=1e-6, rtol=0)
    mixed = module.out_proj((expected @ v).permute(2, 0, 1, 3).reshape(T, B, C))
    torch.testing.assert_close(output, mixed, atol=2e-6, rtol=0)


MASKS = {
    "bool": lambda: torch.triu(torch.ones(T, T, dtype=torch.bool), 1),
    "-1e8": lambda: torch.triu(torch.full((T, T), -1e8), 1),
    "-1e4": lambda: torch.triu(torch.full((T, T), -1e4), 1),
    "bias and -inf": lambda: torch.triu(torch.full((T, T), float("-inf")), 1) + torch.eye(T),
    "a head each": lambda: torch.randn(B * H, T, T, generator=torch.Generator().manual_seed(6)),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_form_of_attention_mask_means_what_it_means_to_fairseq(name: str) -> None:
    module, site = attention("self")
    given = {**arguments("self", False), "attn_mask": MASKS[name]()}
    expected = module(**given)[0]
    with opened([site]):
        site.ask(keep=all_of(T))
        torch.testing.assert_close(module(**given)[0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_uniform_site_needs_neither_queries_nor_keys(case: tuple[str, bool]) -> None:
    module, site = attention(case[0])
    given, called = arguments(*case), []
    with opened([site]):
        site.ask(keep=~all_of(given["key"].size(0)))
        expected, _ = module(**given)
        for name in ("q_proj", "k_proj"):
            getattr(module, name).register_forward_hook(lambda *_, name=name: called.append(name))
        site.clear()
        site.ask(uniform=lambda call: True)
        output, maps = module(**given, need_weights=False)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
    assert maps is None and not called
