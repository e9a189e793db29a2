"""Finding the sites of a model, selecting some by a pattern, and the names by which patterns and logs call them."""

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from attn_reg_plugin.attention.sites import AttentionSite

#: where the first number in a module's path stands
_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")
_TERM = re.compile(
    r"(?P<stack>encoder|decoder|\*)(?:\.(?P<kind>self|cross|\*))?(?:\[(?P<layers>[0-9,\-]+)\])?(?:@[\w.]+)*"
)
#: a term's text, stack, kind and bounds of layers (None: all)
_Term = tuple[str, str, str, list[tuple[int, int]] | None]
#: one or two bounds of layers; longer numbers than any model has layers are refused
_LAYERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class SiteSelector:
    """A pattern such as `encoder.self[0,2-5] decoder.cross`, or `*` for every site.

    A term is a stack (`encoder`, `decoder`, `*`), optionally a kind (`.self`, `.cross`, `.*`) and optionally layers
    from 0 in brackets; terms are separated by spaces. Of a model with several towers, `@` and a part of the modules'
    path selects some: `encoder.self@vision_model`, `encoder.self[0-3]@text_model`, `*@layers.1.blocks.0`.

    Raises:
        TypeError, ValueError: the pattern is no text, or not of this form.
    """

    pattern: str

    def __post_init__(self) -> None:
        """Refuse a malformed pattern before any model is seen."""
        if not isinstance(self.pattern, str):
            raise TypeError(f"sites is {self.pattern!r}, but must be text")
        self._terms()

    def _terms(self) -> list[_Term]:
        terms = []
        for text in self.pattern.split():
            match = _TERM.fullmatch(text)
            layers = None if match is None or match["layers"] is None else _layers(match["layers"])
            if match is None or layers == []:
                raise ValueError(
                    f"site pattern {text!r} is not understood; write for example 'encoder.self', "
                    "'encoder.self[0,2-5] decoder.cross' or '*'"
                )
            terms.append((text, match["stack"], match["kind"] or "*", layers))
        if not terms:
            raise ValueError("the site pattern is empty; write for example 'encoder.self' or '*'")
        return terms

    def select(self, sites: Iterable[AttentionSite]) -> list[AttentionSite]:
        """Select the sites that the pattern names, in the model's order.

        Raises:
            ValueError: a term matches nothing, or names a layer that does not exist; the sites that do are listed.
        """
        sites, chosen = list(sites), set()
        for text, stack, kind, layers in self._terms():
            matching = [s for s in sites if stack in ("*", s.stack) and kind in ("*", s.kind) and _stands_in(s, text)]
            there = {site.layer for site in matching}
            # bounds are compared and no range is built: it may be as long as one likes
            missing = any(sum(low <= layer <= high for layer in there) <= high - low for low, high in layers or [])
            if not matching or missing:
                names = " ".join(dict.fromkeys(site.name for site in sites)) or "none"
                kinds = " ".join(dict.fromkeys(f"{site.stack}.{site.kind}" for site in sites if site.kind == "self"))
                advice = f"; write sites={kinds!r}" if kinds and text == "encoder.self" else ""
                raise ValueError(f"site pattern {text!r} matches nothing in this model; its sites are: {names}{advice}")
            chosen.update(
                id(site) for site in matching if layers is None or any(a <= site.layer <= b for a, b in layers)
            )
        return [site for site in sites if id(site) in chosen]


def _stands_in(site: AttentionSite, term: str) -> bool:
    """Whether the site's path has every part that a term names after its `@`s, as whole names in a row."""
    return all(f".{part}." in f".{site.path}." for part in term.split("@")[1:])


def name_towers(sites: Iterable[AttentionSite]) -> None:
    """Give sites of the same stack, kind and layer a `tower` each, so that every name selects one site.

    A tower is what comes before the layer's number in the path. Where towers meet in a layer, all of their sites are
    called by the shortest part of the tower's path that the others' do not have; blocks that share a number are told
    apart by what follows it. Sites that share a path (layers of one module) differ in the layer. Attached sites keep
    the name that they have.
    """
    sites = list(sites)
    alike: dict[tuple[str, str, int], list[AttentionSite]] = {}
    for site in sites:
        alike.setdefault((site.stack, site.kind, site.layer), []).append(site)
        if not site.attached:
            site.tower = ""
    towers: dict[tuple[str, str], set[str]] = {}
    for same in alike.values():
        starts = {_start(site) for site in same}
        if len(starts) > 1:
            towers.setdefault((same[0].stack, same[0].kind), set()).update(starts)
    for site in sites:
        starts = towers.get((site.stack, site.kind), ())
        if _start(site) in starts and not site.attached:
            site.tower = _distinct(_start(site), starts) or ""
    for same in alike.values():
        names = [site.name for site in same]
        for site, name in zip(same, names, strict=True):
            others = [other.path for other in same if _stands_in(other, name)]
            part = _distinct(site.path, others) if set(others) - {site.path} else None
            if part is not None and not site.attached:
                site.tower = f"{site.tower}@{part}" if site.tower else part


def _start(site: AttentionSite) -> str:
    """Return the part of the path before the layer's number."""
    return _NUMBER.split(site.path, maxsplit=1)[0]


def _distinct(path: str, others: Iterable[str]) -> str | None:
    """The shortest run of names in `path`, of these the first, that is in no other of `others`; None if all are."""
    names, others = path.split("."), [other for other in others if other != path]
    for length in range(1, len(names) + 1):
        for start in range(len(names) - length + 1):
            part = ".".join(names[start : start + length])
            if part and not part.isdigit() and not any(f".{part}." in f".{other}." for other in others):
                return part
    return None


def _layers(text: str) -> list[tuple[int, int]]:
    """Parse `0,2-5` into bounds, (0, 0) and (2, 5); an empty list if it is malformed."""
    matches = [_LAYERS.fullmatch(part) for part in text.split(",")]
    bounds = [(int(match[1]), int(match[2] or match[1])) for match in matches if match]
    return bounds if len(bounds) == len(matches) and all(low <= high for low, high in bounds) else []


class Backend(Protocol):
    """Access to the attentions of a framework's models: finds their sites and reaches their modules.

    A backend may also have `refusal(model)`, the reason why a model of its framework has no site, or None;
    `describe(model, named)`, the objective's inputs that a forward's arguments show; `probing(model)`, a context
    for the probe; `time_first(site)`, whether states around a site are (T, B, C) and not (B, T, C); and
    `passed_by(site)`, called where the site doesn't run, since its layer was left out.
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


_BACKENDS: list[tuple[str, Callable[[], Backend]]] = []


def register_backend(framework: str, make: Callable[[], Backend]) -> None:
    """Register a backend; `make` is called for it once the module `framework` is imported (`""`: always)."""
    _BACKENDS.append((framework, make))


register_backend("", HeldSites)


def check_model(model: Any) -> None:
    """Refuse, by a TypeError, what is no model whose forwards a regularizer could reach."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise TypeError(f"model is {given}, but must be a torch.nn.Module that is not compiled by torch.jit")


def all_sites(model: nn.Module) -> list[AttentionSite]:
    """Every attention site of `model` that a backend knows, each with a name of its own.

    Raises:
        ValueError: there is none.
    """
    check_model(model)
    backends = [make() for framework, make in _BACKENDS if framework == "" or framework in sys.modules]
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
