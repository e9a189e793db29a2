"""Several methods on one model, such as AD-DROP with R-Drop; those that cannot act together are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base.context import Supplied, Training
from attn_reg_plugin.regularizers.base.options import OptionError
from attn_reg_plugin.regularizers.base.registry import build
from attn_reg_plugin.regularizers.base.regularizer import Regularizer, Share
from attn_reg_plugin.regularizers.base.statistics import Quantity


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

    def __init__(self, methods: Sequence[Regularizer]) -> None:
        self.name = "+".join(method.name for method in methods)
        check_together(methods)
        self.methods = sorted(methods, key=lambda method: method.acts)
        self.sites = next((method.sites for method in self.methods if method.needs_sites), Regularizer.sites)
        super().__post_init__()
        for method in self.methods:
            method.statistics, method.companions = self.statistics, self.methods

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.methods))

    @property
    def parts(self) -> list[Regularizer]:
        """The methods."""
        return self.methods

    @property
    def needs_sites(self) -> bool:
        """Whether any of them acts on attention."""
        return any(method.needs_sites for method in self.methods)

    def to_dict(self) -> dict[str, Any]:
        """Return the names, and each method's options under its own."""
        options = {method.name: method.to_dict() for method in self.methods}
        for one in options.values():
            del one["method"]
        return {"method": self.name, **options}

    # -- attaching --------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> Combination:
        """As `Regularizer.attach`, of all of them or, on an error, of none: such as two that use the same of a site."""
        if any(method._attachment is not None for method in self.methods):
            raise ValueError(f"{self.name} is attached already; detach() it first")
        method = self.methods[0]
        try:
            for method in self.methods:
                method.attach(model)
        except BaseException as error:
            for attached in self.methods:
                attached.detach()
            if isinstance(error, OptionError):
                error.method = method.name
            raise
        if any(method._trained_another(model) for method in self.methods):
            self.begin_anew()
        for method in self.methods:
            method._begin_anew_on(model)
        return self

    def __enter__(self) -> Combination:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def detach(self) -> None:
        """As `Regularizer.detach`."""
        for method in reversed(self.methods):
            method.detach()

    @property
    def model(self) -> nn.Module:
        """The attached model."""
        return self.methods[0].model

    @property
    def attached_sites(self) -> list[AttentionSite]:
        """The sites of all of them, each once."""
        return list(dict.fromkeys(site for method in self.methods for site in method.attached_sites))

    # -- what each of them hears ------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Announce an epoch, counted from 1."""
        super().begin_epoch(epoch)
        self._tell("begin_epoch", epoch)

    def begin_update(self, update: int) -> None:
        """Announce the number of updates made so far."""
        super().begin_update(update)
        self._tell("begin_update", update)

    def end_update(self) -> None:
        """Announce an update."""
        self.updates += 1
        self._tell("end_update")

    def supply(self, supplied: Supplied | None = None, /, **fields: Any) -> None:
        """Tell what the next forwards' arguments do not show."""
        super().supply(supplied, **fields)
        self._tell("supply", self.supplied)

    def bind(self, training: Training) -> None:
        """Get to know the training."""
        self._tell("bind", training)

    def begin_training(self, updates: int | None, epochs: int | None = None) -> None:
        """Announce a training of so many updates and epochs."""
        self._tell("begin_training", updates, epochs)

    def unbind(self) -> None:
        """Release the training."""
        self._tell("unbind")

    def forget_unfinished(self) -> None:
        """Forget the forwards since the last update."""
        self._tell("forget_unfinished")

    def _tell(self, event: str, *args: Any) -> None:
        for method in self.methods:
            getattr(method, event)(*args)

    # -- what they say together -------------------------------------------------------------------------------------

    @property
    def quantities(self) -> list[Quantity]:
        """Quantities of all methods, each once."""
        return list(dict.fromkeys(quantity for method in self.methods for quantity in method.quantities))

    @property
    def by_round(self) -> tuple[Quantity, ...]:
        """Quantities of all methods' rounds."""
        return tuple(quantity for method in self.methods for quantity in method.by_round)

    @property
    def large_state(self) -> bool:
        """Whether any of them has one."""
        return any(method.large_state for method in self.methods)

    @property
    def begun(self) -> bool:
        """Whether any of them has a state worth keeping."""
        return any(method.begun for method in self.methods)

    @property
    def passes(self) -> int:
        """Passes of the method that has several."""
        return max(method.passes for method in self.methods)

    def leaves_unused(self) -> bool:
        """Whether any of them does."""
        return any(method.leaves_unused() for method in self.methods)

    def due(self) -> bool:
        """Whether any of them is."""
        return any(method.due() for method in self.methods)

    def loss(self, compute: Callable[[Any], Tensor], batch: Any, share: Share | None = None) -> Tensor:
        """The loss of the one that adds to it."""
        adding = next((method for method in self.methods if method.passes > 1), None)
        return super().loss(compute, batch) if adding is None else adding.loss(compute, batch, share)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of each method, under its name."""
        return {**super().state_dict(), "parts": {method.name: method.state_dict() for method in self.methods}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Regularizer.load_state_dict`, of each; a ValueError if the state lacks one of them."""
        self._load(state, "load_state_dict")

    def resume(self, state: Mapping[str, Any]) -> None:
        """As `Regularizer.resume`, of each."""
        self._load(state, "resume")

    def _load(self, state: Mapping[str, Any], how: str) -> None:
        super().load_state_dict(state)
        parts = state.get("parts", {})
        for method in self.methods:
            if method.name not in parts:
                raise ValueError(f"the state isn't one of {self.name}: it lacks that of {method.name}")
            getattr(method, how)(parts[method.name])


def check_together(methods: Sequence[Regularizer]) -> None:
    """Refuse methods that cannot act together on one model.

    Raises:
        ValueError: the reason, in one sentence.
    """
    names = [method.name for method in methods]
    name = "+".join(names)
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice or len(names) < 2:
        raise ValueError(f"{name} names {twice or 'one method'}{' twice' if twice else ''}; combine different methods")
    for method in methods:
        if method.alone:
            raise ValueError(f"{name}: {method.name} combines with no other method: {method.alone}")
    running = [method.name for method in methods if method.passes > 1]
    if len(running) > 1:
        raise ValueError(f"{name}: {' and '.join(running)} each run the batch several times and compare the passes")


def build_combination(name: str, options: Mapping[str, Mapping[str, Any]]) -> Combination:
    """Build the methods whose names `name` joins by `+`; see `build`."""
    names = name.split("+")
    foreign = next((key for key in options if key not in names), None)
    if foreign is not None:
        raise ValueError(f"options of {foreign!r}, which is not among {name}")
    return Combination([build(one, **options.get(one, {})) for one in names])
