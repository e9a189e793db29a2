"""A trainer's loss of one step, so that a method can probe the step as a whole before it is trained on.

Trainers of embeddings and of rewards compute their loss from several forwards, or from outputs that only they know how
to read. Their `compute_loss` is the one place that does, so it is what a probe runs.
"""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.base.attachment import attachments_of, begin_step
from attn_reg_plugin.regularizers.base.forward import remember_randomness, unchanged
from attn_reg_plugin.regularizers.whole_step import WholeStepWanted


def step_loss(
    trainer: Trainer, regularizer: Regularizer, compute: Callable[[Any], Any], model: nn.Module, inputs: Any
) -> Any:
    """The loss of a step, `compute(inputs)`, which the regularizer may probe before.

    Args:
        trainer: whose loss it is.
        compute: may change the inputs and what the trainer notes down.
        model: that it runs, wrapped or not.
        inputs: of the step, as the trainer has prepared them.
    """
    kept = records(inputs)

    def training_loss() -> Tensor:
        others = [(one.regularizer, one.regularizer.supplied) for one in attachments_of(regularizer.model)]
        try:
            with untouched(trainer, model):
                loss = compute(records(kept))
        finally:
            for other, told in others:  # of another callback's, which the loss runs through
                other.supply(told)
        return loss[0] if isinstance(loss, tuple) else loss

    regularizer.supply(replace(regularizer.supplied, training_loss=training_loss))
    put_back = remember_randomness(trainer.args.device)
    try:
        begin_step(regularizer.model)
        return compute(inputs)
    except WholeStepWanted:  # found in the first forward of a training
        put_back()
        begin_step(regularizer.model)
        return compute(records(kept))


@contextmanager
def untouched(trainer: Trainer, model: nn.Module) -> Iterator[None]:
    """While open, the trainer notes down metrics on copies of its own lists, and its losses' buffers may change.

    Data parallel training reduces no gradients of what runs meanwhile.
    """
    own = vars(trainer)
    before = dict(own)
    data = {"train_dataset", "eval_dataset"}  # may be lists, and long ones
    own.update({name: records(value) for name, value in before.items() if name not in data})
    with ExitStack() as stack:
        for held in before.values():
            if isinstance(held, nn.Module):
                stack.enter_context(unchanged(held))
        if isinstance(model, DistributedDataParallel):
            # the forward of the step itself broadcasts buffers as it would have
            stack.callback(setattr, model, "require_forward_param_sync", model.require_forward_param_sync)
            stack.enter_context(model.no_sync())
        try:
            yield
        finally:
            own.clear()
            own.update(before)


def records(value: Any) -> Any:
    """A copy of lists, queues, sets and mappings, however deep; what is in them is the same."""
    if isinstance(value, dict | UserDict):
        made = copy.copy(value)
        for key, held in value.items():
            made[key] = records(held)
        return made
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [records(held) for held in value]
        return made
    return copy.copy(value) if isinstance(value, set | deque) else value
