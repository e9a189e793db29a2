"""Criterions of labelled text, whose task describes its data by one attribute, `labelled`, a `LabelledTask`.

    --criterion attn_reg_classification   classification and multiple choice (cross-entropy), regression (squared error)
    --criterion attn_reg_tagging          a label for every word

In training sums are logged; in validation the predictions, too, from which the official metrics are computed over the
whole set and all ranks: `--best-checkpoint-metric mcc --maximize-best-checkpoint-metric`.

fairseq adds up what the ranks log, batch by batch. So each puts its predictions into a slot of its own of one tensor; a
process that only goes along with an empty batch adds zeros, by fairseq's own doing. (Its other way, gathering pickles,
needs a GPU and holds 16 KB a batch.) A meter joins the batches, and metrics are computed from it when asked for.
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from attn_reg_plugin.callbacks import example_outcomes
from attn_reg_plugin.configuration import setting
from attn_reg_plugin.labelled.metrics import SCORES, SENTENCE_END, check_scores, tag_codes
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, MULTIPLE_CHOICE, REGRESSION, TAGGING, LabelledTask
from attn_reg_plugin.regularizers.base.context import Outcome
from attn_reg_plugin.regularizers.base.distributed import rank, world_size
from attn_reg_plugin.regularizers.base.outputs import IGNORED, logits_of

#: a logging output's keys: the predictions; and the metrics that they are for, as KIND/NAME
ROWS, WANTED = "predictions", "metric:"
#: the meter; fairseq does not print what starts with an underscore
_METER = "_predictions"


@dataclass
class LabelledConfig(FairseqDataclass):
    """The flags of every criterion of labelled data."""

    label_smoothing: float = setting("share of the target spread over all labels, in [0, 1)", 0.0)
    validation_metrics: str = setting(
        "metrics computed in validation, separated by commas; default: the task's official", ""
    )


class LabelledCriterion(FairseqCriterion):
    """Base of both; refuses a task without `labelled`, or of another kind than `kinds`."""

    kinds: ClassVar[tuple[str, ...]] = ()

    def __init__(self, task: Any, label_smoothing: float = 0.0, validation_metrics: str = "") -> None:
        super().__init__(task)
        labelled = getattr(task, "labelled", None)
        if not isinstance(labelled, LabelledTask) or labelled.kind not in self.kinds:
            what = f"one of {labelled.kind}" if isinstance(labelled, LabelledTask) else type(task).__name__
            raise ValueError(f"{type(self).__name__} is for tasks of {', '.join(self.kinds)}, but the task is {what}")
        if not 0 <= label_smoothing < 1 or (label_smoothing and labelled.kind == REGRESSION):
            allowed = "0, for a regression has no labels" if labelled.kind == REGRESSION else "in [0, 1)"
            raise ValueError(f"--label-smoothing is {label_smoothing}, but must be {allowed}")
        self.labelled, self.label_smoothing = labelled, label_smoothing
        self.names = tuple(name.strip() for name in validation_metrics.split(",") if name.strip()) or labelled.metrics
        check_scores(self.names, labelled.kind, labelled.labels or ())

    # -- what a criterion implements --------------------------------------------------------------------------------

    def losses(self, logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the loss of every item (an example or a word) in fp32, those without a label left out."""
        raise NotImplementedError

    def predictions(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return every item's prediction and gold value, (N, 2)."""
        raise NotImplementedError

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the rows that metrics are computed from, (N, 2); see `labelled/metrics.py`."""
        return self.predictions(logits, target)

    def example_outcomes(self, model: nn.Module, sample: dict[str, Any]) -> Outcome:
        """Return each example's loss (the mean over its words, not smoothed) and score for AttendOut, both (B,).

        The score is the share of right labels; of a regression it is minus the loss.
        """
        target, logits = self.read(model, sample)
        return example_outcomes(logits, target.float() if self.labelled.kind == REGRESSION else target)

    # -- fairseq's side ---------------------------------------------------------------------------------------------

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the loss, always a sum over items; the number of items to divide it by; and what is logged."""
        target, logits = self.read(model, sample)
        losses = self.losses(logits, target, self.label_smoothing)
        loss, logits = losses.sum(), logits.detach()
        log = {
            "loss": loss.detach(),
            "nll_loss": self.losses(logits, target).sum() if self.label_smoothing else loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": losses.numel(),
        }
        if self.labelled.kind != REGRESSION:
            predicted, gold = self.predictions(logits, target).unbind(-1)
            log["n_correct"] = (predicted == gold).sum()
        if not model.training:
            log |= {ROWS: packed(self.rows(logits, target))}
            log |= {f"{WANTED}{self.labelled.kind}/{name}": 1 for name in self.names}
        return loss, losses.numel(), log

    def read(self, model: nn.Module, sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the labels of a batch, and the model's logits in fp32; refuse a batch without labels."""
        target = sample.get("target")
        if target is None:
            raise ValueError(f"a split of task {self.labelled.name} without labels has no loss; use attn-reg export")
        return target, logits_of(model(**sample["net_input"])).float()

    @classmethod
    def reduce_metrics(cls, logging_outputs: Sequence[dict[str, Any]]) -> None:
        """Log the loss (in base 2, as fairseq does; of a regression the squared error), accuracy and the metrics."""
        keys = ("loss", "nll_loss", "n_correct", "sample_size")
        sums = {key: sum(float(log[key]) for log in logging_outputs if key in log) for key in keys}
        items = sums["sample_size"]
        if not items:
            return
        classes = any("n_correct" in log for log in logging_outputs)
        base = math.log(2) if classes else 1.0
        metrics.log_scalar("loss", sums["loss"] / items / base, items, round=4)
        if sums["nll_loss"] != sums["loss"]:
            metrics.log_scalar("nll_loss", sums["nll_loss"] / items / base, items, round=4)
        if classes:
            metrics.log_scalar("accuracy", 100 * sums["n_correct"] / items, items)
        rows = [unpacked(log[ROWS]) for log in logging_outputs if ROWS in log]
        if any(map(len, rows)):
            metrics.log_concat_tensor(_METER, torch.cat(rows))
            for key in sorted({key for log in logging_outputs for key in log if key.startswith(WANTED)}):
                kind, name = key.removeprefix(WANTED).split("/")
                metrics.log_derived(name, partial(_score, kind, name))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Yes: predictions come in slots."""
        return True


def _score(kind: str, name: str, meters: Mapping[str, Any]) -> float:
    predicted, gold = meters[_METER].tensor.numpy().T
    return SCORES[kind][name](predicted, gold)


def packed(rows: Tensor) -> Tensor:
    """Put rows (N, 2) of a prediction and its gold value into this rank's slot; all ranks must call this together.

    Returns:
        float64 (ranks, 1 + the largest N, 2); a slot's first row holds its N, which may differ between ranks.
    """
    longest = rows.size(0)
    if world_size() > 1:  # one process does not wait for its device
        size = torch.tensor(longest, device=rows.device)
        torch.distributed.all_reduce(size, torch.distributed.ReduceOp.MAX)
        longest = int(size)
    slots = torch.zeros(world_size(), 1 + longest, 2, dtype=torch.float64, device=rows.device)
    slots[rank(), 0] = rows.size(0)
    slots[rank(), 1 : 1 + rows.size(0)] = rows
    return slots


def unpacked(slots: Tensor) -> Tensor:
    """Return the rows of all slots, (N, 2) on the CPU."""
    slots = slots.detach().cpu()
    return torch.cat([slot[1 : 1 + int(slot[0, 0])] for slot in slots])


@register_criterion("attn_reg_classification", dataclass=LabelledConfig)
class ClassificationCriterion(LabelledCriterion):
    """One label per example; logits (B, C), of a regression (B,) or (B, 1); target (B,)."""

    kinds: ClassVar[tuple[str, ...]] = (CLASSIFICATION, MULTIPLE_CHOICE, REGRESSION)

    def losses(self, logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Losses of the examples, (B,)."""
        if self.labelled.kind == REGRESSION:
            return F.mse_loss(logits.reshape(-1), target.float(), reduction="none")
        return F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)

    def predictions(self, logits: Tensor, target: Tensor) -> Tensor:
        """The likeliest class, or the value, and the gold one."""
        predicted = logits.reshape(-1) if self.labelled.kind == REGRESSION else logits.argmax(-1)
        return torch.stack([predicted.double(), target.double()], dim=-1)


@register_criterion("attn_reg_tagging", dataclass=LabelledConfig)
class TaggingCriterion(LabelledCriterion):
    """One label per word, at its first sub-token; logits (B, T, C); target (B, T), -100 where there is no label.

    Losses, the sample size and every metric are of words; words that were truncated away are in none of them.
    """

    kinds: ClassVar[tuple[str, ...]] = (TAGGING,)

    def losses(self, logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Losses of the words, (N,)."""
        words = target != IGNORED
        return F.cross_entropy(logits[words], target[words], reduction="none", label_smoothing=label_smoothing)

    def predictions(self, logits: Tensor, target: Tensor) -> Tensor:
        """The likeliest label of every word, and the gold one."""
        words = target != IGNORED
        return torch.stack([logits.argmax(-1)[words], target[words]], dim=-1)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """The same as codes of `tag_codes`, with a row of `SENTENCE_END` after each sentence."""
        codes, words = torch.tensor(tag_codes(self.labelled.labels), device=target.device), target != IGNORED
        pairs = torch.stack([codes[logits.argmax(-1)], codes[target.masked_fill(~words, 0)]], dim=-1)
        ends = pairs.new_full((len(pairs), 1, 2), SENTENCE_END)
        return torch.cat([pairs, ends], dim=1)[F.pad(words, (0, 1), value=True)]
