"""Models whose parameters are sharded by `torch.distributed.fsdp.fully_shard` (FSDP2).

FSDP2's forward pre-hook gathers a module's parameters, its forward hook frees those of the layers, and the end of every
backward frees the root's too. So a forward of the root that is not called as a module has to pass FSDP2's hooks itself,
and after the probe's backward the root's parameters are gathered once more for the forward that the probe was for.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base import Regularizer

#: of a group of parameters: whether a backward reduces its gradients
_REDUCES = ("reduce_grads", "all_reduce_grads")
_UNUSED = "reduce_scatter_unused_params"


def sharded_modules(model: nn.Module) -> list[Any]:
    """Each module in `model` that `fully_shard` was called on, the outermost first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)] if fsdp else []


def refuse_sharded(regularizer: Regularizer, model: nn.Module) -> None:
    """Refuse what cannot work with the parameters of `model` sharded as they are.

    Raises:
        ValueError: DeepSpeed ZeRO 3; FSDP1; a torch that cannot expect what the method leaves unused; or, once the
            model ran, a part of what is sharded together.
    """
    if any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is sharded by DeepSpeed ZeRO 3, in which {regularizer.name} cannot act; use ZeRO "
            "stage 1 or 2, which keep whole parameters, or torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    flat = any(getattr(parameter, "_fsdp_flattened", False) for parameter in model.parameters())
    if flat or any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is sharded by FullyShardedDataParallel (FSDP1), in which {regularizer.name} "
            "cannot act; shard it by torch.distributed.fsdp.fully_shard (FSDP2; accelerate: fsdp_version=2)"
        )
    modules = sharded_modules(model)
    if not modules:
        return
    regularizer.check_shards(modules)
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


def _groups(modules: list[Any]) -> list[Any]:
    """The groups of parameters of sharded modules; torch had one for each module before it had several."""
    states = [module._get_fsdp_state() for module in modules]
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for ours in groups for group in ours if group is not None]


class Shards:
    """Sharding of an attached model by `fully_shard`, which may come after attaching: it changes the model's class.

    Raises:
        ValueError: see `refuse_sharded`.
    """

    def __init__(self, regularizer: Regularizer, model: nn.Module) -> None:
        refuse_sharded(regularizer, model)
        self.regularizer, self.model = regularizer, model
        self._class: type | None = None
        self._sharded = False
        self._unused: list[tuple[Any, Any]] = []  # groups that expect parameters without a gradient, and did before

    def of_copy(self, regularizer: Regularizer, model: nn.Module) -> Shards:
        """Return the sharding of a copy of the model, which may be half made yet."""
        twin = copy.copy(self)
        twin.regularizer, twin.model, twin._unused = regularizer, model, []
        return twin

    def look(self) -> None:
        """Look the sharding up, in a training forward; of methods that leave parameters unused, let FSDP2 expect it."""
        if self._class is type(self.model):
            return
        self._class = type(self.model)
        refuse_sharded(self.regularizer, self.model)
        modules = sharded_modules(self.model)
        self._sharded = bool(modules)
        if modules and self.regularizer.leaves_unused():  # ranks may differ in it: zeros are reduced
            self._unused += [(group, getattr(group, _UNUSED)) for group in _groups(modules)]
            for group, _ in self._unused:
                setattr(group, _UNUSED, True)

    def remove(self) -> None:
        """Expect what was expected before."""
        for group, before in self._unused:
            setattr(group, _UNUSED, before)
        self._unused, self._class = [], None

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """While open, backwards reduce no gradients: neither zeros, nor what an update has accumulated so far."""
        groups = _groups(sharded_modules(self.model)) if self._sharded else []
        before = [
            (group, {name: getattr(group, name) for name in _REDUCES if hasattr(group, name)}) for group in groups
        ]
        for group, values in before:
            vars(group).update(dict.fromkeys(values, False))
        try:
            yield
        finally:
            for group, values in before:
                vars(group).update(values)

    def gathered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the model's own parameters once more: the end of a probe's backward has freed them."""
        return gathered(self.model, args, kwargs) if self._sharded else (args, kwargs)


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
