"""Objectives: the scalar F that AD-DROP attributes, summed over the batch, in fp32.

An objective is a function `objective(outputs, inputs) -> scalar`. `inputs` holds the forward's arguments by name
and, where a framework's face supplies them, `targets` (gold labels), `token_mask` (True = a real token) and
`padding_label` (the number of padding in a vocabulary). Where several passes attribute one F, `pseudo_labels` keeps the
labels of the first.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.regularizers.base.outputs import (
    IGNORED,
    NoObjective,
    field_of,
    gold_of,
    logits_of,
    tokens_with_loss,
)

logger = logging.getLogger(__name__)
Objective = Callable[[Any, dict[str, Any]], Tensor]
LABELS = ("pseudo", "gold")
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

    An objective of several parts has a name for `what` each labels.
    """
    kept = inputs.get("pseudo_labels")
    if not isinstance(kept, PseudoLabels):
        return None
    if what not in kept:
        kept[what] = choose().detach()
    return kept[what]


def likeliest(logits: Tensor, except_for: int | None = None) -> Tensor:
    """argmax over the last dimension, (..., V) to (...), as if the column `except_for` were not there.

    Marian scores padding with 0, often above every real piece, although it is never a prediction.
    """
    if except_for is None:
        return logits.argmax(-1)
    first, second = logits.topk(2, -1).indices.unbind(-1)
    return torch.where(first == except_for, second, first)


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
    """Regression: minus the squared error against the gold values; (B,) or (B, 1) both, or (B, C) of several."""
    return -((predictions.float().reshape(-1) - targets.float().reshape(-1)) ** 2).sum()


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


def prediction(labels: str, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The objective that fits the logits' shape: (B, C) classification, (B, T, V) tokens, (B,) or (B, 1) regression,
    or (B, C) where `inputs["regression"]` says so, or () beside one gold value; and `start_logits` and `end_logits`,
    (B, T) each, of questions.

    Args:
        labels: `pseudo` or `gold`; gold labels are read from `inputs["targets"]`, else `inputs["labels"]`.
            Of a regression, `pseudo` is the predicted value itself, such as a reward, `gold` minus the squared error.

    Raises:
        NoObjective: there are no logits, or of another shape, or gold labels are needed and were not supplied.
        TypeError, ValueError: the gold labels or the supplied token mask do not fit.
    """
    spans = span_logits(outputs, inputs, gold=labels == "gold")
    if spans is not None:
        return spans
    logits = logits_of(outputs)
    gold = gold_of(inputs)
    if logits.dim() == 0 and isinstance(gold, Tensor) and gold.is_floating_point() and gold.numel() == 1:
        logits = logits.reshape(1)  # a regression's (B,), squeezed once too often
    gold = gold if labels == "gold" else None
    if labels == "gold":
        if gold is None:
            raise NoObjective(_NO_GOLD)
        _check_gold(logits, gold)
    if logits.dim() > 0 and _is_regression(logits, inputs):
        return negative_regression_loss(logits, gold) if labels == "gold" else logits.float().sum()
    padding = inputs.get("padding_label") if logits.dim() == 3 else None
    if gold is None:
        gold = first_pass_labels(inputs, "logits", partial(likeliest, logits, padding))
    if logits.dim() == 2:
        return label_logit(logits, gold)
    if logits.dim() == 3:
        return token_log_likelihood(logits, gold, tokens_with_loss(logits, inputs), padding)
    shape = tuple(logits.shape)
    raise NoObjective(f"no objective for outputs of shape {shape}; give objective=function")


def _is_regression(logits: Tensor, inputs: Mapping[str, Any]) -> bool:
    return logits.dim() < 2 or (logits.dim() == 2 and (logits.size(-1) == 1 or inputs.get("regression", False)))


def _check_gold(logits: Tensor, gold: Tensor) -> None:
    """Refuse, by a ValueError, gold labels of a shape that does not fit the logits'."""
    fits = gold.shape == logits.shape or gold.numel() == logits.size(0)
    if logits.dim() < 4 and not (gold.shape == logits.shape[:-1] if logits.dim() == 3 else fits):
        raise ValueError(
            f"the gold labels have the shape {tuple(gold.shape)}, which does not fit the logits' {tuple(logits.shape)};"
            " give labels that do, labels='pseudo', or an objective= of your own"
        )


class OfOutputs:
    """The objective that fits what the outputs hold; the log says once which it took.

    The prediction by the `logits`, see `prediction`; where there are none, by `log_probs`, and else by `scores`.
    """

    def __init__(self, labels: str = "pseudo") -> None:
        self.labels = labels
        self.told = ""

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """F, a scalar in fp32; errors as in `prediction`."""
        source, found = "the outputs' logits", outputs
        try:
            objective = prediction(self.labels, outputs, inputs)
        except NoObjective:
            likelihoods, scores = field_of(outputs, "log_probs"), field_of(outputs, "scores")
            if likelihoods is not None and not _of_classes(likelihoods, inputs):  # of gold labels, 0 where none counts
                source, objective = "the outputs' log_probs, of the gold labels", likelihoods.float().sum()
            elif (found := scores if likelihoods is None else likelihoods) is not None:
                source = f"the outputs' {'scores' if likelihoods is None else 'log_probs'}"
                objective = prediction(self.labels, found, inputs)
            else:
                raise
        if source != self.told:
            self.told = source
            logger.info(f"ad_drop attributes {source}{self._reading(found, inputs)}")
        return objective

    def _reading(self, outputs: Any, inputs: Mapping[str, Any]) -> str:
        if isinstance(outputs, Mapping) and "start_logits" in outputs:
            return f": the {self.labels} answers' start and end"
        try:
            logits = logits_of(outputs)
        except NoObjective:
            return ""
        if _is_regression(logits, inputs):
            found, kind = "minus the squared error" if self.labels == "gold" else "the predicted values", "a regression"
        elif logits.dim() == 2:
            found, kind = f"the {self.labels} labels' logits", f"{logits.size(-1)} classes"
        else:
            found, kind = f"the {self.labels} labels' log-likelihoods", f"tokens over {logits.size(-1)} labels"
        return f": {found}: outputs of shape {tuple(logits.shape)} as {kind}"


def _of_classes(likelihoods: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Whether log-likelihoods are of all labels, (B, C) or (B, T, V), and not of the gold ones, (B, T)."""
    gold = gold_of(inputs)
    return likelihoods.dim() == 3 or (likelihoods.dim() == 2 and gold is not None and gold.numel() == len(likelihoods))
