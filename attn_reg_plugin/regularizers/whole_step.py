"""F of the whole training step, where a model's outputs hold none: minus the step's loss.

An encoder of sentences returns embeddings, a model of rewards one number a text: what they are trained for is known by
the loss, which the training computes of several forwards. A face that can compute it supplies it
(`Supplied.training_loss`): the probe runs all forwards of the step, and one backward gives the attributions of each.
Until the step ends, the sites take its forwards for calls of one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.attention.calls import graph_task
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.model_outputs import NoObjective, logits_dtype
from attn_reg_plugin.regularizers.objectives import Objective, scale_against_underflow, tell
from attn_reg_plugin.regularizers.probing import Forward

#: a model that runs with gradients in a backward only
IN_BACKWARD = (
    "{model} runs again inside a backward, as with losses that cache gradients (CachedMultipleNegativesRankingLoss) or "
    "reentrant checkpointing of the whole model: its first run, which the loss was computed from, had no gradients and "
    "no masks; use a loss that is computed at once"
)
#: a model that runs twice in a step and then, in the backward, again
LOST = (
    "{model} runs several times in a training step, and activation checkpointing will run the first again after "
    "{method} has made the masks of the next; turn activation checkpointing off"
)


class WholeStepWanted(Exception):
    """The outputs of a forward hold no F, and the loss of the whole step is known: begin the step anew, see
    `attachment.begin_step`. A face that supplies the loss catches it, in the first step."""


class WholeStep:
    """How an attached method's probe gets F: from the forward at hand, or from the whole step.

    Attributes:
        used: whether F is the step's.
        running: whether the probe of a step runs, of which each forward is a part.
        held: the loss of the step that the masks on the sites are for.
    """

    def __init__(self) -> None:
        self.used = self.running = False
        self.held: Callable[[], Tensor] | None = None

    def holds(self, loss: Callable[[], Tensor] | None) -> bool:
        """Whether the masks on the sites are for the step with this loss."""
        return self.held is not None and self.held is loss

    def run(
        self,
        objective: Objective,
        forward: Forward,
        inputs: Mapping[str, Any],
        sites: Sequence[AttentionSite],
        precision: Callable[[], AbstractContextManager],
    ) -> Tensor:
        """Run what is attributed and return F, scaled against underflow.

        Args:
            objective: of a forward's outputs.
            forward: that is about to happen, or stands for the step.
            inputs: the objective's.
            sites: record what the probe computes.
            precision: of the probe.

        Raises:
            WholeStepWanted: the outputs have no F, but the step may.
            NoObjective: neither has, or the step's loss does not depend on the attention.
        """
        loss = forward.supplied.training_loss
        if self.used and loss is not None:
            return self._of_step(loss, forward, sites, precision)
        with precision():
            outputs = forward.run()
        try:
            return scale_against_underflow(objective(outputs, inputs), _working_dtype(sites, logits_dtype(outputs)))
        except NoObjective as missing:
            if loss is None:
                raise
            if graph_task() >= 0:
                raise NoObjective(IN_BACKWARD.format(model=type(forward.model).__name__), missing.reason) from missing
            if any(hasattr(module, "set_requires_gradient_sync") for module in forward.model.modules()):
                raise NoObjective(
                    f"{missing}; the training loss of the whole step cannot be probed where FSDP2 shards the model",
                    missing.reason,
                ) from missing
            self.used = True
            tell(set(), "step", reason=missing.reason)
            raise WholeStepWanted from missing

    def _of_step(
        self,
        loss: Callable[[], Tensor],
        forward: Forward,
        sites: Sequence[AttentionSite],
        precision: Callable[[], AbstractContextManager],
    ) -> Tensor:
        graph = torch.is_grad_enabled()
        with self._through(), torch.enable_grad(), precision():
            objective = -loss().float()
        tapes = [tape for site in sites for tape in site.tapes]
        if not tapes or not objective.requires_grad:
            model = type(forward.model).__name__
            raise NoObjective(
                f"the training loss does not depend on the selected attention of {model}; choose other sites, or give "
                "an objective=function(outputs, inputs) that returns a scalar",
                "there is no gradient of the loss",
            )
        for tape in () if graph else tapes:
            tape.output = tape.output.detach()  # nothing will be differentiated
        return scale_against_underflow(objective, _working_dtype(sites, next(forward.model.parameters()).dtype))

    @contextmanager
    def _through(self) -> Iterator[None]:
        self.running = True
        try:
            yield
        finally:
            self.running = False


def _working_dtype(sites: Sequence[AttentionSite], outside: torch.dtype) -> torch.dtype:
    """fp16 if any attention has computed in it, else the dtype outside of attention: gradients underflow in fp16."""
    values = [tape.value for site in sites for tape in site.tapes]
    return torch.float16 if any(value is not None and value.dtype == torch.float16 for value in values) else outside


def wanted_again(site: AttentionSite) -> bool:
    """Whether the forward that was has something on the site that checkpointing asks for, and cannot draw again."""
    parts = (site._mask, site.sampler, site.factor, site.redraw, site.look)
    return site.plan is not None or (bool(site.calls) and (site.uniform or any(part is not None for part in parts)))
