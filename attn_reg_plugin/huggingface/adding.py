"""A trainer's loss with what a method adds to it: the trainer's own `compute_loss` on the repeated batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from attn_reg_plugin.backends.huggingface_inputs import described
from attn_reg_plugin.huggingface.step_loss import step_loss
from attn_reg_plugin.regularizers import Regularizer


def added_loss(
    trainer: Trainer,
    regularizer: Regularizer,
    compute_loss: Callable[..., Tensor],
    model: nn.Module,
    inputs: dict[str, Any],
    items: Tensor | int | None,
) -> Tensor:
    """The loss of a training step, as `regularizer.loss` has it.

    The trainer's losses are means, over the items of the batch or, where a model or `compute_loss_func` does so, over
    those of all accumulated batches; the method's share is a mean over the same ones.

    Args:
        compute_loss: the trainer's own.
        items: labels in all accumulated batches, if the trainer counts them.
    """
    _refuse_unlabelled(trainer, regularizer, inputs)
    times, args = regularizer.passes, trainer.args
    divisor: Tensor | None = None

    def compute(batch: dict[str, Any]) -> Tensor:
        nonlocal divisor
        told = regularizer.supplied
        regularizer.supply(replace(told, batch=batch, read_off=True, **described(regularizer.model, batch)))
        count = None if items is None else torch.as_tensor(items, device=args.device).float() * times
        count = None if count is None else count.requires_grad_()
        try:
            repeated = partial(compute_loss, model, num_items_in_batch=count)
            loss = step_loss(trainer, regularizer, repeated, model, dict(batch))
        finally:
            regularizer.supply(told)
        # a loss that depends on the count was divided by it
        if count is not None and torch.autograd.grad(loss, count, retain_graph=True, allow_unused=True)[0] is not None:
            divisor = count.detach() / times
        return loss

    # the trainer multiplies what it divided by a count over all processes, and for some models what it did not
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func
    spread = args.average_tokens_across_devices and items is not None and counts
    scale = float(trainer.accelerator.num_processes) if spread else 1.0

    def share(total: Tensor, count: int) -> Tensor:
        return scale * total / (max(count, 1) if divisor is None else divisor)

    return regularizer.loss(compute, inputs, share)


def _refuse_unlabelled(trainer: Trainer, regularizer: Regularizer, inputs: dict[str, Any]) -> None:
    """Refuse to repeat a batch whose rows the trainer pairs in a way of its own.

    Raises:
        ValueError: it has no labels.
    """
    names = trainer.label_names or ["labels"]
    if not any(name in inputs for name in names):
        raise ValueError(
            f"{regularizer.name} repeats the batch and compares what the model says of each copy, but the batch has no "
            f"{' or '.join(names)}, so {type(trainer).__name__} reads it in a way of its own; use another method"
        )
