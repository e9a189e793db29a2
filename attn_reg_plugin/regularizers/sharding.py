"""Models whose parameters are sharded by `torch.distributed.fsdp.fully_shard` (FSDP2).

FSDP2's forward pre-hook gathers a module's parameters, its forward hook frees those of the layers, and the end of every
backward frees the root's too. So a forward of the root that is not called as a module has to pass FSDP2's hooks itself,
and after the probe's backward the root's parameters are gathered once more for the forward that the probe was for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from attn_reg_plugin.attention.sites import AttentionSite
    from attn_reg_plugin.regularizers.base import Regularizer

#: of a group of parameters: whether a backward reduces its gradients
_REDUCES = ("reduce_grads", "all_reduce_grads")
_UNUSED = "reduce_scatter_unused_params"


def _fsdp_class(name: str) -> type:
    """A class of torch's FSDP; without any instance where FSDP was not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None) or type("NotImported", (), {})


def sharded_modules(model: nn.Module) -> list[Any]:
    """Each module in `model` that `fully_shard` was called on, the outermost first."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    kind = _fsdp_class("FSDPModule")
    return [module for module in model.modules() if isinstance(module, kind)]


def refuse_sharded(regularizer: Regularizer, model: nn.Module) -> None:
    """Refuse what cannot work with the parameters of `model` sharded as they are.

    Raises:
        ValueError: DeepSpeed ZeRO 3; FSDP1; a method that cannot act on sharded parameters; or, once the model ran, a
            part of what is sharded together.
    """
    if any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is sharded by DeepSpeed ZeRO 3, in which {regularizer.name} cannot act; use ZeRO "
            "stage 1 or 2, which keep whole parameters, or torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if "torch.distributed.fsdp" not in sys.modules:
        return
    flat = any(getattr(parameter, "_fsdp_flattened", False) for parameter in model.parameters())
    if flat or any(isinstance(module, _fsdp_class("FullyShardedDataParallel")) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is sharded by FullyShardedDataParallel (FSDP1), in which {regularizer.name} "
            "cannot act; shard it by torch.distributed.fsdp.fully_shard (FSDP2; accelerate: fsdp_version=2)"
        )
    modules = sharded_modules(model)
    if not modules:
        return
    if regularizer.unsharded:
        raise ValueError(
            f"{regularizer.name} cannot act on a model whose parameters are sharded by fully_shard: "
            f"{regularizer.unsharded}; use data parallel training, or another method such as ad_drop"
        )
    if regularizer.leaves_unused() and not hasattr(modules[0], f"set_{_UNUSED}"):
        raise ValueError(
            f"{regularizer.name} leaves some parameters without a gradient, which FSDP2 of torch {torch.__version__} "
            "cannot expect; use a torch whose FSDPModule has set_reduce_scatter_unused_params, or another method"
        )
    if all(module._get_fsdp_state()._is_root is False for module in modules):
        raise ValueError(
            f"{regularizer.name} is attached to a {type(model).__name__} inside the module that fully_shard was called "
            "on last; attach to that module, which is the one that is called"
        )


def shards_of(
    regularizer: Regularizer, model: nn.Module, sites: list[AttentionSite]
) -> tuple[list[Any], list[Expectation]]:
    """Each module in `model` that `fully_shard` was called on, and what to remove on detaching.

    Raises:
        ValueError: see `refuse_sharded` and `refuse_inner_shards`.
    """
    refuse_sharded(regularizer, model)
    modules = sharded_modules(model)
    if modules:
        refuse_inner_shards(regularizer, model, sites)
    return modules, [Expectation(modules)] if modules and regularizer.leaves_unused() else []


def refuse_inner_shards(regularizer: Regularizer, model: nn.Module, sites: list[AttentionSite]) -> None:
    """Refuse to leave out layers in which modules are sharded by themselves: ranks that run them would wait for ever.

    Raises:
        ValueError: a layer holds such a module.
    """
    from attn_reg_plugin.regularizers.layers import layers_of

    if "layer" not in (regularizer.slots or ()):
        return
    for layer in layers_of(model, sites):
        inner = [module for module in sharded_modules(layer.module) if module is not layer.module]
        if inner:
            raise ValueError(
                f"{regularizer.name} leaves out the layer {layer.path}, in which {type(inner[0]).__name__} is "
                "sharded by itself: ranks that run it would wait for those that don't; call fully_shard on whole layers"
            )


def _groups(modules: list[Any]) -> list[Any]:
    """The groups of parameters of sharded modules; torch had one for each module before it had several."""
    states = [module._get_fsdp_state() for module in modules]
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for ours in groups for group in ours if group is not None]


class Expectation:
    """Zeros are reduced for parameters without a gradient: ranks may differ in what they leave out. Until `remove`."""

    def __init__(self, modules: list[Any]) -> None:
        self._before = [(group, getattr(group, _UNUSED)) for group in _groups(modules)]
        for group, _ in self._before:
            setattr(group, _UNUSED, True)

    def remove(self) -> None:
        """Expect what was expected before."""
        for group, value in self._before:
            setattr(group, _UNUSED, value)


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """While open, backwards reduce no gradients: neither zeros, nor what an update has accumulated so far."""
    groups = _groups(sharded_modules(model))
    before = [(group, {name: getattr(group, name) for name in _REDUCES if hasattr(group, name)}) for group in groups]
    for group, values in before:
        vars(group).update(dict.fromkeys(values, False))
    try:
        yield
    finally:
        for group, values in before:
            vars(group).update(values)


def _is_theirs(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(("torch.distributed.fsdp", "torch.distributed._compos"))


def gathered(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, once FSDP2's hooks have gathered the parameters of `model` itself, if it is sharded."""
    for hook in filter(_is_theirs, list(model._forward_pre_hooks.values())):
        args, kwargs = hook(model, args, kwargs)
    return args, kwargs


def run_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's forward, with no hooks of its own but FSDP2's."""
    args, kwargs = gathered(model, args, kwargs)
    outputs = model.forward(*args, **kwargs)
    for hook in filter(_is_theirs, list(model._forward_hooks.values())):
        outputs = hook(model, args, outputs)
    return outputs
