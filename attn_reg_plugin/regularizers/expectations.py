"""What a training should bring to an attached method, and the warning where it does not come.

A method that is never reached does nothing and says nothing: the model is in evaluation mode, another module is called,
or the selected attention does not run, as that of an encoder whose outputs are given. One that is never told of updates
stands still.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.attachment import Attachment

logger = logging.getLogger(__name__)
#: regularized updates after which an attention that none of them called was not left out at random: with LayerDrop at
#: one half, some layer of 48 never comes in so many in one training of 20,000
PATIENCE = 20
#: updates that the model's parameters show before it is said that none was announced
UNANNOUNCED = 20
HINT = (
    "an attention is reached where its module runs in the model's forward, not where other code uses its weights or "
    "its stack's outputs are given, and calls regularized_attention with its site; or choose other sites"
)
#: masks that are wanted after the update that they were made for
RELEASED = (
    "{method} freed its masks at the end of the update, and activation checkpointing runs the update's forward once "
    "more; call end_update() after the last backward"
)


@dataclass
class Updates:
    """The optimizer's updates of an attached model.

    Attributes:
        announced: whether any was.
        version: of the trained parameters at the last forward that was looked at.
        seen: how many updates such forwards showed: accumulated batches show none.
    """

    announced: bool = False
    version: int | None = None
    seen: int = 0

    def look(self, model: nn.Module) -> None:
        """Count an update if the parameters are not those of the last forward."""
        before = self.version
        self.version = sum(parameter._version for parameter in model.parameters() if parameter.requires_grad)
        self.seen += before is not None and before != self.version


def expect_update(attachment: Attachment) -> None:
    """After an update: warn, once, if what should have come before it did not."""
    attachment.updates.announced = True
    expect_forward(attachment, "an update was made", left=attachment.idle and not attachment.present)
    expect_calls(attachment)


def expect_forward(attachment: Attachment, event: str, left: bool = False) -> None:
    """Warn, once, if there was none to regularize when there should have been.

    Args:
        event: what happened without.
        left: whether the model was left in evaluation mode, as after a validation, whatever came before.
    """
    if attachment.warned or (attachment.seen and not left):
        return
    attachment.warned = True
    model = type(attachment.model).__name__
    if attachment.idle or not attachment.model.training:
        reason = f"{model} is in evaluation mode: call its train() before training"
    elif any(site.ran for site in attachment.sites) and not any(site.module.training for site in attachment.sites):
        reason = f"the attention of {model} is in evaluation mode: call train() on the part of the model that has it"
    else:
        reason = f"the forward of {model} was never called with gradients: attach to the module that is called"
    logger.warning(f"{attachment.regularizer.name}: {event}, but nothing was regularized; {reason}")


def expect_attention(attachment: Attachment) -> None:
    """At the end: warn, once, if attention ran with gradients, and no forward could be regularized."""
    if any(site.ran for site in attachment.sites):
        expect_forward(attachment, "its attention ran with gradients")


def expect_calls(attachment: Attachment) -> None:
    """After an update: warn, once, if selected attentions should have been regularized and were never called.

    At once where it is all of them. Some may be left out at random, so they have `PATIENCE` updates to come; all of
    them have that in a model with a LayerDrop of its own. A site of which nothing was asked, or whose module is in
    evaluation mode, does not count.
    """
    due, attachment.due = attachment.due, False
    if not due or attachment.warned:
        return
    trained = [site for site in attachment.sites if site.module is None or site.module.training]
    missing = [site.name for site in trained if site.uncalled]
    if not missing:
        return
    attachment.awaited.update(missing)
    none = all(site.uncalled is not False for site in trained)
    if not none or leaves_layers_out(attachment.model):
        missing = [name for name in missing if attachment.awaited[name] >= PATIENCE]
    if not missing:
        return
    attachment.warned = True
    updates = max(attachment.awaited[name] for name in missing)
    event = "an update was made" if updates == 1 else f"{updates} updates were made"
    what = "nothing was regularized" if none else "part of the selected attention was not regularized"
    logger.warning(f"{attachment.regularizer.name}: {event}, but {what}; never called: {', '.join(missing)}; {HINT}")


def expect_announcement(attachment: Attachment) -> None:
    """At a forward: warn, once, if the optimizer made `UNANNOUNCED` updates, and `end_update` was never called.

    Schedules, AttendOut's rounds and masks of weights would stand still.
    """
    updates = attachment.updates
    if updates.announced or attachment.warned:
        return
    updates.look(attachment.model)
    if updates.seen < UNANNOUNCED:
        return
    attachment.warned = True
    logger.warning(
        f"{attachment.regularizer.name}: {UNANNOUNCED} updates were made, and none was announced: call end_update() "
        "after each optimizer step; schedules and rounds count by it"
    )


def leaves_layers_out(model: nn.Module) -> bool:
    """Whether a model says that it has LayerDrop: a rate `layerdrop`, `encoder_layerdrop`, ... of it or its config."""
    holders = [held for module in model.modules() for held in (module, vars(module).get("config"))]
    rates = [(name, rate) for held in holders for name, rate in getattr(held, "__dict__", {}).items()]
    return any(name.endswith("layerdrop") and isinstance(rate, int | float) and rate > 0 for name, rate in rates)
