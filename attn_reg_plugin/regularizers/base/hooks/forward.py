"""The forward that a method sees before it happens, and may run by itself: its arguments, by name and copied."""

import copy
import inspect
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.graphs import uncompiled
from attn_reg_plugin.attention.selection import Backend
from attn_reg_plugin.regularizers.base.context import Supplied
from attn_reg_plugin.regularizers.base.sharding import run_forward


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes."""
    parameter = next(model.parameters())
    mesh = getattr(parameter, "device_mesh", None)  # a shard may be kept on the CPU between forwards
    return parameter.device if mesh is None else torch.empty(0, device=mesh.device_type).device


@dataclass
class Forward:
    """A forward of the model that is about to happen.

    Attributes:
        model: the attached model.
        args, kwargs: as it was called.
        supplied: what a face told of the batch.
        described: what the backends read off the arguments, by the names of `Supplied` where they have one.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    supplied: Supplied = field(default_factory=Supplied)
    described: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        """Run the forward itself, without the model's hooks (but FSDP2's), on copies of what it may change."""
        args, kwargs = own_copy((self.args, self.kwargs))
        return run_forward(self.model, args, kwargs)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return device_of(self.model)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with what dictionaries among them hold."""
        try:
            named = dict(inspect.signature(uncompiled(self.model).forward).bind(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):
            named = dict(self.kwargs)
        extra = {k: v for value in named.values() if isinstance(value, Mapping) for k, v in value.items()}
        return {**extra, **named}

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments by name; over them what was described, and over that what was supplied."""
        return {**self.arguments, **self.described, **self.supplied.named()}


def described(backends: Iterable[Backend], forward: Forward) -> dict[str, Any]:
    """Read the objective's inputs off the model's arguments, by every backend that can; the first one's word wins."""
    named, found = forward.arguments, {}
    for backend in backends:
        if hasattr(backend, "describe"):
            found = {**backend.describe(forward.model, named), **found}
    return found


@contextmanager
def ready_for_probe(backends: Iterable[Backend], model: nn.Module) -> Iterator[None]:
    """While open, every backend has the model ready for the probe."""
    with ExitStack() as stack:
        for backend in backends:
            if hasattr(backend, "probing"):
                stack.enter_context(backend.probing(model))
        yield


def own_copy(value: Any) -> Any:
    """The same arguments with containers and tensor-holding objects of their own.

    Tensors among the arguments and in containers stay the same ones; those inside other objects, such as the keys and
    values of a cache, are copied, without their graph.
    """
    return _copied(value, inside=False, memo={})


def _copied(value: Any, inside: bool, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        made = value.detach().clone() if inside else value
    elif type(value) in (list, tuple, set):
        made = type(value)(_copied(held, inside, memo) for held in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        made = type(value)(*(_copied(held, inside, memo) for held in value))
    elif isinstance(value, dict | UserDict):
        made = memo[id(value)] = copy.copy(value)
        for key, held in value.items():
            made[key] = _copied(held, inside, memo)
    elif _holds_tensors(value, set()):
        made = memo[id(value)] = copy.copy(value)
        vars(made).update({name: _copied(held, True, memo) for name, held in vars(value).items()})
    else:
        made = value
    memo[id(value)] = made
    return made


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether an object has tensors in its attributes, however deep; modules, types and functions don't count."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, Tensor):
        return True
    if isinstance(value, list | tuple | set) or type(value) is dict:
        return any(_holds_tensors(held, seen) for held in (value.values() if type(value) is dict else value))
    # mappings such as model outputs hold what they were given, as dicts do; only their tensors' owners change them
    if isinstance(value, nn.Module | type | Mapping) or inspect.isroutine(value):
        return False
    return any(_holds_tensors(held, seen) for held in getattr(value, "__dict__", {}).values())
