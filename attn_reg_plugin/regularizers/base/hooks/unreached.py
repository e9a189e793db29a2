"""Warnings of what never came: a forward to regularize, a call of the selected attention, the news of an update.

A method that is never reached does nothing and says nothing: the model is in evaluation mode, another module is called,
or the selected attention does not run, as in an encoder whose outputs are given. A method that is never told of updates
stands still.
"""

import logging
from collections import Counter

import torch
from torch import nn

from attn_reg_plugin.attention.calls import graph_task
from attn_reg_plugin.attention.sites import AttentionSite

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
#: a model that runs with gradients in a backward only
IN_BACKWARD = (
    "{model} runs again inside a backward, as with losses that cache gradients (CachedMultipleNegativesRankingLoss) or "
    "reentrant checkpointing of the whole model: its first run, which the loss was computed from, had no gradients and "
    "no masks; use a loss that is computed at once"
)


class Reach:
    """Forwards and updates that came to an attached model, and a warning, once, where they did not.

    Attributes:
        seen: whether a forward came that could be regularized: in training mode, with gradients.
    """

    def __init__(self, method: str, model: nn.Module, sites: list[AttentionSite]) -> None:
        self.method, self.model, self.sites = method, model, sites
        self.seen = False
        self._since_update: set[str] = set()  # `trained`, `evaluated`, `due`: the forwards that came
        self._warned = self._announced = self._had_gradients = False
        self._awaited: Counter[str] = Counter()  # regularized updates that a site, by its name, had no call in
        self._version, self._updates = -1, 0  # of the parameters, and how often it moved between forwards

    def begin_forward(self) -> None:
        """Hear that the model's forward begins, of whatever kind."""
        if self.model.training and graph_task() < 0:
            self._had_gradients = torch.is_grad_enabled()
        elif not self.model.training and torch.is_grad_enabled():
            self._since_update.add("evaluated")

    def training_forward(self, due: bool) -> None:
        """Hear that a forward with gradients in training mode begins, which is regularized if `due`.

        Raises:
            RuntimeError: it is due and repeats, inside a backward, one that ran without gradients.
        """
        trained = [site.module is None or site.module.training for site in self.sites]
        if not trained or any(trained):
            self._since_update.add("trained")
            self.seen = True
        if due:
            self._since_update.add("due")
            if self.sites and graph_task() >= 0 and not self._had_gradients:
                raise RuntimeError(IN_BACKWARD.format(model=type(self.model).__name__))

    def update(self) -> None:
        """Hear of an update: warn if what should have come before it did not."""
        self._announced = True
        came, self._since_update = self._since_update, set()
        if not self.seen or {"evaluated"} == came & {"evaluated", "trained"}:
            self._warn_of_no_forward("an update was made", evaluated="evaluated" in came)
        if "due" in came:
            self._expect_calls()

    def end(self) -> None:
        """Hear of the end: warn if attention ran with gradients, and no forward could be regularized."""
        if not self.seen and any(site.calls.idled for site in self.sites):
            evaluated = "evaluated" in self._since_update
            self._warn_of_no_forward("its attention ran with gradients", evaluated)

    def expect_announcement(self) -> None:
        """Warn at a forward if the parameters show updates, and `end_update` was never called.

        Schedules and AttendOut's rounds would stand still. Accumulated batches show no update.
        """
        if self._announced or self._warned:
            return
        before = self._version
        self._version = sum(parameter._version for parameter in self.model.parameters() if parameter.requires_grad)
        self._updates += before not in (-1, self._version)
        if self._updates >= UNANNOUNCED:
            self._warn(
                f"{UNANNOUNCED} updates were made, and none was announced: call end_update() after each optimizer "
                "step; schedules and rounds count by it"
            )

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(f"{self.method}: {message}")

    def _warn_of_no_forward(self, event: str, evaluated: bool) -> None:
        model = type(self.model).__name__
        if evaluated or not self.model.training:
            reason = f"{model} is in evaluation mode: call its train() before training"
        elif any(site.calls.idled for site in self.sites) and not any(site.module.training for site in self.sites):
            reason = (
                f"the attention of {model} is in evaluation mode: call train() on the part of the model that has it"
            )
        else:
            reason = f"the forward of {model} was never called with gradients: attach to the module that is called"
        self._warn(f"{event}, but nothing was regularized; {reason}")

    def _expect_calls(self) -> None:
        """Warn if selected attentions should have been regularized and were never called.

        At once where it is all of them. Some may be left out at random, so they have `PATIENCE` updates to come; all of
        them have that in a model with a LayerDrop of its own. A site of which nothing was asked, or whose module is in
        evaluation mode, does not count.
        """
        trained = [site for site in self.sites if site.module is None or site.module.training]
        missing = [site.name for site in trained if site.calls.asked and not site.calls.came]
        self._awaited.update(missing)
        none = not any(site.calls.came for site in trained)
        if not none or leaves_layers_out(self.model):
            missing = [name for name in missing if self._awaited[name] >= PATIENCE]
        if not missing:
            return
        updates = max(self._awaited[name] for name in missing)
        event = "an update was made" if updates == 1 else f"{updates} updates were made"
        what = "nothing was regularized" if none else "part of the selected attention was not regularized"
        self._warn(f"{event}, but {what}; never called: {', '.join(missing)}; {HINT}")


def leaves_layers_out(model: nn.Module) -> bool:
    """Return whether a model says that it has LayerDrop: a rate `layerdrop`, `encoder_layerdrop`, ... of it or its
    config."""
    holders = [held for module in model.modules() for held in (module, vars(module).get("config"))]
    rates = [(name, rate) for held in holders for name, rate in getattr(held, "__dict__", {}).items()]
    return any(name.endswith("layerdrop") and isinstance(rate, int | float) and rate > 0 for name, rate in rates)
