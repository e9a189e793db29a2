"""The registry of methods: every face finds a method here by its name, with the options worth comparing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base.regularizer import Regularizer

REGISTRY: dict[str, type[Regularizer]] = {}


@dataclass(frozen=True)
class Preset:
    """A method with options worth comparing: a row of `attn-reg compare`, `finetune` and `bench`.

    Attributes:
        name: as `--methods` names it.
        title: as tables name it.
        options: of the method; the others have their defaults.
        together: options that mean something together: where a configuration gives one of them, the preset gives none.
    """

    name: str
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    together: tuple[str, ...] = ()


def presets_of(method: type[Regularizer]) -> tuple[Preset, ...]:
    """Return a registered method's presets; without any, a preset of its name with its default options."""
    return vars(method).get("presets") or (Preset(method.name, method.name.replace("_", " ")),)


def register(name: str) -> Callable[[type[Regularizer]], type[Regularizer]]:
    """Decorate a class to make the method available under `name` to every face and its flags."""

    def add(method: type[Regularizer]) -> type[Regularizer]:
        method.name = name
        REGISTRY[name] = method
        return method

    return add


def build(name: str, **options: Any) -> Regularizer:
    """Build the regularizer registered as `name`.

    Args:
        name: of a method; or of several that act together, joined by `+`, see `Combination`.
        options: of the method; of several, a mapping for each by its name.

    Raises:
        ValueError: an unknown name (the known ones are listed), or an option out of its range.
        TypeError: an option of another type.
    """
    if "+" in name:
        from attn_reg_plugin.regularizers.base.combination import build_combination

        return build_combination(name, options)
    if name not in REGISTRY:
        raise ValueError(f"unknown method {name!r}; the methods are: {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name](**options)
