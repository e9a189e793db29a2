"""What a model's forward returned: its logits, log-likelihoods, scores or loss, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class NoObjective(ValueError):
    """What a forward returned holds nothing that can be attributed; something else may.

    Args:
        message: for the user.
        reason: the same in some words.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


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
        raise NoObjective(
            f"cannot find logits in the model's output of type {type(outputs).__name__}; give an objective="
            "function(outputs, inputs) that returns a scalar",
            "the outputs have no logits",
        )
    return logits


def held_by(outputs: Any) -> str:
    """What outputs by name have in place of logits, in words."""
    if not isinstance(outputs, Mapping) or not outputs:
        return ""
    return (
        f" (it has {', '.join(map(str, outputs))}, but no logits, log_probs, scores or loss; what embeddings are for "
        "is known by the training's loss only, which AttnRegCallback supplies)"
    )


def as_read(logits: Tensor, labels: str, regression: bool) -> str:
    """What F is of logits by their shape, in words.

    Args:
        logits: (B, C), (B, T, V), or of a regression (B,) or (B, C).
        labels: `pseudo` or `gold`.
        regression: whether they are predicted values.
    """
    if regression:
        found, kind = "minus the squared error" if labels == "gold" else "the predicted values", "a regression"
    elif logits.dim() == 2:
        found, kind = f"the {labels} labels' logits", f"{logits.size(-1)} classes"
    else:
        found, kind = f"the {labels} labels' log-likelihoods", f"tokens over {logits.size(-1)} labels"
    return f"{found}: outputs of shape {tuple(logits.shape)} as {kind}"


def field_of(outputs: Any, name: str) -> Tensor | None:
    """A floating-point tensor that the outputs hold by this name; None if there is none."""
    held = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    return held if isinstance(held, Tensor) and held.is_floating_point() else None


def loss_of(outputs: Any) -> Tensor | None:
    """The scalar loss that the outputs hold; None if there is none."""
    loss = field_of(outputs, "loss")
    return None if loss is None or loss.dim() else loss


def gold_of(inputs: Mapping[str, Any]) -> Any:
    """The gold labels among an objective's inputs; None if there are none."""
    return inputs.get("targets", inputs.get("labels"))


def logits_dtype(outputs: Any) -> torch.dtype:
    """The dtype of the model's logits, fp32 where a user's objective reads something else."""
    try:
        return logits_of(outputs).dtype
    except ValueError:
        return torch.float32
