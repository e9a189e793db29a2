"""AttendOut's defender (D-Net): a copy of the model that is trained beside it, without the generator's masks."""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from attn_reg_plugin.regularizers.base.context import Problem
from attn_reg_plugin.regularizers.base.distributed import average_gradients
from attn_reg_plugin.regularizers.base.hooks.put_back import can_be_written, set_modes
from attn_reg_plugin.regularizers.base.outputs import check_scalar


class Defender:
    """D-Net: a copy of the attacker with its regular dropout only, and an optimizer of its own.

    Args:
        attacker: the model, without hooks.
        optimizer: the attacker's, also as Accelerate wraps it; the defender's has the same settings and starts from the
            same state.
        clip_norm: largest gradient norm, 0 = unlimited.

    Attributes:
        model, optimizer: the defender's.
        scaler: of its loss, in fp16; None: the loss is as it is.
    """

    scaler: Any = None
    _batches = 0  # of the update, whose mean is to be taken

    def __init__(self, attacker: nn.Module, optimizer: Optimizer, clip_norm: float = 0.0) -> None:
        optimizer = optimizer.optimizer if type(optimizer).__name__ == "AcceleratedOptimizer" else optimizer
        self.attacker, self.attacker_optimizer, self.clip_norm = attacker, optimizer, clip_norm
        self.model = copy.deepcopy(attacker)
        self.model.zero_grad(set_to_none=True)
        self.optimizer = twin_optimizer(optimizer, attacker, self.model)
        self._hyperparameters = _hyperparameters(optimizer)
        self._hook = optimizer.register_step_pre_hook(self._remember_hyperparameters)

    def _remember_hyperparameters(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Learning rates and the like as the attacker's step uses them: a scheduler may move on before ours."""
        added = optimizer.param_groups[len(self.optimizer.param_groups) :]  # as gradual unfreezing adds them
        for group in twin_groups(added, self.attacker, self.model):
            self.optimizer.add_param_group(group)
        self._hyperparameters = _hyperparameters(optimizer)

    def follow(self) -> None:
        """Train what the attacker trains, and as it does: both may change, as with gradual unfreezing."""
        for ours, theirs in zip(self.model.parameters(), self.attacker.parameters(), strict=True):
            ours.requires_grad_(theirs.requires_grad)
        if self.attacker.training:  # it may be evaluated by now
            modes = {name: module.training for name, module in self.attacker.named_modules()}
            set_modes((module, modes[name]) for name, module in self.model.named_modules() if name in modes)

    def learn(self, problem: Problem, inputs: Any) -> None:
        """Forward and backward on a batch that the attacker has trained on; gradients add up until `step`."""
        self.follow()
        loss = check_scalar("the problem's loss", problem.loss(self.model, inputs).loss)
        counts, divisor = inputs.get("counts", True), getattr(problem, "accumulation", None)
        loss = loss if counts else loss * 0
        if divisor is not None:
            loss = loss / divisor
        elif counts:
            self._batches += 1
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        """Make the optimizer step that the attacker has just made, on the defender's own gradients."""
        for group, settings in zip(self.optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(settings)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if gradients and self._batches > 1:
            torch._foreach_div_(gradients, self._batches)
        self._batches = 0
        average_gradients(self.model)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # which leaves it out if gradients overflowed
            self.scaler.update()
        self.model.zero_grad(set_to_none=True)  # what is trained and not in the optimizer, too

    @torch.no_grad()
    def settle(self, attacker_won: bool) -> None:
        """Copy the winner over the loser, optimizer state included; learning rates and the like stay whose they are."""
        players = (self.attacker, self.attacker_optimizer), (self.model, self.optimizer)
        (winner, winning), (loser, losing) = players if attacker_won else players[::-1]
        ours, theirs = ([*player.parameters(), *player.buffers()] for player in (loser, winner))
        pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if can_be_written(one)]
        torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])
        settings = _hyperparameters(losing)  # the attacker's scheduler may be a step ahead already
        losing.load_state_dict(copy.deepcopy(winning.state_dict()))
        for group, own in zip(losing.param_groups, settings, strict=True):
            group.update(own)

    def close(self) -> None:
        """Take the hook off the attacker's optimizer."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer, and the loss scale if there is one."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None and state.get("scaler") is not None:
            self.scaler.load_state_dict(state["scaler"])


def twin_optimizer(optimizer: Optimizer, model: nn.Module, twin: nn.Module) -> Optimizer:
    """An optimizer of the same class, settings and state for the parameters of a copy of `model`; see `twin_groups`."""
    groups = twin_groups(optimizer.param_groups, model, twin)
    known = inspect.signature(type(optimizer)).parameters  # AdamW's defaults have one that it does not take
    copied = type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items() if name in known})
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return copied


def twin_groups(groups: list[dict[str, Any]], model: nn.Module, twin: nn.Module) -> list[dict[str, Any]]:
    """An optimizer's parameter groups, for the parameters of a copy of `model`.

    Raises:
        ValueError: they hold parameters that are not the model's.
    """
    twins = {id(ours): theirs for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True)}
    if any(id(p) not in twins for group in groups for p in group["params"]):
        raise ValueError("the optimizer holds parameters that are not the attached model's; give one of its own to it")
    return [{**group, "params": [twins[id(p)] for p in group["params"]]} for group in groups]


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def check_copyable(model: nn.Module) -> None:
    """Refuse, by a ValueError, a model whose copy would run parts of the model itself.

    Trainers may replace a module's `forward` by a function that holds the module's own; in a copy of the module that
    function is the same one.
    """
    modules = set(model.modules())
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if forward is not None and _closes_over(forward, modules):
            function = getattr(forward, "__qualname__", type(forward).__qualname__)
            raise ValueError(
                f"AttendOut trains a copy of the model, but the forward of {type(module).__name__} "
                f"({path or 'the model itself'}) was replaced by {function} of "
                f"{getattr(forward, '__module__', 'a module')}, as TRL's trainers do, and runs the model itself in the "
                "copy, too; use another method, such as AD-DROP, or a trainer that leaves the forward as it is"
            )


def _closes_over(value: Any, modules: set[nn.Module], renewed: bool = True, depth: int = 8) -> bool:
    """Whether a function has one of the modules, or a method of one, in its closure, where no copy replaces it.

    Args:
        renewed: whether a copy of the model has copies of what a method or a `partial` is bound to.
    """
    if isinstance(value, nn.Module):
        return not renewed and value in modules
    if depth == 0 or not callable(value):
        return False
    parts: list[tuple[Any, bool]] = []
    if isinstance(value, MethodType):
        parts += [(value.__self__, renewed), (value.__func__, renewed)]
    elif isinstance(value, partial):
        parts += [(held, renewed) for held in (value.func, *value.args, *value.keywords.values())]
    elif not isinstance(value, FunctionType | type):  # an object that is called, such as accelerate's conversions
        parts += [(held, renewed) for held in getattr(value, "__dict__", {}).values()]
    for cell in getattr(value, "__closure__", None) or ():
        try:
            parts.append((cell.cell_contents, False))
        except ValueError:  # it is empty
            continue
    return any(_closes_over(part, modules, again, depth - 1) for part, again in parts)
