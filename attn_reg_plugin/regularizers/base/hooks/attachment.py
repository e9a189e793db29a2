"""The hooks of a regularizer on a model, and what passes through them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from attn_reg_plugin.attention.calls import Calls
from attn_reg_plugin.attention.graphs import outside_graphs
from attn_reg_plugin.attention.selection import Backend, all_sites, check_model, find_sites
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base.compatibility import (
    check_beside,
    check_free,
    refuse_replica,
    refuse_script,
    refuse_several_devices,
)
from attn_reg_plugin.regularizers.base.hooks.forward import Forward, described
from attn_reg_plugin.regularizers.base.hooks.put_back import same_randomness, unchanged
from attn_reg_plugin.regularizers.base.hooks.unreached import Reach
from attn_reg_plugin.regularizers.base.options import options_of
from attn_reg_plugin.regularizers.base.sharding import Shards
from attn_reg_plugin.regularizers.base.statistics import Statistics

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base.regularizer import Regularizer

#: masks that are wanted after the update that they were made for
RELEASED = (
    "{method} freed its masks at the end of the update, and activation checkpointing runs the update's forward once "
    "more; call end_update() after the last backward"
)


class State(Enum):
    """State of an attachment, see its table."""

    NEW = auto()
    READY = auto()
    PREPARING = auto()
    REGULARIZED = auto()


class Attachment:
    """Hooks of one regularizer on one model; a context manager that removes them.

    Only forwards of the model in training mode with gradients count. Masks stay on the sites until the next of them, or
    `end_update`: activation checkpointing runs the forward again in the backward.

    | state       | event                                   | what is done              | next state         |
    |-------------|-----------------------------------------|---------------------------|--------------------|
    | NEW, READY  | a forward begins and is due             | sites cleared             | PREPARING          |
    | NEW         | a forward begins and isn't due          | sites cleared, rehearsal  | PREPARING, READY   |
    | READY       | a forward begins and isn't due          | sites cleared             | READY              |
    | PREPARING   | the method has put its requests on      |                           | REGULARIZED        |
    | PREPARING   | the method raises                       | sites cleared             | READY              |
    | PREPARING   | the method runs the model               | nothing                   | PREPARING          |
    | REGULARIZED | the forward ends, or raises             | `after_forward`           | READY              |
    | any         | a model around this one is prepared     | sites cleared             | PREPARING, then it |
    | any         | `end_update`                            | masks freed               | the same           |

    Attributes:
        sites, backends: the attached sites; each kind of backend that knows the model.
        reach: forwards and updates that came.
    """

    def __init__(self, regularizer: Regularizer, model: nn.Module) -> None:
        self.regularizer, self.model, self.state = regularizer, model, State.NEW
        check_model(model)
        refuse_several_devices(regularizer, model)
        check_beside(regularizer, (one.regularizer for one in attachments_of(model)))
        check_alone(regularizer, model)
        self.shards = Shards(regularizer, model)
        self.sites = find_sites(model, regularizer.sites) if regularizer.needs_sites else []
        self.backends = _backends(self.sites if regularizer.needs_sites else _known_sites(model))
        self.reach = Reach(regularizer.name, model, self.sites)
        self._install()

    def _install(self) -> None:
        """Open the sites and hook the model; all of it or, on an error, nothing."""
        self.handles: list[Any] = []
        opened: list[AttentionSite] = []
        try:
            for site in self.sites:
                check_free(self.regularizer, site)
                if not site.attached:
                    site.backend.open(site)
                    site.calls = Calls()
                site.attached += 1
                opened.append(site)
            # every regularizer of the model clears its sites before any of them probes
            self.handles += [
                self.model.register_forward_pre_hook(self._begin_forward, prepend=True),
                self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                self.model.register_forward_hook(self._end_forward, always_call=True),
            ]
            self.handles += self.regularizer.hooks(self.model, self.sites)
            vars(self.model)["__prepare_scriptable__"] = refuse_script
        except BaseException:
            self._uninstall(opened)
            raise

    def _uninstall(self, opened: list[AttentionSite]) -> None:
        for handle in self.handles:
            handle.remove()
        if not attachments_of(self.model):
            vars(self.model).pop("__prepare_scriptable__", None)
        for site in opened:
            site.attached -= 1
            if not site.attached:
                site.backend.close(site)

    # -- a forward --------------------------------------------------------------------------------------------------

    @outside_graphs
    def _begin_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        refuse_replica(self.regularizer, model)
        if self.state is State.PREPARING:
            return
        self.reach.begin_forward()
        if model.training and torch.is_grad_enabled():
            self.clear()

    @outside_graphs
    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.state is State.PREPARING or not model.training or not torch.is_grad_enabled():
            return None
        self.shards.look()
        self.reach.expect_announcement()
        due = self.regularizer.due()
        self.reach.training_forward(due)
        if due or self.state is State.NEW:
            with self.shards.without_reduction():
                self._prepare(due, model, args, kwargs)
            args, kwargs = self.shards.gathered(args, kwargs)
        self.regularizer.statistics.add("forwards", 1.0)
        self.regularizer.statistics.add("regularized", float(due))
        return args, kwargs

    def _prepare(self, due: bool, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the regularizer put its requests on the sites, or rehearse; `model` is called, itself or a part of it."""
        self.state = State.PREPARING
        try:
            forward = Forward(model, args, kwargs, self.regularizer.supplied)
            forward.described = described(self.backends, forward)
            with self._without_others():
                if due:
                    self.regularizer.before_forward(forward)
                else:
                    self._rehearse(forward)
        except BaseException:
            self.state = State.READY
            self.clear()
            raise
        self.state = State.REGULARIZED if due else State.READY

    @contextmanager
    def _without_others(self) -> Iterator[None]:
        """While open, sites have no request of other methods: no probe sees it, and nothing erases it.

        Methods of parts of the model let their part's forwards pass. After an exception no request is put back: the
        forward is over.
        """
        others = [one for one in attachments_in(self.model) if one is not self]
        sites = {site for other in others if other.model is self.model for site in other.sites}
        aside, parts = [(site, site.request) for site in sites], [one for one in others if one.model is not self.model]
        states = [part.state for part in parts]
        for one in (*sites, *parts):
            one.clear()
        for part in parts:
            part.state = State.PREPARING
        try:
            yield
        finally:
            for part, state in zip(parts, states, strict=True):
                part.state = state
        for site, request in aside:
            site.put_in_place(site.request | request)

    def _rehearse(self, forward: Forward) -> None:
        """Let the regularizer try a forward, and leave no trace of it."""
        regularizer = self.regularizer
        statistics, regularizer.statistics = regularizer.statistics, Statistics()
        try:
            with same_randomness(forward.device), unchanged(forward.model):
                regularizer.rehearse(forward)
        finally:
            regularizer.statistics = statistics
            self.clear()

    @outside_graphs
    def _end_forward(self, model: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if self.state is State.PREPARING:
            return
        for site in self.sites:
            site.calls.over = True
        if self.state is State.REGULARIZED:
            self.state = State.READY
            self.regularizer.after_forward(outputs)

    def clear(self) -> None:
        """Ask nothing of any site from here."""
        for site in self.sites:
            site.clear()

    def end_update(self) -> None:
        """Hear of an update: warn of what should have come to the sites and did not, and free the masks."""
        self.reach.update()
        for site in self.sites:
            site.release(RELEASED.format(method=self.regularizer.name))

    # -- removing and copying ---------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Take the hooks off and restore the attention modules."""
        self.shards.remove()
        self.clear()
        self._uninstall(self.sites)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While open, the model is as it was before attaching, to be copied; attached again afterwards."""
        self.remove()
        try:
            yield
        finally:
            self._install()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Copy it with a copy of the model, such as an average of its weights: with a regularizer of its own."""
        twin = memo[id(self)] = copy.copy(self)
        if id(self.regularizer) not in memo:  # what holds both may have copied it already
            memo[id(self.regularizer)] = self.regularizer.copied(memo)
        twin.regularizer = memo[id(self.regularizer)]
        twin.regularizer._attachment = twin
        for name in ("model", "sites", "reach", "handles"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        twin.shards = self.shards.of_copy(twin.regularizer, twin.model)
        return twin

    def __repr__(self) -> str:
        """Say what acts on how much of the model, as faces log it when a training starts."""
        method, model = self.regularizer, type(self.model).__name__
        if method.needs_sites:
            model = f"{len(self.sites)} of {len(all_sites(self.model))} attentions of {model}: {method.sites}"
        options = [entry for entry in options_of(type(method)) if entry.name not in ("sites", "cross_tuning")]
        told = [e for e in options if getattr(method, e.name) != e.default or e.name in ("p", "q")]
        parts = [model, ", ".join(f"{e.name} {getattr(method, e.name)}" for e in told)]
        return f"{method.name} on {'; '.join(filter(None, [*parts, method.when()]))}"

    def __enter__(self) -> Regularizer:
        return self.regularizer

    def __exit__(self, *error: object) -> None:
        self.regularizer.detach()


def _backends(sites: list[AttentionSite]) -> list[Backend]:
    return list({type(site.backend): site.backend for site in sites}.values())


def _known_sites(model: nn.Module) -> list[AttentionSite]:
    try:
        return all_sites(model)
    except ValueError:
        return []


def attachments_of(model: nn.Module) -> list[Attachment]:
    """Return what is attached to `model`, the last first."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, Attachment)))


def attachments_in(model: nn.Module) -> list[Attachment]:
    """Return what is attached to `model` and to parts of it."""
    return [one for part in model.modules() if part._forward_pre_hooks for one in attachments_of(part)]


def check_alone(method: Regularizer, model: nn.Module) -> None:
    """Refuse, by a ValueError, a method that acts alone beside any other on the model or a part of it."""
    for other in (one.regularizer for one in attachments_in(model) if one.regularizer is not method):
        if reason := method.alone or other.alone:
            name = method.name if method.alone else other.name
            raise ValueError(f"{name} combines with no other method: {reason}; detach() the other one first")


class StandIn:
    """Stand-in for a module's forward: its own, `forward`, from `install` to `remove`.

    No hook is used: torch's own encoder layer leaves its fast path in evaluation for modules with hooks, and no hook
    can keep a module from running.

    Attributes:
        module: whose forward.
    """

    module: nn.Module

    def install(self) -> Self:
        """Stand in."""
        self._replaced = vars(self.module).get("forward")
        self.module.forward = self.forward
        return self

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, looked up at each call: a copy runs the copy's."""
        return (self._replaced or partial(type(self.module).forward, self.module))(*args, **kwargs)

    def remove(self) -> None:
        """Give the module its forward back, unless another one stands before it, which goes on through ours."""
        if vars(self.module).get("forward") != self.forward:
            return
        del self.module.forward
        if self._replaced is not None:
            self.module.forward = self._replaced
