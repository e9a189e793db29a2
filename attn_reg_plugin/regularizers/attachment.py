"""The hooks of a regularizer on a model, and what passes through them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attn_reg_plugin.attention.calls import graph_task
from attn_reg_plugin.attention.graphs import outside_graphs
from attn_reg_plugin.attention.sites import AttentionSite, Backend, all_sites, find_sites
from attn_reg_plugin.regularizers.distributed import refuse_replica, refuse_several_devices
from attn_reg_plugin.regularizers.expectations import RELEASED, Updates, expect_announcement, expect_update
from attn_reg_plugin.regularizers.probing import Forward, same_randomness, unchanged
from attn_reg_plugin.regularizers.sharding import gathered, refuse_sharded, shards_of, without_reduction
from attn_reg_plugin.regularizers.slots import check_beside, check_free
from attn_reg_plugin.regularizers.statistics import Statistics
from attn_reg_plugin.regularizers.whole_step import IN_BACKWARD, LOST, WholeStep, WholeStepWanted, wanted_again

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base import Regularizer


class Attachment:
    """The hooks of one regularizer on one model; a context manager that removes them.

    Attributes:
        sites: the attached ones.
        seen: whether a forward came that could be regularized: in training mode, with gradients.
        present, idle: whether one came since the last update, and one with gradients in evaluation mode.
        due: whether one came since the last update that was to be regularized.
        awaited: how many such updates each site, by its name, was asked for something in and had no call yet.
        updates: whether they are announced.
    """

    def __init__(self, regularizer: Regularizer, model: nn.Module) -> None:
        self.regularizer, self.model = regularizer, model
        refuse_several_devices(regularizer, model)
        refuse_sharded(regularizer, model)
        check_beside(regularizer, (one.regularizer for one in attachments_of(model)))
        self.sites = find_sites(model, regularizer.sites) if regularizer.needs_sites else []
        known = self.sites if regularizer.needs_sites else _known_sites(model)
        #: the backends that know the model, one of each kind
        self.backends: list[Backend] = list({type(site.backend): site.backend for site in known}.values())
        self.whole_step, self.graphed = WholeStep(), False
        self.step: Any = None  # of the last forward, by its loss
        self.lost = ""  # why what the step's earlier forwards had cannot be had again
        self.prepared, self.updates = False, Updates()
        self.busy = self.seen = self.present = self.due = self.idle = self.warned = self.rehearsed = False
        self._install()

    def _install(self) -> None:
        """Open the sites and hook the model; all of it or, on an error, nothing."""
        opened: list[AttentionSite] = []
        self.seen_class, self.sharded = None, []  # what a forward was seen of, and what FSDP2 shards of it
        self.awaited: Counter[str] = Counter()
        try:
            for site in self.sites:
                check_free(self.regularizer, site)
                if not site.attached:
                    site.backend.open(site)
                    site.ran, site.uncalled = False, None
                site.attached += 1
                opened.append(site)
        except BaseException:
            self._close(opened)
            raise
        # every regularizer of the model clears its masks before any of them probes
        self.handles = [
            self.model.register_forward_pre_hook(self._begin_forward, prepend=True),
            self.model.register_forward_pre_hook(self._hear_of_forward, with_kwargs=True),
            self.model.register_forward_hook(self._end_forward, always_call=True),
        ]
        try:
            self.handles += self.regularizer.hooks(self.model, self.sites)
        except BaseException:
            for handle in self.handles:
                handle.remove()
            self._close(opened)
            raise
        vars(self.model)["__prepare_scriptable__"] = refuse_script

    @outside_graphs
    def _begin_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        refuse_replica(self.regularizer, model)
        probing, within = self._within_step()
        if model.training and graph_task() < 0:
            self.graphed = torch.is_grad_enabled()
        if probing or within:
            for site in self.sites if self.whole_step.running or not probing else ():
                site.over = not torch.is_grad_enabled()  # without gradients it is no part of what is differentiated
        elif model.training and torch.is_grad_enabled():
            self._refuse_lost_masks()
            self.clear()
        elif model.training:  # plain; what an earlier forward had, checkpointing may ask for again in its backward
            for site in self.sites:
                site.over = True
        elif torch.is_grad_enabled():
            self.idle = True

    def _refuse_lost_masks(self) -> None:
        """Refuse a further forward of a step whose earlier masks activation checkpointing will want again.

        A model may checkpoint its own way, which shows only when it does: the sites refuse it then.

        Raises:
            RuntimeError: it is one.
        """
        loss, self.step = self.step, self.regularizer.supplied.training_loss
        if loss is None or loss is not self.step:
            self.lost = ""
        elif any(map(wanted_again, self.sites)):
            self.lost = LOST.format(model=type(self.model).__name__, method=self.regularizer.name)
            if any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules()):
                raise RuntimeError(self.lost)

    def _within_step(self) -> tuple[bool, bool]:
        """Whether a method probes a whole step, and whether the sites have what they need for all of its forwards."""
        steps = [one.whole_step for one in attachments_of(self.model)]
        loss = self.regularizer.supplied.training_loss
        within = loss is not None and bool(self.sites) and any(step.holds(loss) for step in steps)
        return any(step.running for step in steps), within

    def begin_step(self) -> None:
        """Prepare the sites for all forwards of a step, where its loss is what a method of the model attributes."""
        together = attachments_of(self.model)
        loss = self.regularizer.supplied.training_loss
        if not self.sites or loss is None or not any(one.whole_step.used for one in together):
            return
        if self.whole_step.holds(loss) or any(one.whole_step.running for one in together):
            return  # announced already, by another callback of the trainer's
        ready = [one for one in together if one.whole_step.holds(one.regularizer.supplied.training_loss)]
        for one in (one for one in together if one not in ready):
            one.clear({site for other in ready for site in other.sites})
        self._prepare(
            self.regularizer.due(), partial(Forward, self.model, (), {}, self.regularizer.supplied), step=True
        )
        self.whole_step.held = loss

    @outside_graphs
    def _end_forward(self, model: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if self._within_step()[0] and not self.whole_step.running:
            return
        for site in self.sites:
            site.over = True
        if self.prepared and not self.busy:
            self.prepared = False
            self.regularizer.after_forward(outputs)

    @outside_graphs
    def _hear_of_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`_before_forward`, and what a model that FSDP2 shards needs around it."""
        if not self._is_sharded():
            return self._before_forward(model, args, kwargs)
        with without_reduction(model):
            self._before_forward(model, args, kwargs)
        return gathered(model, args, kwargs)  # the end of a probe's backward has freed it

    def _is_sharded(self) -> bool:
        """Whether FSDP2 shards the model; looked up when its class changes, as `fully_shard` changes it."""
        if self.seen_class is not type(self.model) and self.model.training:
            self.seen_class = type(self.model)
            self.sharded, handles = shards_of(self.regularizer, self.model, self.sites)
            self.handles += handles
        return bool(self.sharded)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.busy or not model.training or not torch.is_grad_enabled():
            return
        probing, within = self._within_step()
        if probing:
            return
        trained = [site.module is None or site.module.training for site in self.sites]
        self.present = self.present or not trained or any(trained)
        self.seen = self.seen or self.present
        expect_announcement(self)
        due = self.regularizer.due()
        self.due = self.due or due
        if due and self.sites and graph_task() >= 0 and not self.graphed:
            raise RuntimeError(IN_BACKWARD.format(model=type(model).__name__))
        if not within:
            self._prepare(due, partial(self._forward, model, args, kwargs))
            for site in self.sites if self.lost else ():
                site.lost = self.lost
        self.regularizer.statistics.add("forwards", 1.0)
        self.regularizer.statistics.add("regularized", float(due))

    def _prepare(self, due: bool, make: Callable[[], Forward], step: bool = False) -> None:
        """Let the regularizer prepare the sites for a forward, which is due or not, or which stands for a step."""
        records = self.regularizer.records()
        rehearsing = not due and not self.rehearsed and (self.whole_step.used or not step)
        if not (due or records or rehearsing):
            return
        self.rehearsed = self.busy = True
        forward = make()
        try:
            with self._without_others():
                if due:
                    self.regularizer.before_forward(forward)
                    self.prepared = True
                elif rehearsing:
                    self._rehearse(forward)
                if records:
                    self.regularizer.record(forward)
        except BaseException as error:
            self.rehearsed = not isinstance(error, WholeStepWanted)  # the step will be, as a whole
            self.clear()
            raise
        finally:
            self.busy = False

    @contextmanager
    def _without_others(self) -> Iterator[None]:
        """While open, sites have nothing of what other methods ask of them: no probe sees it, and nothing erases it.

        After an exception it is not put back: the forward is over.
        """
        sites = {site for other in attachments_of(self.model) if other is not self for site in other.sites}
        aside = [(site, site.put_aside()) for site in sites]
        yield
        for site, asked in aside:
            site.put_back(asked)

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

    def _forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
        return Forward(model, args, kwargs, self.regularizer.supplied, self._described(model, args, kwargs))

    def _described(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the backends read off the model's arguments."""
        described: dict[str, Any] = {}
        for backend in self.backends:
            if hasattr(backend, "describe"):
                described = {**backend.describe(model, args, kwargs), **described}
        return described

    @contextmanager
    def probing(self) -> Iterator[None]:
        """While open, every backend has the model ready for the probe."""
        with ExitStack() as stack:
            for backend in self.backends:
                if hasattr(backend, "probing"):
                    stack.enter_context(backend.probing(self.model))
            yield

    def end_update(self) -> None:
        """An update was made: what should have come to the sites and did not is warned about, and masks are freed."""
        expect_update(self)
        self.present = self.idle = False
        self.whole_step.held = None
        lost = RELEASED.format(method=self.regularizer.name)
        for site in self.sites:
            site.release(lost)

    def clear(self, kept: Collection[AttentionSite] = ()) -> None:
        """Plain attention on every site from here, but those that are `kept`."""
        self.whole_step.held = None
        for site in self.sites:
            if site not in kept:
                site.clear()

    def remove(self) -> None:
        """Take the hooks off and restore the attention modules."""
        for handle in self.handles:
            handle.remove()
        if not attachments_of(self.model):
            vars(self.model).pop("__prepare_scriptable__", None)
        self.clear()
        self._close(self.sites)

    @staticmethod
    def _close(sites: list[AttentionSite]) -> None:
        for site in sites:
            site.attached -= 1
            if not site.attached:
                site.backend.close(site)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model as it was before attaching, to be copied; attached again afterwards."""
        self.remove()
        try:
            yield
        finally:
            self._install()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """On a copy of the model, such as an average of its weights: with a regularizer of its own."""
        twin = memo[id(self)] = copy.copy(self)
        twin.regularizer = self.regularizer.copied()
        twin.regularizer._attachment, twin.whole_step = twin, WholeStep()
        for name in ("model", "sites", "handles"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    def __enter__(self) -> Regularizer:
        return self.regularizer

    def __exit__(self, *error: object) -> None:
        self.regularizer.detach()


def begin_step(model: nn.Module) -> None:
    """Announce, to what is attached to `model`, that the step begins whose `training_loss` was supplied.

    In a step without it, or whose forwards have outputs that can be attributed, nothing happens.
    """
    for attachment in reversed(attachments_of(model)):  # their hooks are prepended
        attachment.begin_step()


def _known_sites(model: nn.Module) -> list[AttentionSite]:
    try:
        return all_sites(model)
    except ValueError:
        return []


def refuse_script(*_: Any) -> None:
    """Be, in an attached model, what `torch.jit.script` asks first.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "torch.jit.script cannot compile a model while a regularizer is attached to it; detach() the regularizer first"
    )


def attachments_of(model: nn.Module) -> list[Attachment]:
    """What is attached to `model`, in order."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, Attachment)))
