"""Shared by the faces: the method that a callback is given; what is said, logged, measured and refused."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_reg_plugin.checkpoints import load_state
from attn_reg_plugin.regularizers import Combination, Outcome, Regularizer, build
from attn_reg_plugin.regularizers.base.distributed import done_by_first_rank, waits_for_gradients
from attn_reg_plugin.regularizers.base.outputs import IGNORED
from attn_reg_plugin.regularizers.base.statistics import quantities

logger = logging.getLogger(__name__)

#: before the names of what is logged
PREFIX = "attn_reg/"


class MethodCallback:
    """A callback that is given a method.

    Args:
        regularizer: the method, not attached; its name, such as `"ad_drop"`; or a list of methods or names.
        rates_by_site: log the drop rate of each site as well, not only their mean.
        options: of the method that is named, such as `p=0.3`.

    Raises:
        TypeError: it is something else, such as a class.
        ValueError, TypeError: an unknown name, a wrong option, or methods that cannot act together.
    """

    def __init__(
        self,
        regularizer: Regularizer | str | Sequence[Regularizer | str] | None = None,
        *,
        rates_by_site: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.regularizer, self.rates_by_site = self._method(regularizer, options), rates_by_site

    def __getattr__(self, name: str) -> Any:
        """Say which callback a trainer wants that takes this one for its own."""
        if name.startswith("on_"):
            raise AttributeError(
                f"{type(self).__name__} has no {name}: AttnRegCallback is for transformers' Trainer, LightningCallback "
                "for Lightning's"
            )
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.regularizer!r})"

    def _method(self, given: Any, options: Mapping[str, Any]) -> Regularizer:
        name = type(self).__name__
        if isinstance(given, str):
            return build(given, **options)
        if options:
            raise TypeError(f"{name}: {', '.join(options)} goes with the name of a method: {name}('ad_drop', p=0.3)")
        if isinstance(given, list | tuple) and given:
            methods = [self._method(one, {}) for one in given]
            return methods[0] if len(methods) == 1 else Combination(methods)
        if not isinstance(given, Regularizer):
            found = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            raise TypeError(
                f"{name} takes a regularizer, such as {name}(ADDrop(p=0.3, q=0.3)), its name, such as "
                f"{name}('ad_drop', p=0.3), or a list of these, not {found}"
            )
        return given


def attached(regularizer: Regularizer) -> str:
    """Say in one line what acts on how much of the attached model."""
    return " + ".join(repr(method._attachment) for method in regularizer.parts)


def logged(regularizer: Regularizer, device: torch.device, by_site: bool) -> dict[str, float]:
    """Return what happened since the last call, over all data-parallel ranks, of which each has to call.

    Returns:
        As `quantities`, by names that begin with `attn_reg/`; nothing where the method did not act.
    """
    found = quantities(regularizer, device, by_site)
    return {PREFIX + title: value for title, value in found.items()} if found.get("regularized") else {}


def state_in(path: Path, method: str | None) -> dict[str, Any] | None:
    """The state of a method in a file, as rank 0 reads it, on every rank; None where there is none.

    Args:
        path: beside or in the checkpoint that a training continues from; a damaged file is a ValueError on every rank.
        method: what is said to start anew where there is none; None: that is as it should be.
    """

    def read() -> dict[str, Any] | None:
        if path.exists():
            return load_state(path)
        if method is not None:
            logger.warning(f"no {path.name} in {path.parent}: {method} starts anew from the checkpoint's weights")
        return None

    return done_by_first_rank(read)


def special_ids_of(tokenizer: Any) -> frozenset[int] | None:
    """List the ids of the special tokens of a tokenizer or a processor's, but of unknown words; None if it has none."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    if codes := getattr(tokenizer, "supported_language_codes", None):  # Marian's, which it does not call special
        special.update(tokenizer.convert_tokens_to_ids(codes))
    others = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "sep", "cls", "pad")}
    return frozenset(special - ({getattr(tokenizer, "unk_token_id", None)} - others)) or None


def refuse_unused_parameters(wrapped: nn.Module, regularizer: Regularizer, advice: str) -> None:
    """Refuse, by a ValueError, either LayerDrop where data parallel training waits for every gradient.

    Args:
        wrapped: the model, as it is wrapped for that, also within other wrappers.
        advice: what to set instead.
    """
    if waits_for_gradients(wrapped) and regularizer.leaves_unused():
        raise ValueError(
            "a dropped attention gives its queries and keys no gradient, which data parallel training waits for; "
            f"{advice}"
        )


def example_outcomes(logits: Tensor, targets: Tensor, known: Tensor | None = None) -> Outcome:
    """Give the loss and the metric of each example: mean negative log-likelihood, and share of right answers.

    Of a regression: the squared error, and minus that.

    Args:
        logits: or log-probabilities, (B, C) or (B, T, V); of regression (B,) or (B, C).
        targets: (B,) or (B, T); in regression of a floating-point type, shaped as the logits or (B,).
        known: whether a target counts, bool, shaped as they are; by default, where it isn't -100.

    Returns:
        Loss and metric, both (B,).
    """
    if targets.is_floating_point():
        errors = (logits.float().reshape(len(logits), -1) - targets.float().reshape(len(logits), -1)).square().sum(-1)
        return Outcome(errors, -errors)
    known = targets != IGNORED if known is None else known
    log_probs = logits.float().log_softmax(-1)  # of log-probabilities: themselves
    labels = targets.masked_fill(~known, 0)
    losses = -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).masked_fill(~known, 0.0)
    right = (log_probs.argmax(-1) == labels) & known
    losses, right, count = (value.reshape(len(value), -1).sum(1) for value in (losses, right, known))
    return Outcome(losses / count.clamp(min=1), right / count.clamp(min=1))
