"""AttendOut's players: the defender beside the attacker, and the cached batches that the generator is judged on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attn_reg_plugin.regularizers.base import Problem
from attn_reg_plugin.regularizers.generator import Tokens, pack_bits, unpack_bits


@dataclass
class CachedBatch:
    """One forward of the attacker: its tokens, and the packed masks that were drawn for it.

    Attributes:
        update: which update of the round it belonged to, from 0.
        tokens: by stack.
        masks: packed bits by site, with the shapes to unpack them to.
    """

    update: int
    tokens: dict[str, Tokens]
    masks: dict[str, tuple[Tensor, tuple[int, ...]]]

    @classmethod
    def of(cls, update: int, tokens: Mapping[str, Tokens], masks: Mapping[str, Tensor]) -> CachedBatch:
        """Pack what the round's end needs."""
        return cls(update, dict(tokens), {name: (pack_bits(mask), tuple(mask.shape)) for name, mask in masks.items()})

    def mask(self, site: str) -> Tensor:
        """The keep mask of a site, bool (B, T, S)."""
        packed, shape = self.masks[site]
        return unpack_bits(packed, torch.Size(shape))

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, on the CPU; `rank` is the process that keeps the batch."""
        return {
            "rank": rank(),
            "update": self.update,
            "tokens": {k: tuple(tensor.cpu() for tensor in v) for k, v in self.tokens.items()},
            "masks": {k: (packed.cpu(), shape) for k, (packed, shape) in self.masks.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device) -> CachedBatch:
        """The batch that `state_dict` described, on `device`."""
        tokens = {k: Tokens(*(tensor.to(device) for tensor in v)) for k, v in state["tokens"].items()}
        masks = {k: (packed.to(device), tuple(shape)) for k, (packed, shape) in state["masks"].items()}
        return cls(state["update"], tokens, masks)


class Defender:
    """D-Net: a copy of the attacker with its regular dropout only, and an optimizer of its own.

    Args:
        attacker: the model, without hooks.
        optimizer: the attacker's; the defender's has the same settings and starts from the same state.
        clip_norm: largest gradient norm, 0 = unlimited.

    Attributes:
        model, optimizer: the defender's.
    """

    def __init__(self, attacker: nn.Module, optimizer: Optimizer, clip_norm: float = 0.0) -> None:
        self.attacker, self.attacker_optimizer, self.clip_norm = attacker, optimizer, clip_norm
        self.model = copy.deepcopy(attacker)
        self.model.zero_grad(set_to_none=True)
        self.optimizer = twin_optimizer(optimizer, attacker, self.model)
        self._settings = _settings(optimizer)
        self._hook = optimizer.register_step_pre_hook(self._remember_settings)

    def _remember_settings(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Learning rates and the like as the attacker's step uses them: a scheduler may move on before ours."""
        self._settings = _settings(optimizer)

    def learn(self, problem: Problem, inputs: Any) -> None:
        """Forward and backward on a batch that the attacker has trained on; gradients add up until `step`."""
        loss = problem.loss(self.model, inputs).loss
        (loss * 0 if inputs.get("ignore_grad", False) else loss).backward()

    def step(self) -> None:
        """Make the optimizer step that the attacker has just made, on the defender's own gradients."""
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
        average_gradients(self.model)
        if self.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def settle(self, attacker_won: bool) -> None:
        """Copy the winner over the loser, optimizer state included; learning rates and the like stay whose they are."""
        players = (self.attacker, self.attacker_optimizer), (self.model, self.optimizer)
        (winner, winning), (loser, losing) = players if attacker_won else players[::-1]
        for ours, theirs in zip(loser.parameters(), winner.parameters(), strict=True):
            ours.copy_(theirs)
        for ours, theirs in zip(loser.buffers(), winner.buffers(), strict=True):
            ours.copy_(theirs)
        settings = _settings(losing)  # the attacker's scheduler may be a step ahead already
        losing.load_state_dict(copy.deepcopy(winning.state_dict()))
        for group, own in zip(losing.param_groups, settings, strict=True):
            group.update(own)

    def close(self) -> None:
        """Take the hook off the attacker's optimizer."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def twin_optimizer(optimizer: Optimizer, model: nn.Module, twin: nn.Module) -> Optimizer:
    """An optimizer of the same class, settings and state for the parameters of a copy of `model`.

    Raises:
        ValueError: the optimizer holds parameters that are not the model's.
    """
    twins = {id(ours): theirs for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True)}
    if any(id(p) not in twins for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer holds parameters that are not the attached model's; give one of its own to it")
    groups = [{**group, "params": [twins[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    known = inspect.signature(type(optimizer)).parameters  # AdamW's defaults have one that it does not take
    copied = type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items() if name in known})
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return copied


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def world_size() -> int:
    """Data-parallel processes; 1 where torch.distributed is not in use."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def rank() -> int:
    """Which of the data-parallel processes this is, from 0."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def average(tensor: Tensor) -> Tensor:
    """The mean over data-parallel processes, in place."""
    if world_size() > 1:
        torch.distributed.all_reduce(tensor)
        tensor /= world_size()
    return tensor


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over data-parallel processes."""
    if world_size() > 1:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                average(parameter.grad)


def from_first_rank(tensor: Tensor) -> Tensor:
    """The first process's value on every process, in place."""
    if world_size() > 1:
        torch.distributed.broadcast(tensor, 0)
    return tensor


def object_from_first_rank(value: Any) -> Any:
    """The first process's value, of any type that can be pickled, on every process."""
    if world_size() == 1:
        return value
    holder = [value]
    torch.distributed.broadcast_object_list(holder, 0)
    return holder[0]


def gathered_on_first_rank(ours: list[Any]) -> list[Any]:
    """On the first process, the others' lists, joined; nothing on these."""
    if world_size() == 1:
        return []
    lists = [None] * world_size() if rank() == 0 else None
    torch.distributed.gather_object(ours, lists, 0)
    return [value for theirs in lists[1:] for value in theirs] if lists else []


def on_cpu(value: Any) -> Any:
    """The same containers with their tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: on_cpu(held) for key, held in value.items()}
    return type(value)(on_cpu(held) for held in value) if isinstance(value, list | tuple) else value


@contextmanager
def evaluating(model: nn.Module):
    """Evaluation mode without gradients; every module's mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
