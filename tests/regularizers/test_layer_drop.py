"""LayerDrop and attention LayerDrop: how often layers are left out, what they give then, and what is not computed."""

import copy
import math

import pytest
import torch
from torch import nn

from attn_reg_plugin.attention.functional import regularized_attention
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.layer_drop import LayerDrop
from tests.attention.tiny_model import SIZE
from tests.regularizers.trainings import step


@pytest.mark.parametrize("method", ["layer_drop", "attention_layer_drop"])
def test_each_is_left_out_with_probability_p_independently(method, translator, batch):
    p, n, drawn = 0.3, 400, []
    regularizer = build(method, p=p, sites="encoder.self decoder.cross")
    torch.manual_seed(0)
    with regularizer.attach(translator):
        names = [site.name for site in regularizer.attached_sites]
        for _ in range(n):
            translator(*batch)
            sums = regularizer.statistics.take()
            assert all(sums[f"valid/{name}"] == 1 for name in names)
            drawn.append([float(sums[f"dropped/{name}"]) for name in names])
    drawn = torch.tensor(drawn, dtype=torch.float64)
    # five standard deviations of the binomial distribution
    assert ((drawn.sum(0) - n * p).abs() < 5 * math.sqrt(n * p * (1 - p))).all()
    assert (torch.corrcoef(drawn.T) - torch.eye(4)).abs().max() < 5 / math.sqrt(n)


@pytest.mark.parametrize("seed", range(5))
def test_the_model_is_the_one_without_the_layers(translator, batch, seed):
    plain = copy.deepcopy(translator)
    regularizer = LayerDrop(p=0.5, sites="*")
    with regularizer.attach(translator):
        loss, *gradients, _ = step(translator, regularizer, seed, batch)
        sums = regularizer.statistics.take()
    for stack in ("encoder", "decoder"):
        getattr(plain, stack).skip = {i for i in range(2) if sums[f"dropped/{stack}.self[{i}]"]}
    expected, *theirs, _ = step(plain, None, seed, batch)
    torch.testing.assert_close(loss, expected)
    for ours, their in zip(gradients, theirs, strict=True):
        assert (ours is None) == (their is None), "what is left out has no gradient"
        if ours is not None:
            torch.testing.assert_close(ours, their)


def test_a_forward_that_stands_before_ours_stays(translator, batch):
    """Wrapped by a user meanwhile; what is left of ours lets the layer's own run."""
    layer, expected = translator.encoder.layers[0], translator.eval()(*batch)
    with LayerDrop(p=1.0, sites="*").attach(translator.train()):
        ours = layer.forward
        layer.forward = wrapper = lambda *args, **kwargs: ours(*args, **kwargs)
    assert layer.forward is wrapper and torch.equal(translator(*batch), expected)


def test_a_layer_that_is_left_out_is_not_computed(dropping_translator, batch):
    """The layer runs once, to see what it gives, and draws nothing: a resumed training has to agree."""
    count, made = [0], []
    for stack in (dropping_translator.encoder, dropping_translator.decoder):
        for layer in stack.layers:
            layer.feed_forward.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    with LayerDrop(p=0.0, sites="*").attach(dropping_translator):
        dropping_translator(*batch)
    assert count == [4]
    with LayerDrop(p=1.0, sites="*").attach(dropping_translator):
        for _ in range(2):
            torch.manual_seed(1)
            made.append((dropping_translator(*batch), torch.get_rng_state()))
            assert count == [8]
    assert made[0][0].equal(made[1][0]) and made[0][1].equal(made[1][1]) and made[0][0].requires_grad


class Own(nn.Module):
    """A layer of one's own that gives its states with more; `squeezed` changes their size."""

    def __init__(self, squeezed):
        super().__init__()
        self.attention, self.linear = nn.Identity(), nn.Linear(SIZE, SIZE - squeezed)
        self.attention.site = AttentionSite("encoder", "self", 0)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, states):
        self.seen += 1
        states = states["states"] if isinstance(states, dict) else states
        heads = states.unsqueeze(1)
        return self.linear(regularized_attention(heads, heads, heads, site=self.attention.site)[:, 0]), states.sum()


class Model(nn.Module):
    def __init__(self, squeezed=0):
        super().__init__()
        self.layers = nn.ModuleList([Own(squeezed)])

    def forward(self, states):
        output, extra = self.layers[0](states)
        return output.sum() + extra


def test_what_a_layer_gives_beside_its_states_stays_and_another_size_is_refused():
    model, states = Model().train(), torch.randn(2, 3, SIZE)
    with LayerDrop(p=1.0).attach(model):
        for _ in range(2):
            torch.testing.assert_close(model(states), 2 * states.sum())
    assert model.layers[0].seen == 0, "it ran, but was left out"
    model, said = Model(squeezed=1).train(), r"^the layer layers.0 of encoder.self\[0\] takes states"
    for p in (0.5, 1.0):
        with LayerDrop(p=p).attach(model), pytest.raises(RuntimeError, match=said):
            model(states)
        said, states = said.replace("takes states", "takes no states"), {"states": states}


def test_what_has_no_layer_of_its_own_is_refused_and_nothing_stays(translator):
    model = nn.Sequential(nn.MultiheadAttention(SIZE, 2))
    before = dict(vars(model[0]))
    said = r"^encoder.self\[0\] \(0\) stands in no numbered layer that could be left out"
    with pytest.raises(ValueError, match=said):
        LayerDrop().attach(model)
    assert not model._forward_pre_hooks and vars(model[0]).keys() == before.keys()
    assert type(model[0]) is nn.MultiheadAttention
    before = {path: vars(module).keys() for path, module in translator.named_modules()}
    with LayerDrop(sites="decoder.self[1]").attach(translator):
        with pytest.raises(ValueError, match=r"^the layer decoder.layers.1 is left out by another regularizer already"):
            LayerDrop(sites="decoder.cross").attach(translator)
        assert "forward" not in vars(translator.decoder.layers[0])
    assert {path: vars(module).keys() for path, module in translator.named_modules()} == before


def test_torchs_own_layers_and_their_fast_path():
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
