"""What a training should bring to an attached method, and the warning where it does not come.

A method that is never reached does nothing and says nothing: the model is in evaluation mode, another module is called,
or the selected attention does not run, as that of an encoder whose outputs are given.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.attachment import Attachment

logger = logging.getLogger(__name__)
#: regularized updates after which an attention that none of them called was not left out at random: with LayerDrop at
#: one half, some layer of 48 never comes in so many in one training of 20,000
PATIENCE = 20
HINT = (
    "an attention is reached where its module runs in the model's forward, not where other code uses its weights or "
    "its stack's outputs are given, and calls regularized_attention with its site; or choose other sites"
)
#: masks that are wanted after the update that they were made for
RELEASED = (
    "{method} freed its masks at the end of the update, and activation checkpointing runs the update's forward once "
    "more; call end_update() after the last backward"
)


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


def leaves_layers_out(model: nn.Module) -> bool:
    """Whether a model says that it has LayerDrop: a rate `layerdrop`, `encoder_layerdrop`, ... of it or its config."""
    holders = [held for module in model.modules() for held in (module, vars(module).get("config"))]
    rates = [(name, rate) for held in holders for name, rate in getattr(held, "__dict__", {}).items()]
    return any(name.endswith("layerdrop") and isinstance(rate, int | float) and rate > 0 for name, rate in rates)
