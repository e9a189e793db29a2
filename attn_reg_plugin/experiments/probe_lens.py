"""AD-DROP's prior experiment (Yang et al. 2022, section 2 and figure 2) on a trained model.

Positions of every attention row are dropped by their attribution: the highest, the lowest, or random ones. The model's
own dropout is off, and nothing is trained: the loss says how much the model leans on what was dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import recording
from attn_reg_plugin.attention.masks import DIRECTIONS, candidate_region, drop_candidates
from attn_reg_plugin.attention.sites import AttentionSite, Tape
from attn_reg_plugin.regularizers import ADDrop
from attn_reg_plugin.regularizers.base.forward import Forward, in_evaluation, without_dropout

RANDOM = "random"
#: what is dropped, in the order of figure 2
WHICH = (*DIRECTIONS, RANDOM)


class Measured(NamedTuple):
    """Of a batch: the loss of every item, (N,), and whether it is right, (N,), or None where that has no meaning."""

    losses: Tensor
    right: Tensor | None


@dataclass
class Subject:
    """A trained model and the examples that it is probed with.

    Attributes:
        model: in evaluation mode.
        samples: batches, with `net_input`, the keywords of its forward, and `target`.
        measure: loss of (outputs, sample).
        tokens: of (sample, row): the tokens by stack, of the attention maps' row.
        unit: what the loss is the mean of.
        score: what the share of right items is called; None where there is none.
        targets: whether objectives need the gold labels, or know by them which tokens count.
        title: for pictures.
        sentence: one example as a batch of its own: the number of one of the split, from 1, or a text or two.
    """

    model: nn.Module
    samples: list[dict[str, Any]]
    measure: Callable[[Any, dict[str, Any]], Measured]
    tokens: Callable[[dict[str, Any], int], Mapping[str, list[str]]]
    unit: str
    score: str | None
    targets: bool
    title: str
    sentence: Callable[[int | Sequence[str]], dict[str, Any]]

    def row(self, sample: dict[str, Any]) -> int:
        """Which row of the attention maps to show of one example: of multiple choice that of the right choice."""
        several = sample["net_input"].get("input_ids", torch.empty(0)).dim() == 3
        return int(sample["target"][0]) if several and sample["target"] is not None else 0


@dataclass(frozen=True)
class AttentionMap:
    """What the probe saw of one call of a site.

    Attributes:
        site: the site.
        attention, attribution: (B, H, T, S), fp32.
        valid: bool, broadcastable to it; None means all.
    """

    site: AttentionSite
    attention: Tensor
    attribution: Tensor
    valid: Tensor | None


class Lens(ADDrop):
    """AD-DROP that keeps what it attributes, and drops what it is told; see `looking`."""

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.masks: dict[AttentionSite, list[tuple[Tensor, Tensor | None]]] | None = None
        self.maps: list[AttentionMap] = []

    def before_forward(self, forward: Forward) -> None:
        """Attribute, or set the masks that are given."""
        if self.masks is not None:
            for site, calls in self.masks.items():
                site.set_masks(calls)
            return
        with recording(self.attached_sites, needs_weights=True):
            self.maps = [
                AttentionMap(site, tape.weights.float(), _detached(tape, attribution), tape.valid)
                for site, tape, attribution, _ in self.attributions(forward)
            ]

    def look(self, subject: Subject, sample: dict[str, Any]) -> list[AttentionMap]:
        """Attention and attribution of every site, in a forward without dropout."""
        self.masks = None
        self.supply(targets=sample["target"] if subject.targets else None)
        with torch.enable_grad():
            subject.model(**sample["net_input"])
        return self.maps

    def drop(self, subject: Subject, sample: dict[str, Any], maps: Sequence[AttentionMap], keeps: list[Tensor]) -> Any:
        """The model's outputs with these keep masks, one a map."""
        self.masks = {}
        for one, keep in zip(maps, keeps, strict=True):
            self.masks.setdefault(one.site, []).append((keep, one.valid))
        with torch.enable_grad():  # masks act in forwards that could be trained on
            return subject.model(**sample["net_input"])


def _detached(tape: Tape, attribution: Tensor | None) -> Tensor:
    return torch.zeros_like(tape.weights.float()) if attribution is None else attribution.detach()


@contextmanager
def looking(model: nn.Module, **options: Any) -> Iterator[Lens]:
    """A lens on a model in evaluation mode: only its attention believes that it is trained, and there is no dropout.

    Args:
        model: is left as it was.
        **options: of AD-DROP: `sites`, `attribution`, `labels` and those of integrated gradients.

    Raises:
        ValueError: the sites match nothing, or an option is out of its range.
    """
    lens = Lens(p=1.0, q=1.0, cross_tuning="off", probe_dropout=False, **options)
    frozen = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with warnings.catch_warnings(), in_evaluation(model), without_dropout(model), lens.attach(model):
        # fairseq gives PyTorch a mask of padding and one of the future in two types
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")
        try:
            for module in (model, *(site.module for site in lens.attached_sites)):
                module.training = True
            for parameter, _ in frozen:
                parameter.requires_grad_(False)  # the graph begins at the sites, so masked forwards need none
            yield lens
        finally:
            for parameter, needed in frozen:
                parameter.requires_grad_(needed)


@dataclass(frozen=True)
class Point:
    """Loss and score with positions dropped.

    Attributes:
        which: `high`, `low`, `random`, or `none` with nothing dropped.
        p, q: as in AD-DROP.
        loss: mean over items.
        score: share of right items, in percent; None where that has no meaning.
        dropped: the share of valid positions dropped, in [0, 1].
        attention: the share of the attention that was on them, in [0, 1].
    """

    which: str
    p: float
    q: float
    loss: float
    score: float | None
    dropped: float
    attention: float


def prior_experiment(
    subject: Subject,
    ratios: Sequence[float],
    q: float = 1.0,
    seed: int = 1,
    which: Sequence[str] = WHICH,
    watch: Callable[[int], None] = lambda done: None,
    **options: Any,
) -> list[Point]:
    """Loss and score with nothing dropped, and for every ratio with high, low and random positions dropped.

    Args:
        subject: the model and its examples.
        ratios: p, the ratios of candidate positions per row, in [0, 1].
        q: probability of dropping a candidate, in [0, 1].
        seed: of the random positions, and of what q draws.
        which: what is dropped, of `WHICH`.
        watch: gets the number of samples done.
        **options: see `looking`.

    Raises:
        ValueError: a ratio or q outside [0, 1], or options that do not fit the model.
    """
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    sums: dict[tuple[str, float], _Sum] = {("none", 0.0): _Sum()}
    sums |= {(one, p): _Sum() for one in which for p in ratios}
    try:
        with looking(subject.model, **options) as lens:
            for done, sample in enumerate(subject.samples, start=1):
                maps = lens.look(subject, sample)
                for (one, p), total in sums.items():
                    keeps = [] if one == "none" else [_keep(found, one, p, q) for found in maps]
                    outputs = lens.drop(subject, sample, maps if keeps else [], keeps)
                    total.add(subject.measure(outputs, sample), maps, keeps)
                watch(done)
    finally:
        torch.set_rng_state(generator_state)
    return [total.point(one, p, q) for (one, p), total in sums.items()]


def _keep(found: AttentionMap, which: str, p: float, q: float) -> Tensor:
    """The keep mask of a map, bool (B, H, T, S)."""
    attribution, direction = found.attribution, which
    if which == RANDOM:
        attribution, direction = torch.rand(attribution.shape, device="cpu").to(attribution.device), "high"
    return drop_candidates(candidate_region(attribution, found.valid, p, direction), found.valid, q)


class _Sum:
    """The sums behind a point."""

    def __init__(self) -> None:
        self.loss = self.right = self.dropped = self.valid = self.lost = self.attention = 0.0
        self.items, self.scored = 0, True

    def add(self, measured: Measured, maps: Sequence[AttentionMap], keeps: Sequence[Tensor]) -> None:
        """Add a batch."""
        self.loss += float(measured.losses.detach().double().sum())
        self.items += measured.losses.numel()
        self.scored = self.scored and measured.right is not None
        self.right += 0.0 if measured.right is None else float(measured.right.double().sum())
        for found, keep in zip(maps, keeps, strict=False):
            valid = keep.numel() if found.valid is None else int(found.valid.expand(keep.shape).sum())
            self.valid += valid
            self.dropped += valid - int(keep.sum())
            weights = found.attention.double()
            self.attention += float(weights.sum())
            self.lost += float(weights.masked_fill(keep, 0.0).sum())

    def point(self, which: str, p: float, q: float) -> Point:
        """The means."""
        score = 100 * self.right / self.items if self.scored and self.items else None
        shares = self.dropped / max(1.0, self.valid), self.lost / max(1.0, self.attention)
        return Point(which, p, q, self.loss / max(1, self.items), score, *shares)
