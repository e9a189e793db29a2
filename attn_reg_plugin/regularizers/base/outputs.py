"""Reading a model's outputs: logits, log-likelihoods or scores, wherever they are, and the tokens that count."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: the label that losses ignore, as in torch.nn.functional.cross_entropy
IGNORED = -100


class NoObjective(ValueError):
    """Raised where the outputs of a forward hold nothing that can be attributed; something else may."""


def check_scalar(what: str, value: Any, graph: bool = True) -> Tensor:
    """Return `value` if it is a scalar that can be differentiated (with `graph`, where gradients are on).

    Raises:
        TypeError, ValueError: it is no floating-point tensor, no scalar, or has no graph.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        given = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
        raise TypeError(f"{what} is {given}, but must be a scalar floating-point tensor, such as outputs.loss")
    if value.dim():
        raise ValueError(f"{what} must be a scalar, but has the shape {tuple(value.shape)}; sum it, or take its mean")
    if graph and torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(f"{what} has no gradient: compute it from the model's outputs, without detach() or item()")
    return value


def logits_of(outputs: Any) -> Tensor:
    """The logits in a model's outputs: a tensor, `outputs.logits`, `outputs["logits"]` or the first of a tuple.

    A tuple may begin with the loss, as those of transformers do, which is passed over.

    Raises:
        ValueError: none of these holds a floating-point tensor.
    """
    logits = getattr(outputs, "logits", outputs)
    if isinstance(logits, Mapping):
        logits = logits.get("logits")
    if isinstance(logits, tuple | list) and logits:
        logits = next((one for one in logits if not isinstance(one, Tensor) or one.dim()), logits[0])
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        held = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else ""
        held = f" (it has {held}, but no logits, log_probs or scores)" if held else ""
        raise NoObjective(
            f"cannot find logits in the model's output of type {type(outputs).__name__}{held}; give an "
            "objective=function(outputs, inputs) that returns a scalar, or use a method that needs none: "
            "attention_dropout, attention_layer_drop, head_drop, layer_drop or scheduled_dropout"
        )
    return logits


def field_of(outputs: Any, name: str) -> Tensor | None:
    """A floating-point tensor that the outputs hold by this name; None if there is none."""
    held = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    return held if isinstance(held, Tensor) and held.is_floating_point() else None


def gold_of(inputs: Mapping[str, Any]) -> Any:
    """The gold labels among an objective's inputs; None if there are none."""
    return inputs.get("targets", inputs.get("labels"))


def tokens_with_loss(logits: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
    """Real tokens, less those that the targets leave out: a tagger labels a word at its first piece only."""
    mask, targets = _fitting_mask(logits, inputs), inputs.get("targets")
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.shape != logits.shape[:-1]:
        return mask
    known = targets != IGNORED
    return known if mask is None else known & mask


def _fitting_mask(logits: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
    """The token mask, if it is one of these logits (B, T, V).

    One that was read off the forward's arguments says nothing of logits of another shape and is left out: it counts an
    audio model's raw samples, or lacks prompt tuning's virtual tokens. One that was supplied has to fit.

    Raises:
        TypeError, ValueError: what was supplied is no bool tensor, or of another shape.
    """
    mask, shape = inputs.get("token_mask"), logits.shape[:-1]
    if mask is not None and inputs.get("token_mask_supplied"):
        needed = (
            f"logits of shape {tuple(logits.shape)} need a bool tensor of shape {tuple(shape)}, True at real tokens"
        )
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            given = mask.dtype if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise TypeError(f"the supplied token_mask is {given}, but {needed}")
        if mask.shape != shape:
            raise ValueError(f"the supplied token_mask has the shape {tuple(mask.shape)}, but {needed}")
    return mask if isinstance(mask, Tensor) and mask.shape == shape else None
