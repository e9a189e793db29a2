"""The base class of all methods: an object that attaches to a model and acts inside the model's own forward.

Attaching is all it takes. A forward pre-hook sees the arguments of each training-mode forward with gradients on; the
method prepares masks on its sites (AD-DROP runs its probe there) and lets the forward pass. They stay until the next
forward or `end_update`, because activation checkpointing runs the forward again during backward.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.masks import PackedMask, dropped_fraction
from attn_reg_plugin.attention.requests import MaskSampler
from attn_reg_plugin.attention.selection import SiteSelector
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base.context import Supplied, Training
from attn_reg_plugin.regularizers.base.drawn import Drawn
from attn_reg_plugin.regularizers.base.hooks.attachment import Attachment
from attn_reg_plugin.regularizers.base.hooks.forward import Forward, device_of
from attn_reg_plugin.regularizers.base.options import check_options, check_whole, option, options_of
from attn_reg_plugin.regularizers.base.outputs import check_scalar
from attn_reg_plugin.regularizers.base.registry import Preset
from attn_reg_plugin.regularizers.base.statistics import Quantity, Statistics, drop_rate, quantities

logger = logging.getLogger(__name__)
#: draws a keep mask from (shape, valid, generator); the mask lies on the generator's device
Draw = Callable[[tuple[int, ...], Tensor | None, torch.Generator], Tensor]
#: from a sum over items, and their number, to what is added to a loss
Share = Callable[[Tensor, int], Tensor]


@dataclass(eq=False)
class Regularizer:
    """Base of the methods. Subclasses are dataclasses whose `option` fields are their options.

    Attributes:
        sites: which attention is regularized, see `SiteSelector`.
    """

    name: ClassVar[str] = ""
    #: the options that the commands compare it with
    presets: ClassVar[tuple[Preset, ...]] = ()
    #: statistics of its own that a face logs for every update
    logged: ClassVar[tuple[Quantity, ...]] = ()
    #: and those of rounds, which end in `end_update`
    by_round: ClassVar[tuple[Quantity, ...]] = ()
    #: whether a batch has to pass through the attached model in one forward
    one_forward: ClassVar[bool] = False
    #: whether it acts on attention; if not, `sites` has no meaning, and any model will do
    needs_sites: ClassVar[bool] = True
    #: whether it counts what it drops of each site
    counts_drops: ClassVar[bool] = True
    #: whether it acts after those of a combination that may probe
    draws_last: ClassVar[bool] = False
    #: the parts of a request that it fills, see `compatibility.PARTS`: others may fill the rest; None: it does not say
    uses: ClassVar[frozenset[str] | None] = None
    #: why it acts with no other method on one model; empty where it does
    alone: ClassVar[str] = ""
    sites: str = option("encoder.self", "which attention to regularize, e.g. 'encoder.self[0,2-5] decoder.cross', '*'")

    def __post_init__(self) -> None:
        """Check the options, in one sentence each.

        Raises:
            TypeError, ValueError: an option is of another type than it declares, or out of its range.
        """
        check_options(self)
        SiteSelector(self.sites)
        self.epoch: int | None = None
        self.updates = 0
        self.statistics, self.supplied = Statistics(), Supplied()
        self.companions: Sequence[Regularizer] = ()  # all methods of its combination, in the order in which they act
        self._attachment: Attachment | None = None
        self._trained: weakref.ref[nn.Module] | None = None  # the model that counts and state are of

    # -- what a user calls ------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> Attachment:
        """Regularize every training-mode forward of `model` from here, until `detach` or the end of the `with`.

        Parameters, `state_dict` keys and evaluation outputs stay as they are. On another model than before the method
        begins anew, unless a state was loaded since; so epochs and updates are announced after attaching.

        Raises:
            ValueError: the sites match nothing in the model, or it is attached already.
        """
        if self._attachment is not None:
            raise ValueError(f"{self.name} is attached already; detach() it first")
        self._attachment = Attachment(self, model)
        if not self.companions:
            self._begin_anew_on(model)
        return self._attachment

    def detach(self) -> None:
        """Restore the model exactly; nothing happens if nothing is attached."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            if attachment.reach.seen:
                self._trained = weakref.ref(attachment.model)
            attachment.reach.end()
            attachment.remove()

    def _trained_another(self, model: nn.Module) -> bool:
        return self._trained is not None and self._trained() is not model

    def _begin_anew_on(self, model: nn.Module) -> None:
        if self._trained_another(model):
            if self.epoch is not None or self.updates:
                logger.info(f"{self.name}: another model is attached, so epochs and updates are counted anew")
            self.begin_anew()

    def __getattr__(self, name: str) -> Any:
        """Say what to write where a Trainer takes the method for a callback."""
        kind = type(self).__name__
        if name.startswith("on_") or name in ("setup", "state_key"):
            raise AttributeError(
                f"{kind} is a method and no callback; write callbacks=[AttnRegCallback({kind}(...))], with Lightning "
                f"callbacks=[LightningCallback({kind}(...))]"
            )
        return object.__getattribute__(self, name)  # for its error, which may come from inside a property

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles know no model that they were trained with."""
        return {**vars(self), "_trained": None}

    @property
    def model(self) -> nn.Module:
        """The attached model; a ValueError if none is."""
        if self._attachment is None:
            raise ValueError(f"{self.name} is not attached to a model")
        return self._attachment.model

    @property
    def attached_sites(self) -> list[AttentionSite]:
        """The sites in use; empty when detached."""
        return [] if self._attachment is None else self._attachment.sites

    @property
    def parts(self) -> list[Regularizer]:
        """The methods that act: itself, or those of a combination."""
        return [self]

    @property
    def quantities(self) -> list[Quantity]:
        """Quantities that a face logs of updates: share of regularized forwards, its own, drop rates by site."""
        rates = [drop_rate(self, site) for site in self.attached_sites] if self.counts_drops else []
        return [Quantity("regularized", "forwards"), *self.logged, *rates]

    def summary(self) -> dict[str, float]:
        """Return what happened since the last call: the share of forwards that were `regularized`, the drop rate of
        each site (`drop_SITE`), and what else the method logs; for a loop of one's own. Every rank has to call."""
        return quantities(self, device_of(self.model))

    def begin_training(self, updates: int | None, epochs: int | None = None) -> None:
        """Announce a training of so many optimizer updates and epochs in all; None: their number is not known."""
        for name, number in (("updates", updates), ("epochs", epochs)):
            if number is not None:
                check_whole(f"the number of {name}", number, 1)

    def begin_epoch(self, epoch: int) -> None:
        """Announce an epoch, counted from 1."""
        check_whole("epoch", epoch, 1)
        self.epoch = epoch

    def begin_update(self, update: int) -> None:
        """Announce the number of optimizer updates made so far, where the caller counts them."""
        check_whole("update", update, 0)
        self.updates = update

    def end_update(self) -> None:
        """Announce that the optimizer has made an update, after its backwards: masks of its forwards are freed.

        It warns once if no forward could be regularized, or if selected attention is never called.
        """
        self.updates += 1
        if self._attachment is not None:
            self._attachment.end_update()

    def supply(self, supplied: Supplied | None = None, /, **fields: Any) -> None:
        """Tell what the next forwards' arguments do not show, as `Supplied` or its fields, until the next call."""
        if not isinstance(supplied, Supplied | None):
            raise TypeError(
                f"supplied is of type {type(supplied).__name__}, but must be a Supplied; give fields by their names, "
                "such as supply(targets=labels)"
            )
        self.supplied = Supplied(**fields) if supplied is None else supplied

    def loss(self, compute: Callable[[Any], Tensor], batch: Any, share: Share | None = None) -> Tensor:
        """The training loss of a batch: `compute(batch)`, and what the method adds to it.

        Most methods add nothing. In a loop of one's own, one that does (its `passes` are more than 1) is used by

            loss = regularizer.loss(lambda batch: loss_function(model(**batch), batch), batch)

        Args:
            compute: runs the model on a batch and gives the loss: a mean, over whatever it is computed on.
            batch: a tensor, or tensors in mappings, lists, tuples and dataclasses. The first one's first dimension is
                the number of examples.
            share: makes such a loss of a sum over examples or tokens, and of their number; by default their mean.
        """
        return check_scalar("the loss", compute(batch))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resuming needs: numbers and tensors only."""
        return {"method": self.name, "epoch": self.epoch, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            TypeError, ValueError: it is no state of this method, see `check_state`.
        """
        check_state(state, self.name)
        self.epoch, self.updates = state["epoch"], state["updates"]
        self._trained = None if self._attachment is None else weakref.ref(self.model)

    def resume(self, state: Mapping[str, Any]) -> None:
        """`load_state_dict` where training continues from it; a state of other sites is refused by a ValueError."""
        self.load_state_dict(state)

    # -- what a method implements, if it needs it -------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Forget the training of another model, whose counts and state say nothing of the one now attached."""
        self.epoch, self.updates = None, 0

    def bind(self, training: Training) -> None:
        """Get to know the training of a face, after attaching and before the first update."""

    def unbind(self) -> None:
        """Release what `bind` gave."""

    @property
    def large_state(self) -> bool:
        """Whether the state is too large to be kept in every checkpoint."""
        return False

    def forget_unfinished(self) -> None:
        """Forget the forwards since the last update: the optimizer's step was skipped, as on an overflow."""

    def copied(self, memo: dict[int, Any]) -> Regularizer:
        """For a copy of the attached model: the same options and place in training, statistics of its own."""
        twin = copy.copy(self)
        twin.statistics, twin.supplied = copy.deepcopy(self.statistics, memo), Supplied()
        return twin

    def hooks(self, model: nn.Module, sites: list[AttentionSite]) -> list[Any]:
        """Put more than masks into `model`, once its sites are open; detaching calls the `remove()` of each part."""
        return []

    def leaves_unused(self) -> bool:
        """Whether some parameters may get no gradient in an update, which data-parallel training has to expect."""
        return False

    def check_shards(self, modules: list[nn.Module]) -> None:
        """Refuse, by a ValueError, a model in which `fully_shard` (FSDP2) was called on these modules."""

    # -- what a method implements -----------------------------------------------------------------------------------

    def when(self) -> str:
        """Say in words when the method acts, such as "from epoch 2, every other"; empty where it always does."""
        return ""

    def due(self) -> bool:
        """Whether the forward that is about to happen is regularized: always, unless the option `p` is 0."""
        return getattr(self, "p", 1.0) > 0

    def before_forward(self, forward: Forward) -> None:
        """Prepare the sites for a forward that is due."""
        raise NotImplementedError

    def after_forward(self, outputs: Any) -> None:
        """Look at the outputs of a forward that was due; None where an exception ended it."""

    @property
    def passes(self) -> int:
        """Number of passes of each example in a batch, all in one forward; see `loss`."""
        return 1

    def rehearse(self, forward: Forward) -> None:
        """Try, in a forward that isn't due, what later ones will need, so that a mistake is reported at the start.

        Called once, in the first training forward if that isn't due; random numbers, statistics, sites are put back.
        """

    # -- for methods ------------------------------------------------------------------------------------------------

    def sampler(self, draw: Draw, alone: bool = False) -> MaskSampler:
        """Return a sampler of the keep masks of the next forward, for all sites or `alone` for one; see `Drawn`."""

        def made(keep: Tensor, valid: Tensor | None, sites: int) -> tuple[list[PackedMask], Tensor, Tensor]:
            return PackedMask.of(keep, valid).split(sites), *dropped_fraction(keep, valid, sites)

        return Drawn(self, draw, made, alone)

    def count_dropped(self, sites: Sequence[AttentionSite], keep: Tensor, valid: Tensor | None) -> None:
        """Add the masks of sites, one after the other, to their drop rates."""
        self.count_share(sites, *dropped_fraction(keep, valid, len(sites)))

    def count_share(self, sites: Sequence[AttentionSite], dropped: float | Tensor, total: float | Tensor = 1.0) -> None:
        """Add so many dropped of so many to the drop rate of each site: a number for all, or one each, (sites,)."""
        rates = [drop_rate(self, site) for site in sites]
        self.statistics.add(tuple(rate.key for rate in rates), dropped)
        self.statistics.add(tuple(rate.mean_of for rate in rates), total)


def option_flag(method: str, option: str) -> str:
    """Name the flag of an option, without dashes: `attn-OPTION` where all methods share it, else `METHOD-OPTION`."""
    shared = any(one.name == option for one in options_of(Regularizer))
    return f"{'attn' if shared else method}-{option}".replace("_", "-")


def check_state(state: Mapping[str, Any], name: str) -> None:
    """Refuse what is no state of the method `name`.

    Raises:
        TypeError: it is no mapping.
        ValueError: it is another method's state, or lacks what every state has, or counts in other than numbers.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is a {type(state).__name__}, but must be what {name}'s state_dict() gave")
    if (theirs := state.get("method", name)) != name:
        raise ValueError(f"the state is one of {theirs}, but must be one of {name}")
    if missing := [key for key in ("epoch", "updates") if key not in state]:
        raise ValueError(f"the state isn't one of {name}: it lacks {' and '.join(missing)}")
    for key, least in (("epoch", 1), ("updates", 0)):
        if key != "epoch" or state[key] is not None:
            try:
                check_whole(f"the state's {key}", state[key], least)
            except TypeError as error:
                raise ValueError(error) from None
