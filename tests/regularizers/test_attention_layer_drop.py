"""Attention LayerDrop: how often layers are dropped, what a dropped layer gives, and what it does not compute."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attn_reg_plugin.regularizers import AttentionLayerDrop
from tests.attention.tiny_model import SIZE


def test_each_site_is_dropped_with_probability_p_independently(translator, batch):
    p, n = 0.3, 1200
    regularizer = AttentionLayerDrop(p=p, sites="encoder.self decoder.cross")
    drawn = []
    torch.manual_seed(0)
    with regularizer.attach(translator):
        for _ in range(n):
            regularizer.before_forward(None)
            drawn.append([site.request.uniform(0) for site in regularizer.attached_sites])  # as their calls do
    drawn = torch.tensor(drawn, dtype=torch.float64)
    assert drawn.shape == (n, 4)
    # five standard deviations of the binomial distribution
    assert ((drawn.sum(0) - n * p).abs() < 5 * math.sqrt(n * p * (1 - p))).all()
    assert (torch.corrcoef(drawn.T) - torch.eye(4)).abs().max() < 5 / math.sqrt(n)
    sums = regularizer.statistics.take()
    for i, name in enumerate(["encoder.self[0]", "encoder.self[1]", "decoder.cross[0]", "decoder.cross[1]"]):
        assert sums[f"valid/{name}"] == n
        assert sums[f"dropped/{name}"] == drawn[:, i].sum()


def test_what_is_padded_never_matters(translator, batch):
    source, target = batch
    regularizer = AttentionLayerDrop(p=1.0, sites="*")
    with regularizer.attach(translator):
        wide = translator(source, target)[2:]
        narrow = translator(source[2:, :2], target[2:, :1])
    torch.testing.assert_close(wide[:, :1], narrow)


class Layers(nn.Module):
    """Two attentions of fairseq's, as an encoder and a decoder hold them."""

    def __init__(self) -> None:
        super().__init__()
        from fairseq.modules import MultiheadAttention

        self.encoder = nn.ModuleList([MultiheadAttention(SIZE, 2, self_attention=True)])
        self.decoder = nn.ModuleList([MultiheadAttention(SIZE, 2, self_attention=True)])
        for module in (*self.encoder, *self.decoder):
            nn.init.normal_(module.out_proj.bias)

    def forward(self, states, padding):
        """(T, B, C) and padding (B, T), True = padding: what encoder and decoder attention give, (T, B, C) each."""
        future = torch.full((len(states), len(states)), -math.inf).triu(1)
        seen = self.encoder[0](states, states, states, key_padding_mask=padding)
        return seen[0], self.decoder[0](states, states, states, key_padding_mask=padding, attn_mask=future)[0]


@pytest.fixture
def layers():
    """The fairseq layers, in training mode, with states (5, 3, C) of lengths 5, 3 and 1."""
    pytest.importorskip("fairseq")
    torch.manual_seed(7)
    states = torch.randn(5, 3, SIZE)
    return Layers().train(), states, torch.arange(5) >= torch.tensor([5, 3, 1]).unsqueeze(-1)


def test_in_fairseq_a_dropped_layer_gives_the_mean_of_the_valid_values_projected(layers):
    model, states, padding = layers
    with AttentionLayerDrop(p=1.0, sites="*").attach(model):
        outputs = model(states, padding)
    for module, output, causal in zip((model.encoder[0], model.decoder[0]), outputs, (False, True), strict=True):
        values = states @ module.v_proj.weight.T + module.v_proj.bias
        for b, length in enumerate([5, 3, 1]):
            for t in range(5):
                mean = values[: min(length, t + 1) if causal else length, b].mean(0)
                expected = mean @ module.out_proj.weight.T + module.out_proj.bias
                torch.testing.assert_close(output[t, b], expected)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_in_fairseq_a_dropped_layer_computes_neither_queries_nor_keys(layers, p):
    model, states, padding = layers
    calls = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "out_proj": 0}
    for module in (*model.encoder, *model.decoder):
        for name in calls:

            def count(*_, name=name):
                calls[name] += 1

            getattr(module, name).register_forward_pre_hook(count)
    with AttentionLayerDrop(p=p, sites="*").attach(model):
        sum(output.sum() for output in model(states, padding)).backward()
    if p == 1:
        assert calls == {"q_proj": 0, "k_proj": 0, "v_proj": 2, "out_proj": 2}
        assert model.encoder[0].q_proj.weight.grad is None
        assert model.encoder[0].v_proj.weight.grad is not None
    else:
        # fairseq's own path hands the projections' weights to PyTorch's function without calling the modules
        assert model.encoder[0].q_proj.weight.grad is not None
