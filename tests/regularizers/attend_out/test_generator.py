"""The generator's attention against the formula as it is written, layer by layer; folded or narrow, alone or shared."""

import math

import pytest
import torch
from torch import nn

from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers import Tokens
from attn_reg_plugin.regularizers.attend_out import generator as generators
from attn_reg_plugin.regularizers.attend_out.generator import Embeddings, Generator, SharedAttention, valid_pairs
from tests.attention.tiny_model import tokens

SITES = [("encoder", "self"), ("decoder", "self"), ("decoder", "cross")]
IDS = {"encoder": tokens([6, 4, 1], 6, seed=1), "decoder": tokens([3, 5, 0], 5, seed=2)}
BATCH = {stack: Tokens(ids, ids.ne(0)) for stack, ids in IDS.items()}


def literal(attention: SharedAttention, states, memory, valid):
    """Scores and next states, an example and a query at a time."""
    w = attention.query.out_features
    scores, after = torch.zeros(*states.shape[:2], memory.size(1), dtype=states.dtype), []
    for x, y, pairs in zip(states, memory, valid, strict=True):
        rows = []
        for t, query in enumerate(attention.query(x)):
            row = torch.stack([query @ attention.key(y[s]) / math.sqrt(w) for s in range(y.size(0))])
            scores[len(after), t] = row
            mixed = torch.zeros(w, dtype=x.dtype)
            if pairs[t].any():
                mixed = row[pairs[t]].softmax(-1) @ attention.value(y[pairs[t]])
            rows.append(attention.norm(x[t] + attention.output(mixed)))
        after.append(torch.stack(rows))
    return scores, torch.stack(after)


def literal_logits(generator: Generator):
    """Compute the logits of a generator for every site of two layers a stack."""
    rows, logits = generator.rows(BATCH), {}
    states = {stack: generator.embed(stack, BATCH[stack], rows).double() for stack in IDS}
    for stack, kind in [("encoder", "self")] * 2 + [("decoder", "self"), ("decoder", "cross")] * 2:
        layer = sum(name.startswith(f"{stack}.{kind}") for name in logits)
        memory = states["encoder"] if kind == "cross" else states[stack]
        scores, states[stack] = literal(
            generator.attention[f"{stack}_{kind}"], states[stack], memory, valid_pairs(stack, kind, BATCH)
        )
        logits[f"{stack}.{kind}[{layer}]"] = scores
    return logits


def test_gpt_2s_tables_are_told_apart() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(5, 2), "wpe": nn.Embedding(9, 2)})
    found = generators.embeddings_of(model, {"decoder"}, [])["decoder"]
    assert found.tokens is model.wte.weight and found.positions.equal(model.wpe.weight)


def generator(width: int, decoder: int = 8) -> Generator:
    """For every site of two layers a stack, in fp64; the decoder may be of another width."""
    torch.manual_seed(0)
    sites = [AttentionSite(stack, kind, layer) for stack, kind in SITES for layer in range(2)]
    tables = {"encoder": Embeddings(torch.randn(13, 8)), "decoder": Embeddings(torch.randn(13, decoder))}
    made = Generator(sites, tables, width=width).double()
    made.embed = lambda *given: Generator.embed(made, *given).double()
    for name, parameter in made.named_parameters():
        if name.startswith("attention") and parameter.dim() == 1:
            nn.init.normal_(parameter)  # biases and norms that matter
    return made


@pytest.mark.parametrize(
    ("width", "decoder", "folded"), [(0, 8, True), (5, 8, True), (4, 8, False), (2, 8, False), (0, 12, True)]
)
def test_logits_and_gradients_are_those_of_the_formula(width: int, decoder: int, folded: bool) -> None:
    made = generator(width, decoder)
    assert {attention.folded for attention in made.attention.values()} == {folded}
    found, expected = made(BATCH), literal_logits(made)
    assert list(found) == list(expected) and len(found) == 6
    parameters, gradients = list(made.parameters()), []
    for logits in (found, expected):
        total = 0.0
        for name, scores in logits.items():
            stack, kind = name.split("[")[0].split(".")
            pairs = valid_pairs(stack, kind, BATCH)  # rows of padding are nobody's
            torch.testing.assert_close(scores * pairs, expected[name] * pairs)
            total = total + (scores * pairs).square().sum()
        gradients.append(torch.autograd.grad(total, parameters, allow_unused=True))
    for ours, theirs, (name, _) in zip(*gradients, made.named_parameters(), strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            torch.testing.assert_close(ours, theirs, msg=name)
