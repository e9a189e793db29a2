"""Attention sites: one softmax(QKᵀ)V in a model each, handed to a regularizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall, Calls, recomputed
from attn_reg_plugin.attention.graphs import outside_graphs
from attn_reg_plugin.attention.requests import NOTHING, Request, Tape

if TYPE_CHECKING:
    from attn_reg_plugin.attention.selection import Backend

STACKS, KINDS = ("encoder", "decoder"), ("self", "cross")


@dataclass(eq=False)
class AttentionSite:
    """One attention of a model: its place, and through it what is asked of it and the calls that came.

    Attributes:
        stack: `encoder` or `decoder`.
        kind: `self` or `cross`.
        layer: index in its stack, a whole number from 0.
        path: the module's name in the model.
        tower: a part of the path that tells the site from others of the same stack, kind and layer; empty if there
            are none.
        module: the attention module; a site acts in its training mode only.
        backend: reaches the module; set when the site is found.
        attached: number of methods that have it.
        request: what is asked of the forward at hand.
        asked: whether that makes attention do anything but run as usual, or one whose mask is gone may be computed
            again; a bool, since compiled graphs check it.
        calls: those of the forward.

    Raises:
        ValueError: another stack, kind or layer than these.
    """

    stack: str
    kind: str
    layer: int
    path: str = ""
    module: nn.Module | None = field(default=None, repr=False)
    backend: Backend | None = field(default=None, repr=False)
    tower: str = ""
    attached: int = field(default=0, repr=False)
    request: Request = field(default=NOTHING, repr=False)
    asked: bool = field(default=False, repr=False)
    calls: Calls = field(default_factory=Calls, repr=False)

    def __post_init__(self) -> None:
        """Refuse a site that no pattern could select."""
        for name, known in (("stack", STACKS), ("kind", KINDS)):
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"an AttentionSite's {name} is {given!r}, but must be {' or '.join(known)}")
        if not isinstance(self.layer, Integral) or isinstance(self.layer, bool) or self.layer < 0:
            raise ValueError(f"an AttentionSite's layer is {self.layer!r}, but must be a whole number from 0")

    @property
    def name(self) -> str:
        """Name as a selector has it, such as `encoder.self[3]`, or `encoder.self[3]@vision_model` of several towers."""
        return f"{self.stack}.{self.kind}[{self.layer}]" + (f"@{self.tower}" if self.tower else "")

    @property
    def active(self) -> bool:
        """Whether attention has anything to do here but run as usual."""
        return self.asked and (self.module is None or self.module.training)

    def idle(self) -> bool:
        """Return whether a call that begins runs as usual; that it does, with gradients, is remembered."""
        if self.active:
            return False
        if not torch.compiler.is_compiling() and not self.calls.idled:
            self.calls.idled = torch.is_grad_enabled()
        return True

    # -- what is asked ----------------------------------------------------------------------------------------------

    def put_on(self, request: Request) -> None:
        """Ask for this and nothing else, in a forward that begins."""
        self.calls.restart()
        self.put_in_place(request)

    def ask(self, **asked: Any) -> None:
        """Ask for more, by the fields of `Request`."""
        self.put_in_place(self.request | Request(**asked))

    def clear(self) -> None:
        """Forget request and calls: plain attention from here."""
        self.put_on(NOTHING)

    def release(self, reason: str) -> None:
        """Free what the forwards so far had; `reason` is raised where activation checkpointing asks for it again."""
        self.calls.release(reason)
        self.put_in_place(NOTHING)

    def put_in_place(self, request: Request) -> None:
        """Ask for this and nothing else from here on, in the same forward."""
        self.request, self.asked = request, request.acting or bool(self.calls.released)
        self.calls.asked = self.calls.asked or self.asked

    @property
    def keep(self) -> Tensor | None:
        """The mask that is asked for, bool, unpacked: of every call, or of the first where each has its own."""
        return self.request.masks[0].unpacked() if self.request.masks else self.request.keep

    # -- the calls --------------------------------------------------------------------------------------------------

    @property
    def tapes(self) -> list[Tape]:
        """Tapes of the probe, one per call of the forward; empty where the forward did not come through."""
        recording = self.request.recording
        return [] if recording is None else [tape for tape in recording.tapes if tape.output is not None]

    def enter(self) -> AttentionCall | None:
        """Return the call of this attention that begins, or is computed again; None if it is to run as usual.

        An attention asks once per run; one that runs several times in a forward has a tape and a mask per call.

        Raises:
            RuntimeError: activation checkpointing computes a call again, and its mask is lost or it can't be told
                which call is meant; or the method has a mask for one call only.
        """
        return None if self.idle() else self._enter()

    @outside_graphs
    def _enter(self) -> AttentionCall | None:
        calls = self.calls
        if calls.repeats():
            if calls.released:
                raise RuntimeError(calls.released)
            call = recomputed(calls.made, calls.pending)
        elif calls.over:
            return None  # a part of the model runs by itself: no forward of the model that a mask was made for
        else:
            call = self._begin()
        calls.current = call
        asked = call is not None and (call.uniform or call.tape is not None or call.request.masking)
        return call if asked else None

    def _begin(self) -> AttentionCall:
        calls, request = self.calls, self.request
        call = AttentionCall(self, calls.count, request)
        calls.count += 1
        calls.came = True
        if call.index and request.once:
            raise RuntimeError(f"{self.name} ({self.path}) runs more than once in a forward: {request.once}")
        if request.recording is not None:
            call.tape = request.recording.tape(call.index)
        elif request.uniform is not None:
            call.uniform = request.uniform(call.index)
        calls.made.append(call)
        return call

    def pass_by(self, calls: int) -> None:
        """Count calls that do not come, since their layer was left out: those that follow keep their numbers."""
        self.calls.count += calls
        passed_by = getattr(self.backend, "passed_by", None)
        if passed_by is not None:
            passed_by(self)
