"""What is attributed: the scalar objective F of AD-DROP, summed over the batch, in fp32.

An objective is a function `objective(outputs, inputs) -> scalar`. `inputs` holds the forward's arguments by name
and, where a framework's face supplies them, `targets` (gold labels), `token_mask` (True = a real token) and
`padding_label` (the number of padding in a vocabulary). Where several passes attribute one F, `pseudo_labels` keeps the
labels of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

Objective = Callable[[Any, Mapping[str, Any]], Tensor]
LABELS = ("pseudo", "gold")
#: the label that losses ignore, as in torch.nn.functional.cross_entropy
IGNORED = -100
_NO_GOLD = (
    "the objective needs gold labels: pass them to the forward as `labels`, set regularizer.supply(targets=...) before "
    "it, or use labels='pseudo' for classification"
)


def label_logit(logits: Tensor, labels: Tensor | None = None) -> Tensor:
    """Classification: Σ of the logits of the labels (AD-DROP's F).

    Args:
        logits: (B, number of classes).
        labels: (B,) or (B, 1) gold labels, or (B, number of classes) with 1 for each class that holds, of several;
            None takes the pseudo labels argmax P(c|x). Gold labels of -100 are left out.
    """
    logits = logits.float()
    if labels is None:
        return logits.gather(-1, logits.argmax(-1, keepdim=True)).sum()
    known = labels != IGNORED
    labels = labels.masked_fill(~known, 0)
    if labels.shape == logits.shape:
        return (logits * labels).sum()
    chosen = logits.gather(-1, labels.reshape(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return (chosen * known.reshape(chosen.shape)).sum()


class PseudoLabels(dict[str, Tensor]):
    """The pseudo labels of a probe's first pass, by what they label: `inputs["pseudo_labels"]` of the passes that
    attribute one and the same F, such as those of integrated gradients."""


def first_pass_labels(inputs: Mapping[str, Any], what: str, choose: Callable[[], Tensor]) -> Tensor | None:
    """The pseudo labels of the first pass, chosen by `choose` in that pass; None where each pass takes its own.

    Args:
        inputs: an objective's; asked for `PseudoLabels`.
        what: is labelled, such as `class`; an objective of several parts has a name for each.
        choose: the labels of the present pass.
    """
    kept = inputs.get("pseudo_labels")
    if not isinstance(kept, PseudoLabels):
        return None
    if what not in kept:
        kept[what] = choose().detach()
    return kept[what]


def likeliest(logits: Tensor, except_for: int | None = None) -> Tensor:
    """argmax over the last dimension, (..., V) to (...), as if the column `except_for` were not there; no copy is made.

    Marian scores padding with 0, often above every real piece, although it is never a prediction.
    """
    if except_for is None or not 0 <= except_for < logits.size(-1):
        return logits.argmax(-1)
    if except_for == 0:
        return logits[..., 1:].argmax(-1) + 1
    before, after = logits[..., :except_for], logits[..., except_for + 1 :]
    if not after.size(-1):
        return before.argmax(-1)
    (low, first), (high, second) = before.max(-1), after.max(-1)
    return torch.where(high > low, second + except_for + 1, first)


def token_log_likelihood(
    logits: Tensor,
    labels: Tensor | None = None,
    token_mask: Tensor | None = None,
    padding_label: int | None = None,
) -> Tensor:
    """Taggers and translation: the negative loss Σ log P(ŷ) over real tokens (AD-DROP's token-level tasks).

    Args:
        logits: (B, T, V).
        labels: (B, T) gold labels, -100 is ignored; None takes the pseudo labels ŷ = argmax P.
        token_mask: bool (B, T), True = counts; None counts every token.
        padding_label: what no pseudo label is.
    """
    logits = logits.float()
    if labels is not None:
        known = labels != IGNORED
        token_mask = known if token_mask is None else known & token_mask
        labels = labels.masked_fill(~known, 0)
    labels = likeliest(logits, padding_label) if labels is None else labels
    log_likelihood = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return log_likelihood.sum() if token_mask is None else (log_likelihood * token_mask).sum()


def negative_regression_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Regression: minus the squared error against the gold values; (B,) or (B, 1) both."""
    return -((predictions.float().reshape(-1) - targets.float().reshape(-1)) ** 2).sum()


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
        raise ValueError(
            f"cannot find logits in the model's output of type {type(outputs).__name__}; give an objective="
            "function(outputs, inputs) that returns a scalar"
        )
    return logits


def logits_dtype(outputs: Any) -> torch.dtype:
    """The dtype of the model's logits, fp32 where a user's objective reads something else."""
    try:
        return logits_of(outputs).dtype
    except ValueError:
        return torch.float32


def default_objective(labels: str = "pseudo") -> Objective:
    """The objective that fits the outputs' shape: (B, C) classification, (B, T, V) tokens, (B,) or (B, 1) regression;
    and `start_logits` and `end_logits`, (B, T) each, of question answering.

    Args:
        labels: `pseudo` or `gold`; gold labels are read from `inputs["targets"]`, else `inputs["labels"]`.
            Regression always uses gold values.

    The returned function raises:
        ValueError: gold labels are needed and were not supplied, or the shape isn't one of these.
    """

    return partial(_by_shape, labels)


def span_logits(outputs: Any, inputs: Mapping[str, Any], gold: bool) -> Tensor | None:
    """Extractive question answering: Σ of the logits of the answers' first and last tokens; None for other outputs."""
    total = None
    for end in ("start", "end"):
        logits = outputs.get(f"{end}_logits") if isinstance(outputs, Mapping) else None
        positions = inputs.get(f"{end}_positions") if gold else None
        if logits is None or logits.dim() != 2 or (gold and positions is None):
            return None
        if positions is None:
            positions = first_pass_labels(inputs, end, partial(likeliest, logits))
        else:  # what was cut off is taken for the end, what is ignored stays so
            within = positions.clamp(0, logits.size(-1) - 1)
            positions = torch.where(positions == IGNORED, positions, within)
        found = label_logit(logits, positions)
        total = found if total is None else total + found
    return total


def _by_shape(labels: str, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    spans = span_logits(outputs, inputs, gold=labels == "gold")
    if spans is not None:
        return spans
    logits = logits_of(outputs)
    regression = logits.dim() == 1 or (logits.dim() == 2 and logits.size(-1) == 1)
    gold = None
    if labels == "gold" or regression:
        gold = inputs.get("targets", inputs.get("labels"))
        if gold is None:
            raise ValueError(_NO_GOLD)
        _check_gold(logits, gold)
    if regression:
        return negative_regression_loss(logits, gold)
    padding = inputs.get("padding_label") if logits.dim() == 3 else None
    if gold is None:
        gold = first_pass_labels(inputs, "logits", partial(likeliest, logits, padding))
    if logits.dim() == 2:
        return label_logit(logits, gold)
    if logits.dim() == 3:
        return token_log_likelihood(logits, gold, _tokens_with_loss(logits, inputs), padding)
    raise ValueError(f"no objective for outputs of shape {tuple(logits.shape)}; give objective=function")


def negative_loss(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Minus the training loss: that which the outputs hold, else the gold labels'.

    Classes and tokens have Σ log P(gold), regression minus the squared error.

    Raises:
        ValueError: there is neither a loss nor gold labels.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return -loss.float()
    try:
        logits = logits_of(outputs)
    except ValueError:
        logits = None
    classes = logits is not None and logits.dim() == 2 and logits.size(-1) > 1
    if not classes:
        return _by_shape("gold", outputs, inputs)
    gold = inputs.get("targets", inputs.get("labels"))
    if gold is None:
        raise ValueError(_NO_GOLD)
    _check_gold(logits, gold)
    if gold.is_floating_point():  # several classes may hold
        chances = torch.nn.functional.logsigmoid
        return (gold * chances(logits.float()) + (1 - gold) * chances(-logits.float())).sum()
    return token_log_likelihood(logits, gold.reshape(-1))


def _check_gold(logits: Tensor, gold: Tensor) -> None:
    """Refuse gold labels of a shape that the logits do not have.

    Raises:
        ValueError: they are of another.
    """
    if logits.dim() == 3:
        fits = gold.shape == logits.shape[:-1]
    else:
        fits = gold.shape == logits.shape or gold.numel() == logits.size(0)
    if logits.dim() < 4 and not fits:
        raise ValueError(
            f"the gold labels have the shape {tuple(gold.shape)}, which does not fit the logits' {tuple(logits.shape)};"
            " give labels that do, labels='pseudo', or an objective= of your own"
        )


def _tokens_with_loss(logits: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
    """Real tokens, less those that the targets leave out: a tagger labels a word at its first piece only.

    A mask of another shape than the logits says nothing of them and is left out: it counts an audio model's raw
    samples, or lacks prompt tuning's virtual tokens.
    """
    mask, targets = inputs.get("token_mask"), inputs.get("targets")
    if isinstance(mask, Tensor) and mask.shape != logits.shape[:-1]:
        mask = None
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.shape != logits.shape[:-1]:
        return mask
    known = targets != IGNORED
    return known if mask is None else known & mask


def scale_against_underflow(objective: Tensor, dtype: torch.dtype) -> Tensor:
    """F times a power of two for fp16 models: ranks within a row do not change, tiny gradients survive."""
    return objective * 1024.0 if dtype == torch.float16 else objective
