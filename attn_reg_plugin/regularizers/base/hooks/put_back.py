"""Contexts that leave nothing behind: buffers, random numbers, modes and dropout of a model are put back after them."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attn_reg_plugin.regularizers.base.sharding import sharded_modules


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Callable[[], None]]:
    """While open, forwards may change the model; afterwards, and at each call of the yielded function, it is put back.

    Buffers, such as running statistics, are copied. Of parameters only those are looked after whose module has hooks
    on its forward: fairseq's quantization noise gives such a module a new weight at every forward. No tensor's version
    counter moves, so that a graph that stands meanwhile stays valid.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone() if can_be_written(buffer) else None)
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


def can_be_written(buffer: Tensor) -> bool:
    """Whether it holds each number once: to a buffer that was expanded nothing writes."""
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
        set_modes(modes)


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Put modules, parents first, into training mode or evaluation, by `train` where their mode is another.

    A module may do more than note its mode, as adapters that are merged in do.
    """
    for module, training in modes:
        if module.training != training:
            module.train(training)


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


@contextmanager
def without_gradients() -> Iterator[None]:
    """Open `torch.no_grad()` within a training step, and drop what the caller's autocast casts in it: earlier versions
    of torch would give such a cast, which has no graph, to the training's own forward."""
    try:
        with torch.no_grad():
            yield
    finally:
        torch.clear_autocast_cache()
