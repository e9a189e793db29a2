"""HiddenCut cuts the output of the feed-forward network's last map, and of no other narrow map of the layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.selection import all_sites
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.hidden_cut import feed_forward_of
from tests.attention.tiny_model import SIZE, TinyClassifier, TinyTranslator, tokens

IDS = tokens([6, 3, 5], 6, seed=4)


class Adapted(nn.Module):
    """A linear map with a low-rank one beside it, as PEFT has it."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        inner = base.base_layer if isinstance(base, Adapted) else base
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inner.in_features, rank)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, inner.out_features)})

    def forward(self, x: Tensor) -> Tensor:
        """Their sum."""
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapt(layer: nn.Module, rank: int, times: int = 1) -> None:
    """Every linear map of a layer."""
    for path in [path for path, module in layer.named_modules() if isinstance(module, nn.Linear)]:
        owner, _, name = path.rpartition(".")
        for _ in range(times):
            owned = layer.get_submodule(owner)
            owned[int(name)] = Adapted(owned[int(name)], rank)


def with_part(name: str, part: nn.Module) -> Callable[[nn.Module], None]:
    """Gives a layer one more part, behind its feed-forward network."""
    return lambda layer: setattr(layer, name, part)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "plain": lambda layer: None,
    "LoRA": lambda layer: adapt(layer, 2),
    "LoRA as wide as the model": lambda layer: adapt(layer, SIZE),
    "LoRA on LoRA": lambda layer: adapt(layer, 2, times=2),
    "a gate": with_part("gate", nn.Linear(SIZE, 1)),
    "a bottleneck of a language": with_part("adapters", nn.ModuleDict({"de": nn.Linear(SIZE, 4)})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_all_of_what_the_network_gives_is_cut(change: str) -> None:
    torch.manual_seed(5)
    model = TinyClassifier(0.0).train()
    outputs: list[Tensor] = []
    for layer in model.encoder.layers:
        CHANGES[change](layer)
        layer.feed_forward.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    regularizer = build("hidden_cut", cut=1.0, top=0.0)
    with regularizer.attach(model):
        regularizer.loss(lambda b: model(b).logsumexp(-1).mean(), IDS)
    zero = sum(int((output == 0).all(-1).sum()) for output in outputs)
    assert regularizer.statistics.take()["tokens_cut"] == zero > 0
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_part("shared_expert", nn.Linear(16, SIZE)), r"mixture of experts \(shared_expert\)"),
        (with_part("mlp", type("TinyExperts", (nn.Module,), {})()), r"mixture of experts \(mlp\)"),
        (
            with_part("other", nn.Sequential(nn.Linear(SIZE, 16), nn.Linear(16, SIZE))),
            r"has several maps .* \(encoder.layers.0.feed_forward.3, encoder.layers.0.other.1\)",
        ),
        (lambda layer: layer.feed_forward.__setitem__(3, nn.Identity()), "has no feed-forward network"),
    ],
)
def test_a_layer_without_one_network_is_refused(change: Callable[[nn.Module], None], said: str) -> None:
    model = TinyClassifier()
    change(model.encoder.layers[0])
    with pytest.raises(ValueError, match=f"encoder.self.0. .*{said}"):
        build("hidden_cut").attach(model)


def test_what_comes_ahead_of_the_attention_and_other_attentions_do_not_count() -> None:
    """A Conformer has a network on either side; a cross-attention's maps may narrow, too."""
    model = TinyTranslator()
    for stack in (model.encoder, model.decoder):
        layer = stack.layers[0]
        parts = dict(layer.named_children())
        for name in parts:
            delattr(layer, name)
        layer.ahead = nn.Sequential(nn.Linear(SIZE, 16), nn.Linear(16, SIZE))
        for name, part in parts.items():
            layer.add_module(name, part)
    model.decoder.layers[0].attentions[1].projections[3] = nn.Linear(16, SIZE)
    every = all_sites(model)
    for site in every:
        if site.kind == "self":
            layer = model.get_submodule(site.path.partition(".attentions")[0])
            assert feed_forward_of(model, site, every) is layer.feed_forward[3]


def test_a_forward_that_passes_the_network_by_is_reported() -> None:
    """Here it is a kernel that takes the weights alone."""

    class Fused(nn.Sequential):
        def forward(self, x: Any) -> Tensor:
            return nn.functional.linear(self[1](self[0](x)), self[3].weight, self[3].bias)

    model = TinyClassifier().train()
    model.encoder.layers[1].feed_forward = Fused(*model.encoder.layers[1].feed_forward)
    regularizer = build("hidden_cut")
    with regularizer.attach(model), pytest.raises(RuntimeError, match=r"ran encoder\.self\[1\] without the module"):
        regularizer.loss(lambda b: model(b).logsumexp(-1).mean(), IDS)
    with build("hidden_cut", sites="encoder.self[0]").attach(model) as one:
        model.encoder.skip = {0}  # as LayerDrop does
        one.loss(lambda b: model(b).logsumexp(-1).mean(), IDS)
