"""The registry of methods: every face finds a method here by its name, with the options worth comparing."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attn_reg_plugin.regularizers.base.options import options_text

if TYPE_CHECKING:
    from torch import nn

    from attn_reg_plugin.regularizers.base.combination import Combination
    from attn_reg_plugin.regularizers.base.hooks.attachment import Attachment
    from attn_reg_plugin.regularizers.base.regularizer import Regularizer

REGISTRY: dict[str, type[Regularizer]] = {}


@dataclass(frozen=True)
class Preset:
    """A method with options worth comparing: a row of `attn-reg compare`, `finetune` and `bench`.

    Attributes:
        name: as `--methods` names it.
        title: as tables name it.
        options: of the method; the others have their defaults.
    """

    name: str
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)


def presets_of(method: type[Regularizer]) -> tuple[Preset, ...]:
    """Return a registered method's presets; without any, a preset of its name with its default options."""
    return vars(method).get("presets") or (Preset(method.name, method.name.replace("_", " ")),)


def register(name: str) -> Callable[[type[Regularizer]], type[Regularizer]]:
    """Decorate a class to make the method available under `name` to every face and its flags."""

    def add(method: type[Regularizer]) -> type[Regularizer]:
        method.name = name
        method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\n{options_text(method)}\n"
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
        TypeError: an option of another type, or a name that is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"method is {name!r}, but must be a name, such as 'ad_drop'; ADDrop(...) has its own attach()")
    if "+" in name:
        from attn_reg_plugin.regularizers.base.combination import build_combination

        return build_combination(name, options)
    if name not in REGISTRY:
        raise ValueError(f"unknown method {name!r}; the methods are: {', '.join(sorted(REGISTRY))}")
    method = REGISTRY[name]
    known = [entry.name for entry in dataclasses.fields(method) if entry.init]
    if unknown := [option for option in options if option not in known]:
        raise TypeError(f"{name} has no option {unknown[0]!r}; its options are: {', '.join(known)}")
    return method(**options)


def attach(model: nn.Module, method: str, **options: Any) -> Attachment | Combination:
    """Build a method and attach it: `attach(model, "ad_drop", p=0.3)`; see `build` and `Regularizer.attach`.

    Returns:
        A context manager that detaches; its `regularizer` hears of epochs and updates, of several methods the
        `Combination` itself.
    """
    return build(method, **options).attach(model)
