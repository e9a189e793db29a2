"""Sites in Hugging Face models: every module that calls transformers' attention interface, and some ordinary ones.

While a site of a model is open, its configuration names an attention function of ours. It runs the model's own one
until the site has something to do, and so does our mask function, so an idle site costs a look-up and changes no bit.
Families that call no interface (DeBERTa, MPNet) are reached by `ordinary`; those of a kind share a file here.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from attn_reg_plugin.attention.graphs import uncompiled
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.backends.huggingface.attention import (
    ORIGINALS,
    REGISTERED,
    OpenSites,
    asks_by_name,
    interface_of,
    open_sites,
    original_function,
    runs_open_sites,
)
from attn_reg_plugin.backends.huggingface.inputs import decoder_ids, described
from attn_reg_plugin.backends.huggingface.modules import causal_parts, outermost, warn_of_uncovered
from attn_reg_plugin.backends.huggingface.ordinary import ordinary
from attn_reg_plugin.backends.pytorch import ReplacingBackend, layer_of, replaced_site

CROSS = re.compile(r"cross_?att|encoder_attn|EncDec")
DECODER = re.compile(r"(^|\.)decoder\.")

#: modules that several layers share, by class: the end of the module's path after that of its caller, with its group
#: and its place in the group, and the layers that it serves then, in the order of its calls
SHARED: dict[str, tuple[str, Callable[[PreTrainedConfig, int, int], list[int]]]] = {
    "AlbertAttention": (
        r"\.?albert_layer_groups\.(\d+)\.albert_layers\.(\d+)\.attention$",
        lambda config, group, place: [
            layer * config.inner_group_num + place
            for layer in range(config.num_hidden_layers)
            if int(layer / (config.num_hidden_layers / config.num_hidden_groups)) == group
        ],
    ),
}


class HuggingFaceBackend(ReplacingBackend):
    """Finds and opens the attention of transformers models; see `Backend`."""

    computation = staticmethod(ordinary)

    def __init__(self) -> None:
        #: of each shared module, what calls it once per layer, and the layers in that order
        self.shared: dict[nn.Module, tuple[nn.Module, list[int]]] = {}

    def find(self, model: nn.Module) -> list[AttentionSite]:
        """The attention of every transformers model in `model`: stack, kind and layer from the module's path.

        A path with `decoder.` and every causal or cross attention is in the decoder; the layer is the first number.
        Attention that does not go through transformers' interface is named in a warning, once.
        """
        sites: list[AttentionSite] = []
        causal, start = causal_parts(model), outermost(model)
        for path, module in model.named_modules():
            inner, how = path.removeprefix(start(path)), ordinary(module)
            config = getattr(module, "config", None)
            if how is None and (interface_of(module) is None or not isinstance(config, PreTrainedConfig)):
                continue
            cross = CROSS.search(inner) is not None
            own = bool(getattr(module, "is_causal" if how is None else "is_decoder", False))
            decoder = cross or causal(path) or own or DECODER.search(inner) is not None
            opened = {site.layer: site for site in getattr(open_sites(module), "sites", ())}
            for layer in self._layers(model, path, inner, module):
                sites.append(opened.get(layer) or self.site(path, module, decoder, cross, layer))
        if sites:
            warn_of_uncovered(model, {site.path for site in sites})
        return sites

    def _layers(self, model: nn.Module, path: str, inner: str, module: nn.Module) -> list[int]:
        """The layers that a module serves: one, unless layers share it."""
        ending, layers = SHARED.get(type(module).__name__, ("$^", None))
        place = re.search(ending, path)
        if layers is None or place is None:
            return [layer_of(inner)]
        caller = model.get_submodule(path[: place.start()])
        self.shared[module] = caller, layers(module.config, *(int(number) for number in place.groups()))
        return self.shared[module][1]

    def refusal(self, model: nn.Module) -> str | None:
        """Why a transformers model has no site; None for other models."""
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                return (
                    f"{type(module).__name__}'s attention does not go through transformers' attention interface; use a "
                    "model whose attention does, such as ELECTRA, RoBERTa or ModernBERT, or give its attention modules "
                    "an AttentionSite and let them call regularized_attention"
                )
        return None

    def open(self, site: AttentionSite) -> None:
        """Name our function in the module's configuration and put the site into the module.

        Raises:
            ValueError: the model runs another attention than `sdpa` or `eager`, or asks for these names itself.
        """
        if ordinary(site.module) is not None:
            return super().open(site)
        module, config = site.module, site.module.config
        original = ORIGINALS.get(config._attn_implementation, config._attn_implementation)
        upcast = original == "eager" and getattr(module, "reorder_and_upcast_attn", False)
        if asks_by_name(module):
            raise ValueError(
                f"{site.name} ({site.path}): {type(module).__name__} masks keys itself where its attention is called "
                "'eager' or 'sdpa', which cannot be regularized; choose other sites"
            )
        if original not in REGISTERED or upcast or original_function(module, original) is None:
            option = "reorder_and_upcast_attn=True" if upcast else f"attn_implementation={original!r}"
            raise ValueError(
                f"{site.name} ({site.path}) runs with {option}, which cannot be regularized; load the model with "
                "attn_implementation='sdpa'"
            )
        held = open_sites(module) or OpenSites(module, original, *self.shared.get(module, ()))
        held.sites.append(site)
        config._attn_implementation_internal = REGISTERED[original]  # the public setter would reach into sub-configs

    def close(self, site: AttentionSite) -> None:
        """Take the site out, and after the last one of a configuration name the model's own function again."""
        if replaced_site(site.module) is not None:
            return super().close(site)
        module, config = site.module, site.module.config
        held = open_sites(module)
        held.sites.remove(site)
        if held.sites:
            return
        held.remove(module)
        if not runs_open_sites(config):
            name = config._attn_implementation
            config._attn_implementation_internal = ORIGINALS.get(name, name)

    def passed_by(self, site: AttentionSite) -> None:
        """The site's layer was left out: the next call of a module that layers share is the next layer's."""
        held = open_sites(site.module)
        if held is not None and held.layers is not None:
            held.calls += 1

    def describe(self, model: nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
        """Read what `described` finds, and the ids of a decoder that its model makes, off the forward's arguments."""
        model = uncompiled(model)
        ids = decoder_ids(model, named)
        return described(model, named) | ({} if ids is None else {"decoder_input_ids": ids})

    @contextmanager
    def probing(self, model: nn.Module) -> Iterator[None]:
        """While open, activation checkpointing is PyTorch's non-reentrant one.

        The reentrant one runs layers without a graph and rebuilds it inside `backward`, so nothing can be
        differentiated with respect to what a layer computes.
        """
        with ExitStack() as stack:
            for module in model.modules():
                function = vars(module).get("_gradient_checkpointing_func")
                if not _reentrant(function):
                    continue
                stack.callback(setattr, module, "_gradient_checkpointing_func", function)
                args, keywords = getattr(function, "args", ()), getattr(function, "keywords", {})
                module._gradient_checkpointing_func = partial(checkpoint, *args, **{**keywords, "use_reentrant": False})
            yield


def _reentrant(function: Callable | None) -> bool:
    """Whether it is PyTorch's reentrant form of checkpointing, which is also what PyTorch takes where none is named."""
    called, keywords = getattr(function, "func", function), getattr(function, "keywords", {})
    if keywords.get("use_reentrant") is not None:
        return keywords["use_reentrant"]
    return called is checkpoint or str(getattr(called, "__module__", "")).startswith("transformers.")


@contextmanager
def as_unattached(model: nn.Module) -> Iterator[None]:
    """While open, the configurations of an attached model name their own attention, so that it can be saved as it is.

    Some configurations are refused as they are saved if they name a function of ours. Run no forward meanwhile.
    """
    configs = {id(m.config): m.config for m in model.modules() if open_sites(m) is not None}
    ours = [(config, config._attn_implementation) for config in configs.values()]
    for config, name in ours:
        config._attn_implementation_internal = ORIGINALS.get(name, name)
    try:
        yield
    finally:
        for config, name in ours:
            config._attn_implementation_internal = name


BACKEND = HuggingFaceBackend

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
