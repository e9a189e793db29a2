"""Attention sites: one softmax(QKᵀ)V in a model each, found, selected and handed to a regularizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import (
    AttentionCall,
    Tape,
    essence,
    fits,
    graph_task,
    only_where_same,
    recomputed,
)
from attn_reg_plugin.attention.graphs import outside_graphs
from attn_reg_plugin.attention.packed import PackedMask
from attn_reg_plugin.attention.selection import SiteSelector, check_place, name_towers

#: draws a keep mask: (shape (B, H, T, S), valid, device) -> bool mask; must give the same mask at every call
MaskSampler = Callable[[tuple[int, ...], Tensor | None, torch.device], Tensor]
#: the same, with a float result: a factor of the output, broadcastable to (B, H, T, 1)
FactorSampler = MaskSampler
#: sees what a call computes: (call, output O (B, H, T, D), value V (B, H, S, D), valid) -> the output that goes on
Watch = Callable[[AttentionCall, Tensor, Tensor, Tensor | None], Tensor]
#: is shown the map of a call: (call, weights (B, H, T, S), valid)
Look = Callable[[AttentionCall, Tensor, Tensor | None], None]
#: what methods ask of a site, and what it is where nothing is asked
_ASKED: dict[str, Any] = {
    **dict.fromkeys(("tape", "_mask", "_waiting", "sampler", "look", "watch", "redraw", "factor", "plan")),
    **{"uniform": False, "weights_dropout": 0.0, "once": "", "lost": "", "asked": False},
}
#: those that make attention do anything but run as usual
_ACTING = frozenset(_ASKED) - {"_waiting", "plan", "once", "asked"}


@dataclass(eq=False)
class AttentionSite:
    """One attention of a model, and what a regularizer wants of it.

    Attributes:
        stack: `encoder` or `decoder`; another is refused by a ValueError.
        kind: `self` or `cross`; so is another.
        layer: index in its stack, a whole number from 0; so is anything else.
        path: the module's name in the model.
        tower: a part of the path that tells the site from others of the same stack, kind and layer; empty if there
            are none.
        module: the attention module; a site acts in its training mode only.
        backend: who reaches the module, set when the site is found.
        attached: how many methods have it.
        tape: where the probe records the first call of a forward; further calls have tapes of their own, see `tapes`.
        keep: the mask of every call; or of the first, where `set_masks` gave each call its own.
        sampler: draws the mask of the `current` call, in place of `keep`.
        look: is shown the map of each call, as its mask has left it.
        watch: is given what each call computes, after `factor`, and returns what goes on from there.
        uniform: every row is uniform.
        redraw: says it of each call, by its number, in place of `uniform`; asked once.
        weights_dropout: ordinary dropout of the weights, in [0, 1), on top of the model's own and independent of it.
        factor: draws what the output of the `current` call is multiplied by, such as a number for each head.
        plan: what a method keeps here for the forward beside masks; it goes with them.
        once: why a second call in a forward is refused; empty where it isn't.
        lost: why no call can be computed again: an earlier forward's may be meant; empty where each can.
        several: whether it ever ran more than once in a forward.
        calls: those of the forward so far.
        count: their number, with those that did not come, see `pass_by`.
        current: the one that attention asked for last.
        over: whether the forward that the masks are for has ended.
        ran: whether it ever ran as usual with gradients.
        uncalled: whether no call has come, of all forwards, since something was first asked of it; None before that.
    """

    stack: str
    kind: str
    layer: int
    path: str = ""
    module: nn.Module | None = field(default=None, repr=False)
    backend: Backend | None = field(default=None, repr=False)
    attached: int = field(default=0, repr=False)
    tower: str = ""
    tape: Tape | None = field(default=None, repr=False)
    keep: Tensor | None = field(default=None, repr=False)
    sampler: MaskSampler | None = field(default=None, repr=False)
    look: Look | None = field(default=None, repr=False)
    watch: Watch | None = field(default=None, repr=False)
    uniform: bool = field(default=False, repr=False)
    redraw: Callable[[int], bool] | None = field(default=None, repr=False)
    weights_dropout: float = field(default=0.0, repr=False)
    factor: FactorSampler | None = field(default=None, repr=False)
    plan: Any = field(default=None, repr=False)
    once: str = field(default="", repr=False)
    lost: str = field(default="", repr=False)
    several: bool = field(default=False, repr=False)
    current: AttentionCall | None = field(default=None, repr=False)
    over: bool = field(default=False, repr=False)
    ran: bool = field(default=False, repr=False)
    uncalled: bool | None = field(default=None, repr=False)
    calls: list[AttentionCall] = field(default_factory=list, repr=False)
    count: int = field(default=0, repr=False)
    _waiting: list[tuple[PackedMask, Tensor | None]] | None = field(default=None, repr=False)
    _task: int = field(default=-1, repr=False)
    _mask: ClassVar[Tensor | PackedMask | None] = None  # what `keep` reads and sets
    asked: ClassVar[bool] = False  # whether anything is; one bool, since compiled graphs check it at each call

    def __post_init__(self) -> None:
        """Refuse a site that no pattern could select."""
        check_place(self.stack, self.kind, self.layer)

    def __setattr__(self, name: str, value: Any) -> None:
        """Also notes whether anything is asked of the site."""
        object.__setattr__(self, name, value)
        if name in _ACTING:
            asked = self.uniform or self.weights_dropout > 0 or bool(self.lost)
            parts = (self.tape, self._mask, self.sampler, self.redraw, self.look, self.watch, self.factor)
            vars(self)["asked"] = asked or any(part is not None for part in parts)
            if self.asked and self.uncalled is None:
                vars(self)["uncalled"] = True

    @property
    def name(self) -> str:
        """As a selector names it, such as `encoder.self[3]`, or `encoder.self[3]@vision_model` of several towers."""
        return f"{self.stack}.{self.kind}[{self.layer}]" + (f"@{self.tower}" if self.tower else "")

    @property
    def active(self) -> bool:
        """Whether attention has anything to do here but run as usual."""
        return self.asked and (self.module is None or self.module.training)

    def idle(self) -> bool:
        """Whether a call that begins runs as usual; that it does, with gradients, is remembered."""
        if self.active:
            return False
        if not torch.compiler.is_compiling() and not self.ran:
            self.ran = torch.is_grad_enabled()
        return True

    @property
    def tapes(self) -> list[Tape]:
        """What was recorded, a tape for each call of the forward; empty where the forward did not come through."""
        tapes = [] if self.tape is None else [self.tape, *self.tape.further]
        return [tape for tape in tapes if tape.output is not None]

    def enter(self, *inputs: Tensor | None) -> AttentionCall | None:
        """The call of this attention that begins, or is computed again; None if it is to run as usual.

        Call this once per call, with what it is given, the first two dimensions of which are batch and heads or
        time: an attention that runs several times in a forward has a tape and a mask for each.

        Raises:
            RuntimeError: activation checkpointing computes a call again, and it can't be told which or its mask is
                lost; or the method has masks for one call only.
        """
        return None if self.idle() else self._enter(inputs)

    @outside_graphs
    def _enter(self, inputs: tuple[Tensor | None, ...]) -> AttentionCall | None:
        if graph_task() != self._task:
            if self.lost:
                raise RuntimeError(self.lost)
            call = recomputed(self.calls, inputs)
        elif self.over:
            return None  # a part of the model runs by itself: no forward of the model that a mask was made for
        else:
            call = self._begin(inputs)
        self.current = call
        if call is None:
            return None
        parts = (self._mask, self.sampler, self.look, self.factor, call.tape, call.watch)
        acts = call.uniform or self.weights_dropout > 0 or any(part is not None for part in parts)
        return call if acts else None

    def _begin(self, inputs: tuple[Tensor | None, ...]) -> AttentionCall:
        call = AttentionCall(self, self.count)
        self.count += 1
        self.uncalled = False
        if call.index:
            if self.once:
                raise RuntimeError(f"{self.name} ({self.path}) runs more than once in a forward: {self.once}")
            self.several = True
        if self.several:
            call.seen = essence(inputs)
        if self.tape is not None:
            call.tape = self.tape.of_call(call.index)
        else:
            call.watch, call.graph = self.watch, torch.is_grad_enabled()
            call.uniform = self.uniform if self.redraw is None else self.redraw(call.index)
            if call.uniform:  # its own mask goes to no other call
                self._waiting, call.settled = self._waiting and self._waiting[1:], True
        self.calls.append(call)
        return call

    def pass_by(self, calls: int = 1) -> None:
        """So many calls do not come, since their layer was left out: those that follow keep their numbers and masks."""
        self.count += calls
        self._waiting = self._waiting and self._waiting[calls:]
        passed_by = getattr(self.backend, "passed_by", None)
        if passed_by is not None:
            passed_by(self)

    def set_masks(self, masks: list[tuple[Tensor | PackedMask, Tensor | None]]) -> None:
        """Give each call of the forward that follows its own mask.

        Args:
            masks: one per call in order, at least one: bool (B, H, T, S), and the `valid` that it was made for.
        """
        packed = [(m if isinstance(m, PackedMask) else PackedMask(m), valid) for m, valid in masks]
        self._mask, self._waiting = packed[0][0], packed

    def mask_for(self, call: AttentionCall, shape: tuple[int, ...], valid: Tensor | None) -> Tensor | PackedMask | None:
        """The mask that a call gets: `keep`, or the next of those that `set_masks` gave; None if there is none."""
        if self._waiting is None:
            return self._mask
        if not self.several:
            return self._waiting.pop(0)[0] if self._waiting else None
        for i, (keep, then) in enumerate(self._waiting):
            if fits(keep, shape):
                del self._waiting[i]
                return PackedMask(only_where_same(keep.unpacked(), then, valid))
        return None

    def restart(self) -> None:
        """Forget the calls so far: the same forward runs again."""
        self.calls, self.count, self.current, self.over, self._task = [], 0, None, False, graph_task()

    def clear(self) -> None:
        """Forget masks, tapes and calls: plain attention from here."""
        vars(self).update(_ASKED)
        self.restart()

    def release(self, lost: str) -> None:
        """Free what the forwards so far had, whose backwards are over; `lost` is raised where one asks for it again."""
        lost = self.lost or (lost if self.calls else "")
        self.clear()
        self.over, self.lost = True, lost

    def put_aside(self) -> dict[str, Any]:
        """What was asked of the site, for `put_back`; it is clear from here."""
        asked = {name: vars(self).get(name, nothing) for name, nothing in _ASKED.items()}
        self.clear()
        return {name: value for name, value in asked.items() if value is not _ASKED[name]}

    def put_back(self, asked: dict[str, Any]) -> None:
        """Ask again for what was put aside, beside what is asked for now."""
        vars(self).update(asked)


def _keep(site: AttentionSite) -> Tensor | None:
    return site._mask.unpacked() if isinstance(site._mask, PackedMask) else site._mask


# the constructor takes it like the other fields; reading it unpacks what `set_masks` gave
AttentionSite.keep = property(_keep, lambda site, mask: setattr(site, "_mask", mask))


class Backend(Protocol):
    """How the sites of one framework's models are found and reached.

    A backend may also have `refusal(model)`, why one of its framework's models has no site, or None; `describe(model,
    args, kwargs)`, what a forward's arguments tell the objective; `probing(model)`, a context for the probe;
    `time_first(site)`, whether states around a site are (T, B, C) and not (B, T, C); and `passed_by(site)`, which hears
    that the site doesn't run, since its layer was left out.
    """

    def find(self, model: nn.Module) -> list[AttentionSite]:
        """Every site of `model`, in order; an empty list if the model isn't one of this framework's."""

    def open(self, site: AttentionSite) -> None:
        """Make the module of `site` call `regularized_attention` with it when the site is active."""

    def close(self, site: AttentionSite) -> None:
        """Undo `open` exactly."""


class HeldSites:
    """The backend of modules that hold an `AttentionSite` and call `regularized_attention` themselves."""

    def find(self, model: nn.Module) -> list[AttentionSite]:
        """The sites that modules of `model` have as attributes, in the order of `named_modules`."""
        found: dict[int, AttentionSite] = {}
        for path, module in model.named_modules():
            for held in vars(module).values():
                if isinstance(held, AttentionSite) and isinstance(held.backend, HeldSites | None):
                    held.path, held.module, held.backend = path, module, self
                    found.setdefault(id(held), held)
        return list(found.values())

    def open(self, site: AttentionSite) -> None:
        """Nothing to do: the module asks its site at every call."""

    def close(self, site: AttentionSite) -> None:
        """Nothing to undo."""


_BACKENDS: list[tuple[str, Callable[[], Backend | None]]] = []


def register_backend(framework: str, make: Callable[[], Backend | None]) -> None:
    """Register a backend; `make` is called for it once the module `framework` is imported (`""`: always)."""
    _BACKENDS.append((framework, make))


register_backend("", HeldSites)


def all_sites(model: nn.Module) -> list[AttentionSite]:
    """Every attention site of `model` that a backend knows, each with a name of its own.

    Raises:
        ValueError: there is none.
    """
    made = [make() for framework, make in _BACKENDS if framework == "" or framework in sys.modules]
    backends = [backend for backend in made if backend is not None]
    sites = [site for backend in backends for site in backend.find(model)]
    if not sites:
        refusals = [backend.refusal(model) for backend in backends if hasattr(backend, "refusal")]
        raise ValueError(
            next(filter(None, refusals), None)
            or f"no attention site found in {type(model).__name__}; give its attention modules an AttentionSite and "
            "let them call regularized_attention, or register a backend for them"
        )
    name_towers(sites)
    return sites


def find_sites(model: nn.Module, select: str = "encoder.self") -> list[AttentionSite]:
    """The attention sites of `model` that `select` names.

    Args:
        model: any model with attention that a backend knows.
        select: a `SiteSelector` pattern, such as `encoder.self[0,2-5] decoder.cross` or `*`.

    Raises:
        ValueError: a malformed pattern, one that matches nothing (the sites that exist are listed), or a model
            without sites.
    """
    return SiteSelector(select).select(all_sites(model))
