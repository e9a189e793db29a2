"""A forward that leaves nothing behind: its arguments, and the state of model and random numbers put back after it."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.sites import Backend
from attn_reg_plugin.regularizers.base.context import Supplied
from attn_reg_plugin.regularizers.base.sharding import run_forward, sharded_modules


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
        parameter = next(self.model.parameters())
        mesh = getattr(parameter, "device_mesh", None)  # a shard may be kept on the CPU between forwards
        return parameter.device if mesh is None else torch.empty(0, device=mesh.device_type).device

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with what dictionaries among them hold."""
        try:
            named = dict(inspect.signature(self.model.forward).bind(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):
            named = dict(self.kwargs)
        extra = {k: v for value in named.values() if isinstance(value, dict) for k, v in value.items()}
        return {**extra, **named}

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments by name; over them what was described, and over that what was supplied."""
        return {**self.arguments, **self.described, **self.supplied.named()}


def described(
    backends: Iterable[Backend], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Read the objective's inputs off the model's arguments, by every backend that can."""
    found: dict[str, Any] = {}
    for backend in backends:
        if hasattr(backend, "describe"):
            found = {**backend.describe(model, args, kwargs), **found}
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
    elif type(value) is dict:
        made = memo[id(value)] = {}
        made.update((key, _copied(held, inside, memo)) for key, held in value.items())
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


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Callable[[], None]]:
    """While open, forwards may change the model; afterwards, and at each call of the yielded function, it is put back.

    Buffers, such as running statistics, are copied. Of parameters only those are looked after whose module has hooks
    on its forward: fairseq's quantization noise gives such a module a new weight at every forward. No tensor's version
    counter moves, so that a graph that stands meanwhile stays valid.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone() if _can_be_written(buffer) else None)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not nn.parameter.is_lazy(buffer)
    ]
    sharded = set(sharded_modules(model))  # whose parameters are others' business
    hooked = [m for m in model.modules() if (m._forward_pre_hooks or m._forward_hooks) and m not in sharded]
    data = [
        (p, p.data) for m in hooked for p in m._parameters.values() if p is not None and not nn.parameter.is_lazy(p)
    ]

    def put_back() -> None:
        for module, name, buffer, saved in buffers:
            module._buffers[name] = buffer
            if saved is not None:
                buffer.data.copy_(saved)
        for parameter, before in data:
            if parameter.data_ptr() != before.data_ptr():
                parameter.data = before

    try:
        yield put_back
    finally:
        put_back()


def _can_be_written(buffer: Tensor) -> bool:
    """A buffer that was expanded shows the same number at several places: nothing writes to it."""
    places = zip(buffer.shape, buffer.stride(), strict=True) if buffer.layout == torch.strided else [(2, 0)]
    return all(n < 2 or stride > 0 for n, stride in places)


def remember_randomness(device: torch.device) -> Callable[[], None]:
    """Where PyTorch's (on CUDA, of all devices), Python's and numpy's random numbers are, as a function that puts them
    back there."""
    numpy, cuda = sys.modules.get("numpy"), device.type == "cuda"
    state, python = torch.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if cuda else []
    numbers = None if numpy is None else numpy.random.get_state()

    def put_back() -> None:
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state_all(devices)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numbers)

    return put_back


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """While open, draws count for nothing, see `remember_randomness`."""
    put_back = remember_randomness(device)
    try:
        yield
    finally:
        put_back()


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """While open, every module is in evaluation mode; then each has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model's dropout modules drop nothing; everything else stays in training mode.

    Their `p` is zeroed as well as their mode changed: attention modules read it directly. So is every number that a
    module keeps as a dropout of its own, to give it to `torch.nn.functional.dropout`.
    """
    zeroed = []
    for module in model.modules():
        if "Dropout" in type(module).__name__ and hasattr(module, "p"):
            zeroed += [(module, "training", False), (module, "p", 0.0)]
        numbers = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        zeroed += [(module, name, 0.0) for name in numbers]
    before = [(module, name, getattr(module, name)) for module, name, _ in zeroed]
    for module, name, value in zeroed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
