"""LayerDrop: a layer that is left out isn't there, isn't computed, and is found from its attentions' paths."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from attn_reg_plugin.attention.functional import regularized_attention
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.layer_drop import Layer, LayerDrop
from tests.attention.tiny_model import SIZE, loss_of, training_step


def layers_in(regularizer):
    return [handle for handle in regularizer._attachment.handles if isinstance(handle, Layer)]


def left_out(regularizer):
    """The paths of the layers that the last forward left out."""
    return {layer.path for layer in layers_in(regularizer) for call in layer.calls if call.uniform}


@pytest.mark.parametrize("seed", range(5))
def test_the_model_is_the_one_without_the_layers(translator, batch, seed):
    plain = copy.deepcopy(translator)
    regularizer = LayerDrop(p=0.5, sites="*")
    with regularizer.attach(translator):
        loss, gradients, _ = training_step(translator, batch, seed)
        dropped = left_out(regularizer)
    for stack in ("encoder", "decoder"):
        getattr(plain, stack).skip = {i for i in range(2) if f"{stack}.layers.{i}" in dropped}
    expected, theirs, _ = training_step(plain, batch, seed)
    torch.testing.assert_close(loss, expected)
    for ours, their in zip(gradients, theirs, strict=True):
        assert (ours is None) == (their is None), "what is left out has no gradient"
        if ours is not None:
            torch.testing.assert_close(ours, their)


def test_layers_are_left_out_with_probability_p_independently(translator, batch):
    p, n, drawn = 0.3, 400, []
    regularizer = LayerDrop(p=p, sites="encoder.self decoder.cross")
    torch.manual_seed(0)
    with regularizer.attach(translator):
        for _ in range(n):
            translator(*batch)
            gone = left_out(regularizer)
            drawn.append([layer.path in gone for layer in layers_in(regularizer)])
        sums = regularizer.statistics.take()
    drawn = torch.tensor(drawn, dtype=torch.float64)
    assert drawn.shape == (n, 4)
    assert ((drawn.sum(0) - n * p).abs() < 5 * math.sqrt(n * p * (1 - p))).all()
    assert (torch.corrcoef(drawn.T) - torch.eye(4)).abs().max() < 5 / math.sqrt(n)
    for i, name in enumerate(["encoder.self[0]", "encoder.self[1]", "decoder.cross[0]", "decoder.cross[1]"]):
        assert sums[f"valid/{name}"] == n and sums[f"dropped/{name}"] == drawn[:, i].sum()


def test_a_layer_that_is_left_out_is_not_computed(translator, batch):
    count = [0]
    for stack in (translator.encoder, translator.decoder):
        for layer in stack.layers:
            layer.feed_forward.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    with LayerDrop(p=0.0, sites="*").attach(translator):
        translator(*batch)
    assert count == [4]
    with LayerDrop(p=1.0, sites="*").attach(translator):
        state = translator(*batch), torch.get_rng_state()
        assert count == [8], "the first time, to see what it gives"
        translator(*batch)
        assert count == [8]
    assert state[0].requires_grad


def test_running_once_more_to_learn_draws_nothing(dropping_translator, batch):
    """Else a resumed training, in which it is learned anew, would draw other numbers."""
    model, states = dropping_translator, []
    with LayerDrop(p=1.0, sites="*").attach(model):
        for _ in range(2):
            torch.manual_seed(1)
            states.append((model(*batch), torch.get_rng_state()))
    assert states[0][0].equal(states[1][0]) and states[0][1].equal(states[1][1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.site = AttentionSite("encoder", "self", 0)

    def forward(self, states):
        heads = states.unsqueeze(1)
        return regularized_attention(heads, heads, heads, site=self.site)[:, 0]


class Own(nn.Module):
    """A layer of one's own that gives its states with more; `squeezed` changes their size."""

    def __init__(self, squeezed):
        super().__init__()
        self.attention, self.linear = Attention(), nn.Linear(SIZE, SIZE - squeezed)

    def forward(self, states):
        return self.linear(self.attention(states)), states.sum()


class Model(nn.Module):
    def __init__(self, squeezed=0):
        super().__init__()
        self.layers = nn.ModuleList([Own(squeezed)])

    def forward(self, states):
        output, extra = self.layers[0](states)
        return output.sum() + extra


def test_what_a_layer_gives_beside_its_states_stays(one_thread):
    model, states = Model().train(), torch.randn(2, 3, SIZE)
    with LayerDrop(p=1.0).attach(model):
        for _ in range(2):
            torch.testing.assert_close(model(states), 2 * states.sum())


def test_a_layer_that_changes_the_size_is_refused(one_thread):
    model = Model(squeezed=1).train()
    with (
        LayerDrop(p=0.5).attach(model),
        pytest.raises(RuntimeError, match=r"^the layer layers.0 of encoder.self\[0\] takes states"),
    ):
        model(torch.randn(2, 3, SIZE))


def test_an_attention_in_no_layer_is_refused_and_nothing_stays(one_thread):
    model = nn.Sequential(nn.MultiheadAttention(SIZE, 2))
    before = dict(vars(model[0]))
    with pytest.raises(
        ValueError, match=r"^encoder.self\[0\] \(0\) stands in no numbered layer that could be left out"
    ):
        LayerDrop().attach(model)
    assert not model._forward_pre_hooks and vars(model[0]).keys() == before.keys()
    assert type(model[0]) is nn.MultiheadAttention


def test_a_layer_is_left_out_by_one_regularizer(translator):
    before = {path: vars(module).keys() for path, module in translator.named_modules()}
    with LayerDrop(sites="decoder.self[1]").attach(translator):
        with pytest.raises(ValueError, match=r"^the layer decoder.layers.1 is left out by another regularizer already"):
            LayerDrop(sites="decoder.cross").attach(translator)
        assert "forward" not in vars(translator.decoder.layers[0])
    assert {path: vars(module).keys() for path, module in translator.named_modules()} == before


def test_torchs_own_layers_and_their_fast_path(one_thread):
    """Evaluation is PyTorch's own, bit for bit; training is the model without the layer."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    states, padding = torch.randn(2, 4, SIZE), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        expected = model.eval()(states, src_key_padding_mask=padding)
    with LayerDrop(p=1.0, sites="encoder.self[1]").attach(model):
        with torch.no_grad():
            assert model.eval()(states, src_key_padding_mask=padding).equal(expected)
        ours = model.train()(states, src_key_padding_mask=padding)
    torch.testing.assert_close(ours, model.layers[0](states, src_key_padding_mask=padding))


def test_gradients_reach_what_is_below(translator, batch):
    with LayerDrop(p=1.0, sites="encoder.self").attach(translator):
        loss_of(translator(*batch), batch[1]).backward()
    assert translator.encoder.embedding.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in translator.encoder.layers.parameters())
