"""Shared by Trainer's and Lightning's callback: the method that they are given; what is said, logged and refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attn_reg_plugin.attention.selection import all_sites
from attn_reg_plugin.regularizers import Combination, Regularizer, build, options_of
from attn_reg_plugin.regularizers.base.distributed import waits_for_gradients
from attn_reg_plugin.regularizers.base.statistics import quantities

#: before the names of what is logged
PREFIX = "attn_reg/"
#: when AD-DROP acts, by its option `cross_tuning`
WHEN = {"epoch": "from epoch 2, every other", "off": "in every update"}


class MethodCallback:
    """A callback that is given a method.

    Args:
        regularizer: the method, not attached; its name, such as `"ad_drop"`; or a list of methods or names.
        rates_by_site: log the drop rate of each site as well, not only their mean.
        options: of the method that is named, such as `p=0.3`.

    Raises:
        TypeError: it is something else, such as a class.
        ValueError, TypeError: an unknown name, a wrong option, or methods that cannot act together.
    """

    def __init__(
        self,
        regularizer: Regularizer | str | Sequence[Regularizer | str] | None = None,
        *,
        rates_by_site: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.regularizer, self.rates_by_site = self._method(regularizer, options), rates_by_site

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.regularizer!r})"

    def _method(self, given: Any, options: Mapping[str, Any]) -> Regularizer:
        name = type(self).__name__
        if isinstance(given, str):
            return build(given, **options)
        if options:
            raise TypeError(f"{name}: {', '.join(options)} goes with the name of a method: {name}('ad_drop', p=0.3)")
        if isinstance(given, list | tuple) and given:
            methods = [self._method(one, {}) for one in given]
            return methods[0] if len(methods) == 1 else Combination(methods)
        if not isinstance(given, Regularizer):
            found = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            raise TypeError(
                f"{name} takes a regularizer, such as {name}(ADDrop(p=0.3, q=0.3)), its name, such as "
                f"{name}('ad_drop', p=0.3), or a list of these, not {found}"
            )
        return given


def attached(regularizer: Regularizer, model: nn.Module) -> str:
    """What is attached to `model`, in one line: method, places, options that are not the defaults, and when it acts."""
    said = []
    for method in regularizer.parts:
        where = type(model).__name__
        if method.needs_sites:
            sites = method.attached_sites
            kinds = " ".join(dict.fromkeys(f"{site.stack}.{site.kind}" for site in sites))
            where = f"{len(sites)} of {len(all_sites(model))} attentions of {where}: {kinds}"
        chosen = {entry.name: (getattr(method, entry.name), entry.default) for entry in options_of(type(method))}
        cross_tuning, _ = chosen.pop("cross_tuning", (None, None))
        chosen.pop("sites", None)
        options = [f"{name} {now}" for name, (now, default) in chosen.items() if now != default or name in ("p", "q")]
        every = f"every other {str(cross_tuning).rpartition(':')[2]} updates"
        when = [] if cross_tuning is None else [WHEN.get(cross_tuning, every)]
        said.append("; ".join([f"{method.name} on {where}", *([", ".join(options)] if options else []), *when]))
    return " + ".join(said)


def logged(regularizer: Regularizer, device: torch.device, by_site: bool) -> dict[str, float]:
    """What happened since the last call, over all data-parallel ranks, of which each has to call; see `quantities`.

    Returns:
        Names begin with `attn_reg/`. Drop rates are their means over the sites, `drop_rate`, of further methods
        `METHOD_rate`, and with `by_site` those of each site as well.
    """
    found, line, rates = quantities(regularizer, device), {}, {}
    ends = tuple(f"_{site.name}" for site in regularizer.attached_sites)
    for title, value in found.items():
        if title.endswith(ends):
            end = next(end for end in ends if title.endswith(end))
            rates.setdefault(f"{PREFIX}{title.removesuffix(end)}_rate", []).append(value)
        if by_site or not title.endswith(ends):
            line[PREFIX + title] = value
    return line | {name: sum(values) / len(values) for name, values in rates.items()}


def refuse_unused_parameters(wrapped: nn.Module, regularizer: Regularizer, advice: str) -> None:
    """Refuse, by a ValueError, attention LayerDrop where data parallel training waits for every gradient.

    Args:
        wrapped: the model, as it is wrapped for that.
        advice: what to set instead.
    """
    if waits_for_gradients(wrapped) and regularizer.leaves_unused():
        raise ValueError(
            "a dropped attention gives its queries and keys no gradient, which data parallel training waits for; "
            f"{advice}"
        )
