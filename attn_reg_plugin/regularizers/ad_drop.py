"""AD-DROP: attribution-driven dropout (Yang et al., NeurIPS 2022).

Each regularized forward runs four steps (the paper's figure 3): a probe forward takes the pseudo labels; one backward
attributes them to the attention positions of every site, B = ∂F/∂A; the positions of each row with the highest
attributions form the candidate discard region, of which each is dropped with probability q; the model's own forward
runs with the mask. Cross-tuning alternates with plain epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import (
    NODES,
    integrated_attribution,
    map_gradient,
    output_gradients,
)
from attn_reg_plugin.attention.calls import Tape
from attn_reg_plugin.attention.masks import DIRECTIONS, sample_keep
from attn_reg_plugin.attention.sites import AttentionSite, recording
from attn_reg_plugin.regularizers.base import Preset, Regularizer, option, register
from attn_reg_plugin.regularizers.cross_tuning import CrossTuning
from attn_reg_plugin.regularizers.objectives import (
    LABELS,
    Objective,
    PseudoLabels,
    default_objective,
    logits_of,
    scale_against_underflow,
)
from attn_reg_plugin.regularizers.probing import Forward, random_state, set_random_state, unchanged, without_dropout
from attn_reg_plugin.regularizers.statistics import Quantity

ATTRIBUTIONS = ("gradient", "integrated", "attention", "random")
#: what the presets have in common; each of the others is one of the paper's ablations and changes one thing
BASE = {"p": 0.3, "q": 0.3, "sites": "encoder.self", "cross_tuning": "epoch"}


@register("ad_drop")
@dataclass(eq=False)
class ADDrop(Regularizer):
    """Drop the attention positions that the prediction leans on most.

    Attributes:
        p: ratio of candidate positions per row, in [0, 1].
        q: probability of dropping a candidate, in [0, 1]; p = 0 or q = 0 is plain training, bit for bit.
        cross_tuning: `epoch`, `update:N` or `off`, see `CrossTuning`.
        attribution: `gradient` (GA), `integrated` (IGA), `attention` (AA) or `random` (RD).
        labels: what is attributed, `pseudo` labels or `gold`.
        direction: `high` drops the largest attributions, `low` the smallest.
        probe_dropout: run the probe with the model's dropout, or without. The paper says only that no attention
            position is dropped in it; the authors' code has dropout for GA and none for IGA.
        probe_dtype: `same` as the model, or `bfloat16`: the probe runs under autocast.
        integrated_steps, integrated_nodes, integrated_path: see `integrated_attribution`.
        integrated_labels: `frozen` attributes the pseudo labels of the first, unscaled pass on the whole path (the
            paper's c; completeness holds), `renewed` takes each pass's own, as the authors' code does.
        objective: function(outputs, inputs) -> scalar; by default chosen from the shape of the outputs.

    Raises:
        TypeError: an option is of another type.
        ValueError: an option is out of its range.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("ad_drop", "AD-DROP", BASE),
        Preset("ad_drop_ga", "AD-DROP, gradient attribution", {**BASE, "attribution": "gradient"}),
        Preset("ad_drop_iga", "AD-DROP, integrated gradients", {**BASE, "attribution": "integrated"}),
        Preset("ad_drop_aa", "AD-DROP, attention as attribution", {**BASE, "attribution": "attention"}),
        Preset("ad_drop_rd", "AD-DROP, random candidates", {**BASE, "attribution": "random"}),
        Preset("ad_drop_gold", "AD-DROP, gold labels", {**BASE, "labels": "gold"}),
        Preset("ad_drop_low", "AD-DROP, lowest attributions", {**BASE, "direction": "low"}),
        Preset("ad_drop_first_layer", "AD-DROP, first layer", {**BASE, "sites": "encoder.self[0]"}),
        Preset("ad_drop_without_cross_tuning", "AD-DROP without cross-tuning", {**BASE, "cross_tuning": "off"}),
    )
    logged: ClassVar[tuple[Quantity, ...]] = (
        Quantity("fallbacks", title="probe_fallbacks"),
        Quantity("probe_seconds", "step_seconds", "probe_share"),
    )

    p: float = option(0.3, "ratio of candidate positions in each attention row, in [0, 1]", within="[0, 1]")
    q: float = option(0.3, "probability of dropping a candidate position, in [0, 1]", within="[0, 1]")
    cross_tuning: str = option(
        "epoch",
        "'epoch': plain on odd, regularized on even epochs; 'update:N': alternate every N updates; 'off'",
    )
    attribution: str = option("gradient", "how positions are attributed", choices=ATTRIBUTIONS)
    labels: str = option("pseudo", "attribute the model's own predictions or the gold labels", choices=LABELS)
    direction: str = option("high", "drop the highest or the lowest attributions", choices=DIRECTIONS)
    probe_dropout: bool = option(True, "the model's dropout in the probe (the authors' code: for gradient only)")
    probe_dtype: str = option("same", "precision of the probe (bfloat16: autocast)", choices=("same", "bfloat16"))
    integrated_steps: int = option(20, "integrated gradients: steps m, at least 1", within="[1, inf)")
    integrated_nodes: str = option("uniform", "integrated gradients: where the path is evaluated", choices=NODES)
    integrated_path: str = option(
        "site",
        "integrated gradients: scale one attention at a time, or all together",
        choices=("site", "joint"),
    )
    integrated_labels: str = option(
        "frozen",
        "integrated gradients: the first pass's pseudo labels for all, or each pass's own as in the authors' code",
        choices=("frozen", "renewed"),
    )
    objective: Objective | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.objective is not None and not callable(self.objective):
            raise TypeError(f"objective is {self.objective!r}, but must be a function (outputs, inputs) -> scalar")
        self.schedule = CrossTuning(self.cross_tuning)
        self.objective = self.objective or default_objective(self.labels)

    def due(self) -> bool:
        """Regularized when cross-tuning says so and anything can be dropped at all."""
        return self.schedule.regularized(self.epoch, self.updates) and self.p > 0 and self.q > 0

    def before_forward(self, forward: Forward) -> None:
        """Probe, attribute, and leave the keep masks on the sites."""
        sites = self.attached_sites
        if self.attribution == "random":
            for site in sites:
                site.sampler = self.sampler(site, self._sample_at_random)
            return
        with self.statistics.seconds("probe_seconds", forward.device):
            attribute = {
                "gradient": self._gradient_attributions,
                "integrated": self._integrated_attributions,
                "attention": self._attention_attributions,
            }[self.attribution]
            with recording(sites, needs_weights=self.attribution != "gradient"):
                masks: dict[AttentionSite, list[tuple[Tensor, Tensor | None]]] = {}
                for site, tape, attribution, finite in attribute(forward):
                    # a non-finite probe falls back to a plain update, without waiting for the device
                    keep = sample_keep(attribution, tape.valid, self.p, self.q, self.direction, enabled=finite)
                    self.count_dropped(site, keep, tape.valid)
                    masks.setdefault(site, []).append((keep, tape.valid))
            for site, calls in masks.items():
                site.set_masks(calls)

    def rehearse(self, forward: Forward) -> None:
        """Run the probe once, for its errors: a missing objective or label, a shape or keyword that doesn't fit."""
        if self.attribution == "random" or self.p == 0 or self.q == 0:
            return
        weights = self.attribution != "gradient"
        with recording(self.attached_sites, needs_weights=weights), self._probe(forward) as run:
            objective = run()
            tapes = [tape for _, tape in self._recorded()]
            if tapes and self.attribution != "attention":
                output_gradients(objective, tapes)

    # -- attributions: each yields (site, tape of a call, B (B, H, T, S), whether the probe was finite) -------------

    def _gradient_attributions(self, forward: Forward) -> Iterator[tuple[AttentionSite, Tape, Tensor, Tensor]]:
        with self._probe(forward) as run:
            objective = run()
            recorded = self._recorded()
            if not recorded:
                return
            gradients = output_gradients(objective, [tape for _, tape in recorded])
        finite = self._check_finite(gradients)
        for i, (site, tape) in enumerate(recorded):
            yield site, tape, map_gradient(gradients[i], tape.value), finite
            gradients[i] = None

    def _integrated_attributions(self, forward: Forward) -> Iterator[tuple[AttentionSite, Tape, Tensor, Tensor]]:
        with self._probe(forward, same_draws=True) as run:
            attributions = list(
                integrated_attribution(
                    run,
                    self.attached_sites,
                    steps=self.integrated_steps,
                    nodes=self.integrated_nodes,
                    path=self.integrated_path,
                )
            )
        finite = self._check_finite([attribution for _, attribution in attributions]) if attributions else None
        for (site, tape), (_, attribution) in zip(self._recorded(), attributions, strict=True):
            yield site, tape, attribution, finite

    def _attention_attributions(self, forward: Forward) -> Iterator[tuple[AttentionSite, Tape, Tensor, Tensor]]:
        with torch.no_grad(), self._probe(forward) as run:
            run()
        recorded = self._recorded()
        finite = self._check_finite([tape.weights for _, tape in recorded]) if recorded else None
        for site, tape in recorded:
            yield site, tape, tape.weights, finite

    def _recorded(self) -> list[tuple[AttentionSite, Tape]]:
        """Every call that the probe came through, site by site: LayerDrop leaves layers out."""
        return [(site, tape) for site in self.attached_sites for tape in site.tapes]

    def _sample_at_random(self, shape: tuple[int, ...], valid: Tensor | None, generator: torch.Generator) -> Tensor:
        """A keep mask (B, H, T, S) over a candidate region drawn at random."""
        attribution = torch.rand(shape, generator=generator, device=generator.device)
        return sample_keep(attribution, valid, self.p, self.q, self.direction, generator=generator)

    # -- the probe --------------------------------------------------------------------------------------------------

    @contextmanager
    def _probe(self, forward: Forward, same_draws: bool = False) -> Iterator[Callable[[], Tensor]]:
        """A function that runs the probe and returns F; with `same_draws`, every run repeats the first's dropout."""
        inputs = forward.inputs
        if same_draws and self.integrated_labels == "frozen":
            inputs = {"pseudo_labels": PseudoLabels(), **inputs}
        device = forward.device
        states = random_state(device) if same_draws else None

        def run() -> Tensor:
            put_back()
            if states is not None:
                set_random_state(device, states)
            with ExitStack() as stack:
                if self.probe_dtype == "bfloat16":
                    stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16))
                outputs = forward.run()
            objective = self.objective(outputs, inputs)
            return scale_against_underflow(objective, logits_dtype(outputs))

        with ExitStack() as stack:
            put_back = stack.enter_context(unchanged(forward.model))
            if not self.probe_dropout:
                stack.enter_context(without_dropout(forward.model))
            stack.enter_context(self._attachment.probing())
            yield run

    def _check_finite(self, tensors: list[Tensor]) -> Tensor:
        """Whether all are finite, as a bool scalar on their device; counts the update if not."""
        finite = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
        self.statistics.add("fallbacks", 1.0 - finite.float())
        return finite


def logits_dtype(outputs: Any) -> torch.dtype:
    """The dtype of the model's logits, fp32 where a user's objective reads something else."""
    try:
        return logits_of(outputs).dtype
    except ValueError:
        return torch.float32
