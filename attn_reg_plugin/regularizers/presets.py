"""Methods with options worth comparing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base import Regularizer


@dataclass(frozen=True)
class Preset:
    """A method with options worth comparing: a row of `attn-reg compare`, `finetune` and `bench`.

    Attributes:
        name: as `--methods` names it.
        title: as tables name it.
        options: of the method; the others have their defaults.
        earlier: what earlier versions called it; finished runs and configurations of theirs are still understood.
        together: options that mean something together: where a configuration gives one of them, the others are the
            method's defaults and not the preset's.
    """

    name: str
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    earlier: tuple[str, ...] = ()
    together: tuple[str, ...] = ()


def presets_of(method: type[Regularizer]) -> tuple[Preset, ...]:
    """A registered method's presets; one that declares none has its own name and its default options."""
    return vars(method).get("presets") or (Preset(method.name, method.name.replace("_", " ")),)
