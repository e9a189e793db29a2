"""Several data-parallel ranks, each with a share of the batch; everything is a no-op in a single one."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Result = TypeVar("Result")


def world_size() -> int:
    """The number of data-parallel ranks; 1 where torch.distributed is not in use."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def average(tensor: Tensor) -> Tensor:
    """The mean over data-parallel ranks, in place."""
    if world_size() > 1:
        tensor /= world_size()  # first, as data parallel training does: in fp16 the sum may overflow
        torch.distributed.all_reduce(tensor)
    return tensor


def waits_for_gradients(model: nn.Module) -> bool:
    """Whether data parallel training of `model`, as wrapped, waits for the gradient of every parameter."""
    wrapped = (one for one in model.modules() if isinstance(one, DistributedDataParallel))
    return any(not one.find_unused_parameters for one in wrapped)


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over data-parallel ranks."""
    if world_size() > 1:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                average(parameter.grad)


def from_first_rank(tensor: Tensor) -> Tensor:
    """Rank 0's value on every rank, in place."""
    if world_size() > 1:
        torch.distributed.broadcast(tensor, 0)
    return tensor


def object_from_first_rank(value: Any) -> Any:
    """Rank 0's value, of any type that can be pickled, on every rank."""
    if world_size() == 1:
        return value
    holder = [value]
    torch.distributed.broadcast_object_list(holder, 0)
    return holder[0]


def done_by_first_rank(function: Callable[[], Result]) -> Result:
    """Call a function on rank 0; every rank gets what it returns, or raises the ValueError that it raised."""
    found: Any = None
    if rank() == 0:
        try:
            found = function()
        except ValueError as refused:
            found = refused
    found = object_from_first_rank(found)
    if isinstance(found, ValueError):
        raise found
    return found


def gathered_on_first_rank(ours: Iterable[Any]) -> list[Any]:
    """On rank 0 the other ranks' lists, joined; on the other ranks an empty list."""
    if world_size() == 1:
        return []
    lists = [None] * world_size() if rank() == 0 else None
    torch.distributed.gather_object(list(ours), lists, 0)
    return [value for theirs in lists[1:] for value in theirs] if lists else []
