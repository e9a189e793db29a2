"""Models of PyTorch's own attention: the sites, the idle model bit for bit, and every option of the attention."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from attn_reg_plugin import ADDrop, find_sites, gradient_attribution, recording
from attn_reg_plugin.attention.calls import opened
from tests.attention.tiny_model import EVERY
from tests.backends.materialized import Materialized

WIDTH, HEADS = 16, 4


class Translator(nn.Module):
    """`torch.nn.Transformer` with embeddings; padding is 0."""

    def __init__(self, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 24, dropout=dropout, batch_first=batch_first)
        self.output = nn.Linear(WIDTH, 30)
        self.batch_first = batch_first

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states = self.embedding(source), self.embedding(target)
        if not self.batch_first:
            states = tuple(state.transpose(0, 1) for state in states)
        hidden = self.transformer(
            *states,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.size(1)),
            src_key_padding_mask=torch.zeros(source.shape).masked_fill(source.eq(0), float("-inf")),
            memory_key_padding_mask=torch.zeros(source.shape).masked_fill(source.eq(0), float("-inf")),
            tgt_is_causal=True,
        )
        return self.output(hidden if self.batch_first else hidden.transpose(0, 1))


def translator(**options: Any) -> tuple[Translator, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    model = Translator(**options).train()
    source, target = torch.randint(1, 30, (3, 6)), torch.randint(1, 30, (3, 5))
    source[1, 4:], source[2, 2:] = 0, 0
    return model, (source, target)


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(4)
    outputs = model(*inputs)
    outputs.logsumexp(-1).sum().backward()
    return [outputs.detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]


def test_the_sites_of_a_transformer() -> None:
    model, _ = translator()
    sites = find_sites(model, "*")
    assert [site.name for site in sites] == EVERY
    assert sites[3].path == "transformer.decoder.layers.0.multihead_attn"
    assert [s.name for s in find_sites(model.transformer.decoder.layers[0], "*")] == [
        "decoder.self[0]",
        "decoder.cross[0]",
    ]


def test_the_sites_of_other_models() -> None:
    """Names decide: `multihead_attn` is cross attention in PyTorch's decoder layer only."""

    class Renamed(nn.MultiheadAttention):
        """Has no forward of its own."""

    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    block = nn.ModuleDict(
        {"multihead_attn": nn.MultiheadAttention(8, 2), "cross_attention": nn.MultiheadAttention(8, 2)}
    )
    block["own"] = Own(8, 2)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Identity(), block, nn.ModuleList([Renamed(8, 2)])])})
    model["encoder_layer_3"] = Renamed(8, 2)  # as torchvision's
    names = [site.name for site in find_sites(model, "*")]
    assert names == ["encoder.self[1]", "decoder.cross[1]", "encoder.self[2]", "encoder.self[3]"]
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1)
    for name in ("cross_encoder", "encoder_decoder_encoder"):
        assert [site.name for site in find_sites(nn.ModuleDict({name: stack}), "*")] == ["encoder.self[0]"]


def test_models_of_other_frameworks_are_left_to_their_backends() -> None:
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.SiglipVisionConfig(**small, image_size=8, patch_size=4)
    model = transformers.SiglipVisionModel(config)
    assert any(type(module) is nn.MultiheadAttention for module in model.modules())
    for found in (model, nn.ModuleDict({"vision": model})):
        assert [site.name for site in find_sites(found, "*")] == ["encoder.self[0]"]
    both = nn.ModuleDict({"vision": model, "encoder": nn.TransformerEncoderLayer(8, 2)})
    assert [site.path for site in find_sites(both, "*")][-1] == "encoder.self_attn"


@pytest.mark.parametrize("batch_first", [True, False])
def test_an_idle_model_is_the_stock_model(batch_first: bool) -> None:
    """In training with dropout, and in evaluation on the fused path."""
    model, inputs = translator(dropout=0.2, batch_first=batch_first)
    trained = step(model, inputs)
    with torch.no_grad():
        evaluated = model.eval()(*inputs)
    keys = list(model.state_dict())
    for options in ({"p": 0.0, "cross_tuning": "off"}, {}):
        with ADDrop(sites="*", **options).attach(model.train()) as regularizer:
            regularizer.begin_epoch(1)
            assert all(torch.equal(a, b) for a, b in zip(step(model, inputs), trained, strict=True))
            assert list(model.state_dict()) == keys
            with torch.no_grad():
                assert torch.equal(model.eval()(*inputs), evaluated)


def test_evaluation_stays_on_the_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch leaves it for modules with hooks."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True), 2)
    model = nn.Sequential(encoder).train()
    states = torch.randn(2, 5, WIDTH)
    calls = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a, **k: calls.append(1) or fused(*a, **k))
    with ADDrop(cross_tuning="off", objective=lambda outputs, inputs: outputs.sum()).attach(model):
        model(states)
        with torch.no_grad():
            model.eval()(states)
    assert len(calls) == 2


def test_detaching_restores_every_module() -> None:
    model, inputs = translator()
    before = {name: (type(module), list(vars(module))) for name, module in model.named_modules()}
    with ADDrop(sites="*", cross_tuning="off").attach(model):
        assert sum("forward" in vars(module) for module in model.modules()) == len(EVERY)
        torch.manual_seed(1)
        regularized = model(*inputs)
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert {name: (type(module), list(vars(module))) for name, module in model.named_modules()} == before
    assert not model._forward_pre_hooks
    for twin in twins:
        torch.manual_seed(1)
        assert torch.equal(twin(*inputs), regularized)
    expected = model(*inputs)
    assert torch.equal(pickle.loads(pickle.dumps(model))(*inputs), expected)
    torch.testing.assert_close(torch.compile(copy.deepcopy(model), backend="eager")(*inputs), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("late", [False, True], ids=["before", "while attached"])
def test_a_parametrized_attention(late: bool) -> None:
    model, states = (
        nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True).train(),
        torch.randn(2, 5, WIDTH),
    )
    module = model.self_attn
    if not late:
        weight_norm(module, "in_proj_weight")
    kind, plain = type(module), model(states)
    method = ADDrop(p=1.0, q=1.0, sites="*", cross_tuning="off", objective=lambda outputs, inputs: outputs.sum())
    with method.attach(model):
        if late:
            weight_norm(module, "in_proj_weight")
        assert not model(states).allclose(plain)
        copy.deepcopy(model)
    assert is_parametrized(module) and (late or type(module) is kind)
    torch.testing.assert_close(model(states), plain)
    torch.testing.assert_close(copy.deepcopy(model)(states), plain)
    remove_parametrizations(module, "in_proj_weight")
    assert type(module) is nn.MultiheadAttention
    torch.testing.assert_close(model(states), plain)


OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "zero key": {"add_zero_attn": True},
    "other widths": {"kdim": 10, "vdim": 12, "batch_first": True},
}


def masks(batched: bool) -> Iterator[dict[str, Tensor]]:
    """Every form of PyTorch's masks for B = 2, T = 5, S = 6: True = masked, or numbers to add."""
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    padding = padding if batched else padding[1]
    causal = torch.ones(5, 6).triu(1).bool()
    numbers = torch.zeros(5, 6).masked_fill(causal, float("-inf")) + torch.randn(5, 6)
    heads = torch.rand((2 if batched else 1) * HEADS, 5, 6) < 0.3
    heads[..., 0] = False
    added = torch.zeros(padding.shape).masked_fill(padding, float("-inf"))
    yield {}
    yield {"key_padding_mask": padding}
    yield {"attn_mask": causal}
    yield {"attn_mask": causal, "is_causal": True}
    yield {"key_padding_mask": padding, "attn_mask": heads}
    yield {"key_padding_mask": added, "attn_mask": numbers}
    yield {"key_padding_mask": added + 0.5}


def attention(options: dict[str, Any], batched: bool = True) -> tuple[nn.MultiheadAttention, list[Tensor], Any]:
    """An attention in training mode, its query, key and value, and its site."""
    torch.manual_seed(2)
    module = nn.MultiheadAttention(WIDTH, HEADS, **options).train()
    place = 0 if module.batch_first else 1
    sizes = (5, WIDTH), (6, module.kdim), (6, module.vdim)
    states = [torch.randn(*size[:place], *([2] if batched else []), *size[place:]) for size in sizes]
    return module, states, find_sites(nn.ModuleDict({"attention": module}), "*")[0]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_regularized_attention_is_pytorchs_where_nothing_is_dropped(options: dict[str, Any], batched: bool) -> None:
    """Outputs and weights (averaged or not), and the gradient attribution against the materialized weights."""
    module, states, site = attention(options, batched)
    for mask in masks(batched):
        for average in (True, False):
            expected, weights = module(*states, **mask, average_attn_weights=average)
            with opened([site]):
                site.ask(keep=torch.ones(1, 1, 1, 1, dtype=torch.bool))
                output, found = module(*states, **mask, average_attn_weights=average)
                bare, nothing = module(*states, **mask, need_weights=False)
            with recording([site]):
                probed = module(*states, **mask, need_weights=False)[0]
                attribution = gradient_attribution(probed.square().sum(), [site])[0]
            assert nothing is None
            for ours in (output, bare, probed):
                torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found, weights, atol=1e-6, rtol=1e-5)
        assert attribution.shape == ((2 if batched else 1), HEADS, *weights.shape[-2:])
        with Materialized() as written_out:
            literal = module(*states, **mask)[0]
        (gradient,) = torch.autograd.grad(literal.square().sum(), written_out.maps)
        torch.testing.assert_close(attribution, gradient.view(attribution.shape), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_dropped_attention_is_the_mean_of_its_valid_values(options: dict[str, Any]) -> None:
    module, states, site = attention(options)
    twin = copy.deepcopy(module)
    with torch.no_grad():  # zero queries: PyTorch's own uniform attention
        (twin.in_proj_weight.chunk(3)[0] if twin.in_proj_weight is not None else twin.q_proj_weight).zero_()
        if twin.in_proj_bias is not None:
            twin.in_proj_bias.chunk(3)[0].zero_()
    for mask in masks(batched=True):
        if any(value.is_floating_point() for value in mask.values() if isinstance(value, Tensor)):
            continue
        expected, weights = twin(*states, **mask)
        with opened([site]):
            site.ask(uniform=lambda call: True)
            for output, found in (module(*states, **mask), module(*states, **mask, need_weights=False)):
                torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
                assert found is None or torch.allclose(found, weights, atol=1e-6)
