"""Attention sites: one softmax(QKᵀ)V in a model each, found, selected and handed to a regularizer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

#: draws a keep mask: (shape (B, H, T, S), valid, device) -> bool mask; must give the same mask at every call
MaskSampler = Callable[[tuple[int, ...], Tensor | None, torch.device], Tensor]


@dataclass
class Tape:
    """What the probe keeps of one site.

    Attributes:
        needs_weights: materialize the attention map (integrated gradients and attention weights need it).
        factor: the map is scaled by it (integrated gradients' k/m).
        output: O (B, H, T, D), in the probe's graph.
        value: V (B, H, S, D), detached.
        valid: bool, broadcastable to (B, H, T, S), or None.
        weights, dropped_weights: A before and after dropout, (B, H, T, S), detached.
    """

    needs_weights: bool = False
    factor: float = 1.0
    output: Tensor | None = None
    value: Tensor | None = None
    valid: Tensor | None = None
    weights: Tensor | None = None
    dropped_weights: Tensor | None = None

    def keep(self, output: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Keep the first call's tensors; activation checkpointing calls again, to recompute."""
        if self.output is None:
            self.output, self.value, self.valid = output, value, valid

    def rewind(self, factor: float) -> None:
        """Make ready for another pass over the same maps, scaled by `factor`."""
        self.output, self.factor = None, factor


@dataclass(eq=False)
class AttentionSite:
    """One attention of a model, and what a regularizer wants of it.

    Attributes:
        stack: `encoder` or `decoder`.
        kind: `self` or `cross`.
        layer: index in its stack, from 0.
        path: the module's name in the model.
        tower: a part of the path that tells the site from others of the same stack, kind and layer; empty if there
            are none.
        module: the attention module; a site acts in its training mode only.
        backend: who reaches the module, set when the site is found.
        attached: whether a regularizer has it.
    """

    stack: str
    kind: str
    layer: int
    path: str = ""
    module: nn.Module | None = field(default=None, repr=False)
    backend: Backend | None = field(default=None, repr=False)
    attached: bool = field(default=False, repr=False)
    tower: str = ""
    tape: Tape | None = field(default=None, repr=False)
    keep: Tensor | None = field(default=None, repr=False)
    sampler: MaskSampler | None = field(default=None, repr=False)
    uniform: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """As a selector names it, such as `encoder.self[3]`, or `encoder.self[3]@vision_model` of several towers."""
        return f"{self.stack}.{self.kind}[{self.layer}]" + (f"@{self.tower}" if self.tower else "")

    @property
    def active(self) -> bool:
        """Whether attention has anything to do here but run as usual."""
        if self.module is not None and not self.module.training:
            return False
        return self.tape is not None or self.keep is not None or self.sampler is not None or self.uniform

    def keep_mask(self, shape: tuple[int, ...], valid: Tensor | None, device: torch.device) -> Tensor | None:
        """The keep mask for a map of `shape` (B, H, T, S), or broadcastable to it.

        Raises:
            RuntimeError: the map has another shape than the one the mask was made for.
        """
        if self.sampler is not None:
            return self.sampler(shape, valid, device)
        if self.keep is not None and any(n not in (1, m) for n, m in zip(self.keep.shape, shape, strict=True)):
            raise RuntimeError(
                f"{self.name}: the keep mask is {tuple(self.keep.shape)}, but the attention map is {tuple(shape)}; "
                "the probe and the forward saw different inputs"
            )
        return self.keep

    def clear(self) -> None:
        """Forget masks and tape: plain attention from here."""
        self.tape = self.keep = self.sampler = None
        self.uniform = False


#: where the first number in a module's path stands
_LAYER = re.compile(r"(?:^|\.)\d+(?:\.|$)")
_TERM = re.compile(
    r"(?P<stack>encoder|decoder|\*)(?:\.(?P<kind>self|cross|\*))?(?:\[(?P<layers>[\d,\-]+)\])?(?:@[\w.]+)*"
)


@dataclass(frozen=True)
class SiteSelector:
    """A pattern such as `encoder.self[0,2-5] decoder.cross`, or `*` for every site.

    A term is a stack (`encoder`, `decoder`, `*`), optionally a kind (`.self`, `.cross`, `.*`) and optionally layers
    from 0 in brackets; terms are separated by spaces. Of a model with several towers, `@` and a part of the modules'
    path selects some: `encoder.self@vision_model`, `encoder.self[0-3]@text_model`, `*@layers.1.blocks.0`.

    Raises:
        ValueError: the pattern is not of this form.
    """

    pattern: str

    def __post_init__(self) -> None:
        """Refuse a malformed pattern before any model is seen."""
        self._terms()

    def _terms(self) -> list[tuple[str, str, str, set[int] | None]]:
        terms = []
        for text in self.pattern.split():
            match = _TERM.fullmatch(text)
            layers = None if match is None or match["layers"] is None else _layers(match["layers"])
            if match is None or layers == set():
                raise ValueError(
                    f"site pattern {text!r} is not understood; write for example 'encoder.self', "
                    "'encoder.self[0,2-5] decoder.cross' or '*'"
                )
            terms.append((text, match["stack"], match["kind"] or "*", layers))
        if not terms:
            raise ValueError("the site pattern is empty; write for example 'encoder.self' or '*'")
        return terms

    def select(self, sites: Iterable[AttentionSite]) -> list[AttentionSite]:
        """Those of `sites` that the pattern names, in the model's order.

        Raises:
            ValueError: a term matches nothing, or names a layer that does not exist; the sites that do are listed.
        """
        sites, chosen = list(sites), set()
        for text, stack, kind, layers in self._terms():
            matching = [s for s in sites if stack in ("*", s.stack) and kind in ("*", s.kind) and _stands_in(s, text)]
            missing = (layers or set()) - {site.layer for site in matching}
            if not matching or missing:
                there = " ".join(dict.fromkeys(site.name for site in sites)) or "none"
                raise ValueError(f"site pattern {text!r} matches nothing in this model; its sites are: {there}")
            chosen.update(id(site) for site in matching if layers is None or site.layer in layers)
        return [site for site in sites if id(site) in chosen]


def _stands_in(site: AttentionSite, term: str) -> bool:
    """Whether the site's path has every part that a term names after its `@`s, as whole names in a row."""
    return all(f".{part}." in f".{site.path}." for part in term.split("@")[1:])


def name_towers(sites: Iterable[AttentionSite]) -> None:
    """Give sites of the same stack, kind and layer a `tower` each, so that all have names of their own.

    A tower is what stands before the layer's number in the path. Where two towers meet in a layer, all of their
    sites are called by what is the shortest in the tower's path that the others' do not have; blocks that share a
    number are told apart by what follows it. Sites that share a path (layers of one module) differ in the layer.
    """
    sites = list(sites)
    for site in sites:
        site.tower = ""
    towers: dict[tuple[str, str], set[str]] = {}
    for same in _of_equal_name(sites):
        starts = {_LAYER.split(site.path, maxsplit=1)[0] for site in same}
        if len(starts) > 1:
            towers.setdefault((same[0].stack, same[0].kind), set()).update(starts)
    for site in sites:
        start, starts = _LAYER.split(site.path, maxsplit=1)[0], towers.get((site.stack, site.kind), ())
        if start in starts:
            site.tower = _distinct(start, [other for other in starts if other != start])
    for same in _of_equal_name(sites):
        paths = [site.path for site in same]
        for site in same:
            part = _distinct(site.path, [path for path in paths if path != site.path])
            site.tower = f"{site.tower}@{part}" if site.tower else part


def _of_equal_name(sites: list[AttentionSite]) -> list[list[AttentionSite]]:
    """Groups of sites that have one name."""
    named: dict[str, list[AttentionSite]] = {}
    for site in sites:
        named.setdefault(site.name, []).append(site)
    return [same for same in named.values() if len(same) > 1]


def _distinct(path: str, others: list[str]) -> str:
    """The shortest run of names in `path`, of these the first, that is in no other path; the path if there is none."""
    names = path.split(".")
    for length in range(1, len(names)):
        for start in range(len(names) - length + 1):
            part = ".".join(names[start : start + length])
            if part and not part.isdigit() and not any(f".{part}." in f".{other}." for other in others):
                return part
    return path


def _layers(text: str) -> set[int]:
    """Parse `0,2-5`; an empty set if it is malformed."""
    layers: set[int] = set()
    for part in text.split(","):
        bounds = part.split("-")
        if len(bounds) > 2 or not all(bound.isdigit() for bound in bounds) or int(bounds[0]) > int(bounds[-1]):
            return set()
        layers.update(range(int(bounds[0]), int(bounds[-1]) + 1))
    return layers


class Backend(Protocol):
    """How the sites of one framework's models are found and reached.

    A backend may also have `refusal(model)`, why one of its framework's models has no site, or None; `describe(model,
    args, kwargs)`, what a forward's arguments tell the objective; and `probing(model)`, a context for the probe.
    """

    def find(self, model: nn.Module) -> list[AttentionSite]:
        """Every site of `model`, in order; an empty list if the model is none of this framework's."""

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


_BACKENDS: dict[str, Callable[[], Backend]] = {}


def register_backend(framework: str, make: Callable[[], Backend]) -> None:
    """Register a backend; `make` is called once the module `framework` is imported (`""`: always)."""
    _BACKENDS[framework] = make


register_backend("", HeldSites)


def all_sites(model: nn.Module) -> list[AttentionSite]:
    """Every attention site of `model` that a backend knows, each with a name of its own.

    Raises:
        ValueError: there is none.
    """
    backends = [make() for framework, make in _BACKENDS.items() if framework == "" or framework in sys.modules]
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


@contextmanager
def recording(sites: Iterable[AttentionSite], needs_weights: bool = False) -> Iterator[list[Tape]]:
    """While open, each site keeps what attribution needs on a fresh tape; afterwards the sites are clear."""
    sites = list(sites)
    for site in sites:
        site.clear()
        site.tape = Tape(needs_weights=needs_weights)
    try:
        yield [site.tape for site in sites]
    finally:
        for site in sites:
            site.tape = None
