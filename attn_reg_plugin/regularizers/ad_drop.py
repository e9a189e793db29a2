"""AD-DROP: attribution-driven dropout (Yang et al., NeurIPS 2022).

Each regularized forward runs four steps (the paper's figure 3): a probe forward takes the pseudo labels; one backward
attributes them to the attention positions of every site, B = ∂F/∂A; the positions of each row with the highest
attributions form the candidate discard region, of which each is dropped with probability q; the model's own forward
runs with the mask. Cross-tuning alternates with plain epochs.

With `probe="kept"` there is no probe: the candidates are those that the backward of the last update that trained on an
example gave, see `kept_regions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import NODES, integrated_attribution, map_gradient, output_gradients
from attn_reg_plugin.attention.calls import Tape, recording, without_gradients
from attn_reg_plugin.attention.masks import DIRECTIONS, all_finite, candidate_region, pack_bits, sample_keep
from attn_reg_plugin.attention.packed import PackedMask
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.ad_drop_presets import PRESETS
from attn_reg_plugin.regularizers.base import Preset, Regularizer, option, register
from attn_reg_plugin.regularizers.cross_tuning import CrossTuned, CrossTuning
from attn_reg_plugin.regularizers.kept_regions import KeptRegions
from attn_reg_plugin.regularizers.objectives import (
    LABELS,
    NoObjective,
    Objective,
    OfOutputs,
    PseudoLabels,
    negative_loss,
)
from attn_reg_plugin.regularizers.probing import Forward, remember_randomness, unchanged, without_dropout
from attn_reg_plugin.regularizers.region_files import Setting
from attn_reg_plugin.regularizers.region_lookup import drawn_from
from attn_reg_plugin.regularizers.statistics import Quantity
from attn_reg_plugin.regularizers.training import Training

ATTRIBUTIONS = ("gradient", "integrated", "attention", "random")
#: what F is: by the shape of the outputs, or minus the training loss
OBJECTIVES = ("prediction", "loss")
PROBES = ("fresh", "kept")


@register("ad_drop")
@dataclass(eq=False)
class ADDrop(CrossTuned):
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
        probe_dtype: `same` as the model, or `bfloat16`: the probe runs under autocast. Where the model's own forward
            has one, as Accelerate's mixed precision gives it, that holds.
        integrated_steps, integrated_nodes, integrated_path: see `integrated_attribution`.
        integrated_labels: `frozen` attributes the pseudo labels of the first, unscaled pass on the whole path (the
            paper's c; completeness holds), `renewed` takes each pass's own, as the authors' code does.
        objective: F. `prediction` is the paper's, chosen from the shape of the outputs and `labels`; `loss` is minus
            the loss, that of the outputs or that of the gold labels; or a function(outputs, inputs) -> scalar.
        probe: `fresh` runs one in every regularized forward; `kept` takes the candidate region that the backward of
            the last update that trained on an example gave, attributions of the loss by gradient. An epoch that
            cross-tuning regularizes isn't recorded: the plain one that follows is, before anything is needed.
        on_miss: for an example that nothing is kept of, `probe` (objective `loss`, or a function) or `plain`.
        store_gb: memory for what is kept, in 2^30 bytes: L·H·T·S/8 bytes an example; 0 takes a quarter of what is
            free, at most 8. More goes into files.
        store_folder: for these files; by default where the checkpoints are.

    Raises:
        TypeError: an option is of another type.
        ValueError: an option is out of its range, or `kept` is asked of other attributions than those by gradient.
    """

    presets: ClassVar[tuple[Preset, ...]] = PRESETS
    slots: ClassVar[frozenset[str]] = frozenset({"mask", "gradient"})
    logged: ClassVar[tuple[Quantity, ...]] = (
        Quantity("fallbacks", title="probe_fallbacks"),
        Quantity("probe_seconds", "step_seconds", "probe_share"),
        Quantity("kept_hits", "kept_asked", "kept_hit_rate"),
        Quantity("kept_bytes", "kept_examples", "kept_bytes_per_example"),
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
        "site", "integrated gradients: scale one attention at a time, or all together", choices=("site", "joint")
    )
    integrated_labels: str = option(
        "frozen",
        "integrated gradients: the first pass's pseudo labels for all, or each pass's own as in the authors' code",
        choices=("frozen", "renewed"),
    )
    objective: str = option(
        "prediction", "attribute the prediction, as in the paper, or the training loss", choices=OBJECTIVES
    )
    probe: str = option(
        "fresh", "a probe in every regularized forward, or what the last training backward gave", choices=PROBES
    )
    on_miss: str = option(
        "probe", "probe=kept: what to do for examples that nothing is kept of", choices=("probe", "plain")
    )
    store_gb: float = option(
        0.0, "probe=kept: memory for what is kept, in GB; 0: a quarter of the free memory, at most 8", within="[0, inf)"
    )
    store_folder: str = option("", "probe=kept: folder for what exceeds it; by default beside the checkpoints")

    def __post_init__(self) -> None:
        """Check the options."""
        given: Objective | str = self.objective
        self.objective = "prediction" if callable(given) else given
        super().__post_init__()
        self.schedule = CrossTuning(self.cross_tuning)
        #: whether the objective needs gold labels
        self.reads_gold = self.labels == "gold"
        if callable(given):
            self.objective = given
        elif self.objective == "loss" or self.probe == "kept":
            self.objective, self.reads_gold = negative_loss, True
        else:
            self.objective = OfOutputs(self.labels)
        if self.probe == "kept" and self.attribution != "gradient":
            raise ValueError(f"attribution is {self.attribution!r}, but must be gradient with probe='kept'")
        self.kept = KeptRegions(self.store_gb, Path(self.store_folder) if self.store_folder else None)

    def acts_at_all(self) -> bool:
        """Whether anything can be dropped at all."""
        return self.p > 0 and self.q > 0

    def due(self) -> bool:
        """Regularized when cross-tuning says so and anything can be dropped at all."""
        return self.schedule.regularized(self.epoch, self.updates) and self.acts_at_all()

    def before_forward(self, forward: Forward) -> None:
        """Probe, attribute, and leave the keep masks on the sites; or draw them from what is kept."""
        sites = self.attached_sites
        if self.probe == "kept":
            self._use_kept(forward)
            return
        if self.attribution == "random":
            for site in sites:
                site.sampler = self.sampler(site, self._sample_at_random)
            return
        masks: dict[AttentionSite, list[tuple[PackedMask, Tensor | None]]] = {}
        weights = self.attribution != "gradient"
        with self.statistics.seconds("probe_seconds", forward.device), recording(sites, needs_weights=weights):
            for site, tape, attribution, finite in self.attributions(forward):
                if attribution is None:
                    keep = tape.whole()  # ties would always lose the same positions
                else:  # a non-finite probe falls back to a plain update, without waiting for the device
                    keep = sample_keep(attribution, tape.valid, self.p, self.q, self.direction, enabled=finite)
                    self.count_dropped(site, keep, tape.valid)
                masks.setdefault(site, []).append((PackedMask(keep), tape.valid))
                del attribution, keep  # before the next site's
        for site, calls in masks.items():
            site.set_masks(calls)

    def rehearse(self, forward: Forward) -> None:
        """Run the probe once, for its errors: a missing objective or label, a shape or keyword that doesn't fit."""
        plain = self.attribution == "random" or (self.probe == "kept" and self.on_miss == "plain")
        if plain or not self.acts_at_all():
            return
        with recording(self.attached_sites, self.attribution != "gradient"), self._probe(forward) as run:
            objective, tapes = run(), [tape for _, tape in self._recorded()]
            if tapes and self.attribution != "attention":
                output_gradients(objective, tapes)

    def attributions(self, forward: Forward) -> Iterator[tuple[AttentionSite, Tape, Tensor | None, Tensor]]:
        """Of every call in the probe: site, tape, B (B, H, T, S), None without gradients, and whether all is finite."""
        return getattr(self, f"_{self.attribution}_attributions")(forward)

    def _gradient_attributions(self, forward: Forward) -> Iterator[tuple[AttentionSite, Tape, Tensor | None, Tensor]]:
        with self._probe(forward) as run:
            objective = run()
            recorded = self._recorded()
            if not recorded:
                return
            gradients = output_gradients(objective, [tape for _, tape in recorded])
        finite = self._check_finite(gradients)
        for i, (site, tape) in enumerate(recorded):
            gradient, gradients[i] = gradients[i], None
            yield site, tape, None if gradient is None else map_gradient(gradient, tape.value), finite

    def _integrated_attributions(self, forward: Forward) -> Iterator[tuple[AttentionSite, Tape, Tensor | None, Tensor]]:
        with self._probe(forward, same_draws=True) as run:
            how = {"steps": self.integrated_steps, "nodes": self.integrated_nodes, "path": self.integrated_path}
            attributions = list(integrated_attribution(run, self.attached_sites, **how))
        finite = self._check_finite([attribution for _, attribution in attributions]) if attributions else None
        for (site, tape), (_, attribution) in zip(self._recorded(), attributions, strict=True):
            yield site, tape, attribution, finite

    def _attention_attributions(self, forward: Forward) -> Iterator[tuple[AttentionSite, Tape, Tensor | None, Tensor]]:
        with without_gradients(), self._probe(forward) as run:
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

    # -- what is kept, in place of a probe --------------------------------------------------------------------------

    @property
    def large_state(self) -> bool:
        """What is kept is too much for every checkpoint."""
        return self.probe == "kept"

    dispensable_state = large_state

    @property
    def _setting(self) -> Setting:
        return Setting(float(self.p), self.direction)

    def records(self) -> bool:
        """In every forward whose regions may be used before the example is trained on once more."""
        return self.probe == "kept" and self.acts_at_all() and (self.cross_tuning != "epoch" or not self.due())

    def record(self, forward: Forward) -> None:
        """Watch the sites, so that the training's own backward brings the regions."""
        self.kept.ready(self.attached_sites, self.model, self.epoch)  # all ranks do, those without examples too
        if forward.supplied.counts:
            self.kept.record(forward, self.attached_sites, self.updates, self._setting)

    def _use_kept(self, forward: Forward) -> None:
        """Draw the masks from the kept regions; of examples without one, from a probe's if `on_miss` says so."""
        sites = self.attached_sites
        self.kept.ready(sites, self.model, self.epoch)
        found = self.kept.find(forward, self._setting, self.statistics)
        if self.on_miss == "probe" and forward.on_any_rank(bool(found.missing)):
            with self.statistics.seconds("probe_seconds", forward.device), recording(sites):
                for site, tape, attribution, finite in self._gradient_attributions(forward):
                    if attribution is not None:
                        region = candidate_region(attribution, tape.valid, self.p, self.direction) & finite
                        found.fresh[sites.index(site), site.tapes.index(tape)] = pack_bits(region)
        for index, site in enumerate(sites):
            site.sampler = self.sampler(site, partial(drawn_from, found, site, index, self.q))

    def bind(self, training: Training) -> None:
        """Learn where the checkpoints are."""
        self.kept.folder = Path(self.store_folder) if self.store_folder else getattr(training, "folder", None)
        self.kept.vocabulary = getattr(training, "vocabulary", "")

    def begin_anew(self) -> None:
        """As `Regularizer.begin_anew`: what is kept is another model's."""
        super().begin_anew()
        self.kept.close()

    def unbind(self) -> None:
        """Release the files."""
        self.kept.close()

    def end_update(self) -> None:
        """Keep what the update's backwards brought."""
        if self.probe == "kept":
            self.kept.finish(self.statistics)
        super().end_update()

    def forget_unfinished(self) -> None:
        """What a skipped update's backwards brought isn't kept."""
        self.kept.forget_unfinished()

    def copied(self) -> Regularizer:
        """With a store of its own, which stays empty: a copy of the model isn't trained."""
        twin = super().copied()
        twin.kept = KeptRegions(self.store_gb, None)
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Also what is kept in memory."""
        kept = self.kept.state(self.epoch)
        return super().state_dict() | ({} if kept is None else {"kept": kept})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also what was kept in memory, and which of the files' is of earlier updates.

        Raises:
            ValueError: as `Regularizer.load_state_dict`, or, where one is attached, what was kept is another model's.
        """
        super().load_state_dict(state)
        loaded = state.get("kept") if self.probe == "kept" else None
        self.kept.load(loaded, self.updates)
        if loaded is not None and self._attachment is not None:
            self.kept.open(self.attached_sites, self.model)

    # -- the probe --------------------------------------------------------------------------------------------------

    @contextmanager
    def _probe(self, forward: Forward, same_draws: bool = False) -> Iterator[Callable[[], Tensor]]:
        """A function that runs the probe and returns F; with `same_draws`, every run draws what the first does."""
        inputs, step = forward.inputs, self._attachment.whole_step
        if self.probe == "kept":  # of each forward by itself
            forward = replace(forward, supplied=replace(forward.supplied, training_loss=None))
        if same_draws and self.integrated_labels == "frozen":
            inputs = {"pseudo_labels": PseudoLabels(), **inputs}
        device, bfloat16 = forward.device, partial(torch.autocast, dtype=torch.bfloat16, cache_enabled=False)
        precision = partial(bfloat16, device.type) if self.probe_dtype == "bfloat16" else nullcontext
        draw_again = remember_randomness(device) if same_draws else lambda: None

        def run() -> Tensor:
            put_back()
            draw_again()
            try:
                return step.run(self.objective, forward, inputs, self.attached_sites, precision)
            except NoObjective as missing:
                hint = "; or use on_miss='plain', which needs no objective" if self.probe == "kept" else ""
                raise NoObjective(f"{missing}{hint}", missing.reason) from missing.__cause__

        with ExitStack() as stack:
            put_back = stack.enter_context(unchanged(forward.model))
            if not self.probe_dropout:
                stack.enter_context(without_dropout(forward.model))
            stack.enter_context(self._attachment.probing())
            yield run

    def _check_finite(self, tensors: list[Tensor | None]) -> Tensor:
        """Whether all are finite, as a bool scalar on their device; counts the update if not."""
        finite = all_finite(tensors)
        self.statistics.add("fallbacks", 1.0 - finite.float())
        return finite
