"""Whole tokens: the score against its literal sum and finite differences, the mask, candidates, and what is refused."""

import math

import pytest
import torch

from attn_reg_plugin import ADDrop, find_sites, recording
from attn_reg_plugin.attention.attribution import gradients_of
from attn_reg_plugin.attention.tokens import TokenBias, with_bias
from attn_reg_plugin.regularizers.ad_drop.tokens import candidate_tokens, hidden_tokens, sequence_of
from tests.attention.tiny_model import PAD, Materialized, TinyClassifier, attentions, loss_of, tokens

BATCH = tokens([6, 4, 5], 6), tokens([5, 5, 3], 5, seed=1)
SEQUENCES = {("", "encoder"): BATCH[0], ("", "decoder"): BATCH[1]}


def log_likelihood(logits, inputs=None):
    """F: Σ log P of the target tokens, in the precision of the logits."""
    likelihoods = logits.log_softmax(-1).gather(-1, BATCH[1].unsqueeze(-1)).squeeze(-1)
    return (likelihoods * (BATCH[1] != PAD)).sum()


def likelihood(model):
    return log_likelihood(model(*BATCH))


class Halfway(Materialized):
    """Attentions that give half of their output."""

    def __call__(self, *given):
        return super().__call__(*given) / 2


def scores_of(model):
    """∂F/∂β of source and target tokens, and F."""
    sites = find_sites(model, "*")
    biases = {name: TokenBias() for name in SEQUENCES}
    with recording(sites, tokens={site: biases[sequence_of(site)] for site in sites}):
        objective = likelihood(model)
        return gradients_of(objective, [biases[name].leaves[0] for name in SEQUENCES]), objective.detach()


def test_the_score_is_the_sum_over_attentions_heads_and_queries(translator):
    found, objective = scores_of(translator)
    with Halfway(translator) as maps:
        plain = likelihood(translator)
        gradients = dict(zip(maps.maps, torch.autograd.grad(plain, list(maps.maps.values())), strict=True))
    torch.testing.assert_close(objective, plain.detach())
    for score, (_, stack) in zip(found, SEQUENCES, strict=True):
        expected = torch.zeros_like(score)
        for name, weights in maps.maps.items():
            if (name.startswith("decoder.self")) != (stack == "decoder"):
                continue
            for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in weights.shape)).tolist():
                row, gradient = weights[b, h, i], gradients[name][b, h, i]
                expected[b, j] += (row[j] * (gradient[j] - (row * gradient).sum())).detach()
        torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-5)
        assert score.abs().sum() > 0


def test_the_score_is_the_slope_of_the_objective(translator):
    """By finite differences of F where the scores of one token's key are turned up in every attention."""
    model = translator.double()
    found, _ = scores_of(model)

    def objective(stack, example, place, by):
        def attend(name, query, key, value, valid, dropout_p):
            scores = query @ key.transpose(-1, -2) * query.size(-1) ** -0.5
            if name.startswith("decoder.self") == (stack == "decoder"):
                scores[example, ..., place] += by
            return scores.masked_fill(~valid, -math.inf).softmax(-1) @ value / 2

        for module in attentions(model).values():
            module.attend = attend
        try:
            return likelihood(model).item()
        finally:
            for module in attentions(model).values():
                module.attend = None

    for score, (_, stack) in zip(found, SEQUENCES, strict=True):
        for example, place in ((0, 0), (0, 2), (1, 3), (2, 1)):
            slope = (objective(stack, example, place, 1e-4) - objective(stack, example, place, -1e-4)) / 2e-4
            assert score[example, place].item() == pytest.approx(slope, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_given_head_sizes_that_they_take(dtype):
    """A fused kernel of a GPU refuses a head size that is not divisible by eight, or a bias with a gradient."""
    query, key, value = (torch.randn(2, 2, length, 16, dtype=dtype) for length in (3, 5, 5))
    columns = TokenBias().columns_of(0, key, None, 0.25)
    found = with_bias(query, key, value, *columns)
    assert all(one.size(-1) % 8 == 0 and one.dtype == dtype for one in found)
    torch.testing.assert_close(found[0] @ found[1].mT, query @ key.mT)  # β is zero
    (slope,) = torch.autograd.grad((found[0] @ found[1].mT * 0.25).sum(), columns[1])
    assert slope[..., 0].unique().tolist() == [3]  # each of the three queries' scores is turned up by β


@pytest.mark.parametrize("attribution", ["gradient", "random"])
@pytest.mark.parametrize("direction", ["high", "low"])
def test_chosen_tokens_are_hidden_as_keys_of_all_attentions(attribution, direction, translator):
    """Loss and masks are those of a model whose keys lack the ⌈p·n⌉ tokens of the highest score."""
    model, p = translator, 0.4
    scores = scores_of(model)[0]
    how = {"attribution": attribution, "direction": direction, "objective": log_likelihood, "cross_tuning": "off"}
    method = ADDrop("*", p=p, q=1.0, unit="token", **how)
    asked = {}
    with method.attach(model) as regularizer, pytest.warns(UserWarning, match="spares only the first"):
        loss = loss_of(model(*BATCH), BATCH[1])
        for site in regularizer.attached_sites:
            [call] = site.calls.made
            ids = SEQUENCES[sequence_of(site)]
            shape, valid = (3, 1, ids.size(1), ids.size(1)), (ids != PAD)[:, None, None, :]
            asked[site.name] = call.keep_mask(shape, valid, torch.device("cpu")).unpacked() | ~valid
        rates = regularizer.summary()
    for name, keep in asked.items():
        position = 1 if name.startswith("decoder.self") else 0
        ids, score = BATCH[position], scores[position]
        hidden = ~keep[:, 0, -1]  # the last query sees all keys
        for b in range(3):
            inner = [j for j in range(ids.size(1)) if ids[b, j] != PAD][1:-1]
            count = math.ceil(p * len(inner) - 1e-9)
            chosen = hidden[b].nonzero().flatten().tolist()
            assert len(chosen) == count and set(chosen) <= set(inner)
            if attribution == "gradient":
                ranked = sorted(inner, key=lambda j: score[b, j], reverse=direction == "high")
                assert sorted(ranked[:count]) == chosen
        assert keep.equal(asked["decoder.self[1]" if position else "decoder.cross[0]"])
        assert rates[f"drop_{name}"] == pytest.approx(hidden.sum().item() / sum((ids != PAD).sum(1) - 2).item())

    def attend(name, query, key, value, valid, dropout_p):
        scores = (query @ key.transpose(-1, -2) * query.size(-1) ** -0.5).masked_fill(~(valid & asked[name]), -math.inf)
        return scores.softmax(-1) @ value

    for module in attentions(model).values():
        module.attend = attend
    torch.testing.assert_close(loss, loss_of(model(*BATCH), BATCH[1]))


def test_special_tokens_are_no_candidates():
    ids = torch.tensor([[101, 7, 8, 102, 9, 102, 0], [101, 7, 8, 9, 10, 11, 102], [5, 6, 7, 8, 9, 10, 11]])
    valid = ids != 0
    told = {"input_ids": ids, "special_ids": {101, 102}}
    expected = [[0, 1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]  # the last one has none
    assert candidate_tokens(valid, "encoder", told).long().tolist() == expected
    inner = [[0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0]]
    assert candidate_tokens(valid, "decoder", told).long().tolist() == expected, "of the only stack"
    choices = {**told, "input_ids": ids[None]}
    assert candidate_tokens(valid, "encoder", choices).long().tolist() == expected, "several texts an example"
    for unknown in ({}, {"input_ids": ids}, {**told, "input_ids": ids[:, :3]}):
        assert candidate_tokens(valid, "encoder", unknown).long().tolist() == inner


def test_a_hidden_share_is_p_times_q():
    torch.manual_seed(0)
    among = torch.ones(400, 20).bool()
    among[:, 15:] = False
    keep = hidden_tokens(torch.randn(400, 20), among, 0.3, 0.6)[:, 0, 0]
    assert keep[:, 15:].all() and (~keep).sum(1).max() <= math.ceil(0.3 * 15)
    assert (~keep).float().sum(1).mean().item() == pytest.approx(5 * 0.6, rel=0.05)


def test_what_whole_tokens_cannot_do_is_refused():
    for attribution in ("integrated", "attention"):
        with pytest.raises(ValueError, match=r"must be gradient or random for whole tokens \(unit='token'\)$"):
            ADDrop(unit="token", attribution=attribution)
    model = TinyClassifier().train()
    frozen = ADDrop(unit="token", cross_tuning="off", objective=lambda outputs, inputs: outputs.detach().sum())
    with frozen.attach(model), pytest.raises(ValueError, match="depends on no selected attention site"):
        model(BATCH[0])

    class Halved(TinyClassifier):
        def forward(self, ids):
            there = ids.ne(PAD)[:, None, None, :]
            x = self.encoder.layers[0](self.encoder.embedding(ids), there)
            return self.output(self.encoder.layers[1](x[:, :3], there[..., :3])[:, 0])

    said = r"their keys differ: \(3, 3\) and \(3, 6\) \(batch, keys\); select sites over"
    with ADDrop(unit="token", cross_tuning="off").attach(half := Halved()), pytest.raises(ValueError, match=said):
        half(BATCH[0])
