"""Several methods on one model, such as AD-DROP with R-Drop; those that cannot act together are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn

from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base.context import Supplied
from attn_reg_plugin.regularizers.base.options import OptionError
from attn_reg_plugin.regularizers.base.registry import build
from attn_reg_plugin.regularizers.base.regularizer import Regularizer, Share
from attn_reg_plugin.regularizers.base.statistics import Quantity


def _told(event: str) -> Callable[..., None]:
    """An event that the combination takes as any method does, and then each of its methods."""
    own = getattr(Regularizer, event)

    @wraps(own)
    def tell(self: Combination, *args: Any, **named: Any) -> None:
        own(self, *args, **named)
        for method in self.parts:
            getattr(method, event)(*args, **named)

    return tell


class Combination(Regularizer):
    """Several methods that are attached to one model together.

    Each acts as it does alone, on the same attention where they fill different parts of its request: AD-DROP's mask,
    DropHead's factor of the heads. R-Drop repeats the batch, and AD-DROP masks both passes. A probe sees the model's
    own dropout, and nothing of the other methods: all heads, all layers, nothing cut. AD-DROP draws its random numbers
    before the methods that only draw.

    Their statistics are logged together; `regularized` is the mean over all of them. The drop rates of a site are
    `drop_SITE` of the first method that has it and counts them, and `METHOD_SITE` of the others.

    Args:
        methods: at least two, not attached.

    Raises:
        ValueError: two that cannot act together: the same method twice; one that acts alone; two that both run the
            batch several times. Two that fill the same part of a site's request are refused on attaching.
    """

    parts: Sequence[Regularizer] = ()

    def __init__(self, methods: Sequence[Regularizer]) -> None:
        names = [method.name for method in methods]
        self.name = "+".join(names)
        twice = next((f"{one} twice" for one in names if names.count(one) > 1), "one method" if len(names) < 2 else "")
        if twice:
            raise ValueError(f"{self.name} names {twice}; combine different methods")
        for method in methods:
            if method.alone:
                raise ValueError(f"{self.name}: {method.name} combines with no other method: {method.alone}")
        several = [method.name for method in methods if method.passes > 1]
        if len(several) > 1:
            raise ValueError(
                f"{self.name}: {' and '.join(several)} each run the batch several times and compare the passes"
            )
        self.parts = sorted(methods, key=lambda method: method.draws_last)
        self.sites = next((method.sites for method in self.parts if method.needs_sites), Regularizer.sites)
        super().__post_init__()
        for method in self.parts:
            method.statistics = self.statistics

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))

    large_state = property(lambda self: any(method.large_state for method in self.parts))

    # -- attaching --------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> Combination:
        """As `Regularizer.attach`, of all of them or, on an error, of none: such as two that use the same of a site."""
        if any(method._attachment is not None for method in self.parts):
            raise ValueError(f"{self.name} is attached already; detach() it first")
        method = self.parts[0]
        for method in self.parts:
            method.companions = self.parts
        try:
            for method in self.parts:
                method.attach(model)
        except BaseException as error:
            self.detach()
            if isinstance(error, OptionError):
                error.method = method.name
            raise
        if any(method._trained_another(model) for method in self.parts):
            self.begin_anew()
        for method in self.parts:
            method._begin_anew_on(model)
        return self

    def __enter__(self) -> Combination:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def detach(self) -> None:
        """As `Regularizer.detach`."""
        for method in reversed(self.parts):
            method.detach()
            method.companions = ()

    @property
    def model(self) -> nn.Module:
        """The attached model."""
        return self.parts[0].model

    @property
    def attached_sites(self) -> list[AttentionSite]:
        """The sites of all of them, each once."""
        return list(dict.fromkeys(site for method in self.parts for site in method.attached_sites))

    # -- what each of them hears ------------------------------------------------------------------------------------

    bind, unbind = _told("bind"), _told("unbind")
    begin_training, begin_epoch, begin_update = map(_told, ("begin_training", "begin_epoch", "begin_update"))
    end_update, forget_unfinished = _told("end_update"), _told("forget_unfinished")

    def supply(self, supplied: Supplied | None = None, /, **fields: Any) -> None:
        """Tell what the next forwards' arguments do not show."""
        super().supply(supplied, **fields)
        for method in self.parts:
            method.supply(self.supplied)

    # -- what they say together -------------------------------------------------------------------------------------

    @property
    def quantities(self) -> list[Quantity]:
        """Quantities of all methods, each once."""
        return list(dict.fromkeys(quantity for method in self.parts for quantity in method.quantities))

    @property
    def by_round(self) -> tuple[Quantity, ...]:
        """Quantities of all methods' rounds."""
        return tuple(quantity for method in self.parts for quantity in method.by_round)

    @property
    def passes(self) -> int:
        """Passes of the method that has several."""
        return max(method.passes for method in self.parts)

    def leaves_unused(self) -> bool:
        """Whether any of them does."""
        return any(method.leaves_unused() for method in self.parts)

    def loss(self, compute: Callable[[Any], Tensor], batch: Any, share: Share | None = None) -> Tensor:
        """The loss of the one that adds to it."""
        adding = next((method for method in self.parts if method.passes > 1), None)
        return super().loss(compute, batch) if adding is None else adding.loss(compute, batch, share)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of each method, under its name."""
        return {**super().state_dict(), "parts": {method.name: method.state_dict() for method in self.parts}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Regularizer.load_state_dict`, of each; a ValueError if the state lacks one of them."""
        self._load(state, "load_state_dict")

    def resume(self, state: Mapping[str, Any]) -> None:
        """As `Regularizer.resume`, of each."""
        self._load(state, "resume")

    def _load(self, state: Mapping[str, Any], how: str) -> None:
        super().load_state_dict(state)
        parts = state.get("parts", {})
        for method in self.parts:
            if method.name not in parts:
                raise ValueError(f"the state isn't one of {self.name}: it lacks that of {method.name}")
            getattr(method, how)(parts[method.name])


def build_combination(name: str, options: Mapping[str, Mapping[str, Any]]) -> Combination:
    """Build the methods whose names `name` joins by `+`; see `build`."""
    names = name.split("+")
    foreign = next((key for key in options if key not in names), None)
    if foreign is not None:
        raise ValueError(f"options of {foreign!r}, which is not among {name}")
    return Combination([build(one, **options.get(one, {})) for one in names])
