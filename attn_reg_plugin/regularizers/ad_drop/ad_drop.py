"""AD-DROP: attribution-driven dropout (Yang et al., NeurIPS 2022).

Each regularized forward runs four steps (the paper's figure 3): a probe forward takes the pseudo labels; one backward
attributes them to the attention positions of every site, B = ∂F/∂A; the positions of each row with the highest
attributions form the candidate discard region, of which each is dropped with probability q; the model's own forward
runs with the mask. Cross-tuning alternates with plain epochs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import Attributed, map_gradient, output_gradients, together
from attn_reg_plugin.attention.calls import recording
from attn_reg_plugin.attention.masks import DIRECTIONS, PackedMask, all_finite, joined, sample_keep
from attn_reg_plugin.attention.requests import Tape
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.ad_drop.cross_tuning import CrossTuned, CrossTuning
from attn_reg_plugin.regularizers.ad_drop.integrated import integrated_attribution
from attn_reg_plugin.regularizers.ad_drop.objectives import (
    LABELS,
    Objective,
    OfOutputs,
    PseudoLabels,
)
from attn_reg_plugin.regularizers.ad_drop.tokens import hide_tokens
from attn_reg_plugin.regularizers.base import Preset, option, register
from attn_reg_plugin.regularizers.base.hooks.forward import Forward, ready_for_probe
from attn_reg_plugin.regularizers.base.hooks.put_back import (
    remember_randomness,
    unchanged,
    without_dropout,
    without_gradients,
)
from attn_reg_plugin.regularizers.base.outputs import check_scalar
from attn_reg_plugin.regularizers.base.statistics import Quantity

#: F times a power of two: ranks do not change, tiny gradients survive in fp16
AGAINST_UNDERFLOW = 1024.0
UNITS = ("position", "token")
ATTRIBUTIONS = ("gradient", "integrated", "attention", "random")
TOKENS = {"unit": "token", "p": 0.1, "q": 0.6, "sites": "encoder.self", "cross_tuning": "off"}
BASE = {"p": 0.3, "q": 0.3, "sites": "encoder.self", "cross_tuning": "epoch"}

#: AD-DROP as the commands compare it: as it is, and the paper's ablations, each of which changes one thing
PRESETS: tuple[Preset, ...] = (
    Preset("ad_drop", "AD-DROP", BASE),
    Preset("ad_drop_ga", "AD-DROP, gradient attribution", {**BASE, "attribution": "gradient"}),
    Preset("ad_drop_iga", "AD-DROP, integrated gradients", {**BASE, "attribution": "integrated"}),
    Preset("ad_drop_aa", "AD-DROP, attention as attribution", {**BASE, "attribution": "attention"}),
    Preset("ad_drop_rd", "AD-DROP, random candidates", {**BASE, "attribution": "random"}),
    Preset("ad_drop_gold", "AD-DROP, gold labels", {**BASE, "labels": "gold"}),
    Preset("ad_drop_low", "AD-DROP, lowest attributions", {**BASE, "direction": "low"}),
    Preset("ad_drop_first_layer", "AD-DROP, first layer", {**BASE, "sites": "encoder.self[0]"}),
    Preset("ad_drop_tokens", "AD-DROP, whole tokens", TOKENS),
    Preset("ad_drop_random_tokens", "whole tokens at random", {**TOKENS, "attribution": "random"}),
    Preset("ad_drop_without_cross_tuning", "AD-DROP without cross-tuning", {**BASE, "cross_tuning": "off"}),
)


@register("ad_drop")
@dataclass(eq=False)
class ADDrop(CrossTuned):
    """Drop the attention positions that the prediction leans on most.

    Attributes, beside those that their help explains:
        unit: `position` is the paper's; `token` hides whole tokens in every selected attention and head, see `tokens`.
            Special tokens are told by Trainer's tokenizer and fairseq's task; in a loop of one's own by
            `supply(special_ids=...)`, else the first and the last token of a text are taken for them.
        p, q: p = 0 or q = 0 is plain training, bit for bit.
        attribution: `gradient` (GA), `integrated` (IGA), `attention` (AA) or `random` (RD).
        probe_dropout: run the probe with the model's dropout, or without. The paper says only that no attention
            position is dropped in it; the authors' code has dropout for GA and none for IGA.
        probe_dtype: `same` as the model, or `bfloat16`: the probe runs under autocast. Where the model's own forward
            has one, as Accelerate's mixed precision gives it, that holds.
        integrated_steps, integrated_path: see `integrated_attribution`.
        integrated_labels: `frozen` attributes the pseudo labels of the first, unscaled pass on the whole path (the
            paper's c; completeness holds), `renewed` takes each pass's own, as the authors' code does.
        objective: F as a function(outputs, inputs) -> scalar; by default chosen from the outputs' shape and `labels`.
    """

    presets: ClassVar[tuple[Preset, ...]] = PRESETS
    uses: ClassVar[frozenset[str]] = frozenset({"mask", "gradient"})
    logged: ClassVar[tuple[Quantity, ...]] = (
        Quantity("fallbacks", title="probe_fallbacks", needs="probe_seconds"),
        Quantity("probe_seconds", "step_seconds", "probe_share", needs="probe_seconds"),
    )

    unit: str = option("position", "drop positions of each map, or whole tokens in all of them", choices=UNITS)
    p: float = option(0.3, "ratio of candidates: of the positions in a row, or of tokens, in [0, 1]", within="[0, 1]")
    q: float = option(0.3, "probability of dropping a candidate, in [0, 1]", within="[0, 1]")
    cross_tuning: str = option(
        "epoch", "'epoch': plain on odd, regularized on even epochs; 'update:N': alternate every N updates; 'off'"
    )
    attribution: str = option("gradient", "how positions are attributed", choices=ATTRIBUTIONS)
    labels: str = option("pseudo", "attribute the model's own predictions or the gold labels", choices=LABELS)
    direction: str = option("high", "drop the highest or the lowest attributions", choices=DIRECTIONS)
    probe_dropout: bool = option(True, "the model's dropout in the probe (the authors' code: for gradient only)")
    probe_dtype: str = option("same", "precision of the probe (bfloat16: autocast)", choices=("same", "bfloat16"))
    integrated_steps: int = option(20, "integrated gradients: steps m, at least 1", within="[1, inf)")
    integrated_path: str = option(
        "site", "integrated gradients: scale one attention at a time, or all together", choices=("site", "joint")
    )
    integrated_labels: str = option(
        "frozen", "integrated gradients: the first pass's pseudo labels, or each its own", choices=("frozen", "renewed")
    )
    objective: Objective | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.schedule = CrossTuning(self.cross_tuning)
        if self.unit == "token" and self.attribution not in ("gradient", "random"):
            raise ValueError(
                f"attribution is {self.attribution!r}, but must be gradient or random for whole tokens (unit='token')"
            )
        if self.objective is None:
            self.objective = OfOutputs(self.labels)
        if not callable(self.objective) or isinstance(self.objective, type):
            raise TypeError(f"objective is {self.objective!r}, but must be a function(outputs, inputs) -> scalar")

    @property
    def reads_gold(self) -> bool:
        """Whether the objective needs gold labels."""
        return self.labels == "gold"

    def acts_at_all(self) -> bool:
        """Whether anything can be dropped at all."""
        return self.p > 0 and self.q > 0

    def due(self) -> bool:
        """Regularized when cross-tuning says so and anything can be dropped at all."""
        return self.schedule.regularized(self.epoch, self.updates) and self.acts_at_all()

    def before_forward(self, forward: Forward) -> None:
        """Probe, attribute, and put the keep masks on the sites."""
        sites = self.attached_sites
        if self.unit == "token":
            return hide_tokens(self, forward)
        if self.attribution == "random":
            sampler = self.sampler(self._sample_at_random)
            for site in sites:
                site.ask(sampler=sampler)
            return
        masks: dict[Tape, PackedMask] = {}
        with (
            self.statistics.seconds("probe_seconds", forward.device),
            recording(sites, needs_weights=self.attribution != "gradient"),
        ):
            attributed, finite = self.attributions(forward)
            for calls in together(attributed):
                masks.update(zip([tape for _, tape, _ in calls], self._masks(calls, finite), strict=True))
            by_site = {site: tuple(masks[tape] for tape in site.tapes) for site in sites if site.tapes}
        for site, of_calls in by_site.items():
            site.ask(masks=of_calls)

    def _masks(self, calls: list[Attributed], finite: Tensor) -> list[PackedMask]:
        """Draw the masks of calls of one shape together."""
        sites, tapes, given = zip(*calls, strict=True)
        batch, *shape = *tapes[0].output.shape[:-1], tapes[0].value.size(-2)
        valid = joined([tape.valid for tape in tapes], batch)
        if given[0] is None:  # ties would lose the same ones always
            keep = torch.ones(len(calls) * batch, *shape, dtype=torch.bool, device=tapes[0].value.device)
        else:  # a non-finite probe falls back to a plain update, without waiting for the device
            with torch.autocast(finite.device.type, enabled=False):
                attribution = torch.cat(given)
                if self.attribution == "gradient":
                    attribution = map_gradient(attribution, torch.cat([tape.value for tape in tapes]))
            keep = sample_keep(attribution, valid, self.p, self.q, self.direction, enabled=finite)
            self.count_dropped(sites, keep, valid)
        return PackedMask.of(keep, valid).split(len(calls))

    def rehearse(self, forward: Forward) -> None:
        """Run the probe once, for its errors: a missing objective or label, a shape or keyword that doesn't fit."""
        if self.attribution == "random" or not self.acts_at_all():
            return
        if self.unit == "token":
            return hide_tokens(self, forward)
        with recording(self.attached_sites, self.attribution != "gradient"), self.probe(forward) as run:
            objective, tapes = run(), [tape for _, tape in self._recorded()]
            if tapes and self.attribution != "attention":
                output_gradients(objective, tapes)

    def attributions(self, forward: Forward) -> tuple[list[Attributed], Tensor]:
        """Probe, and return every call of the forward with what it is attributed by, and whether all is finite."""
        given = getattr(self, f"_{self.attribution}_attributions")(forward)
        calls = [(*call, one) for call, one in zip(self._recorded(), given, strict=True)]
        return calls, self.check_finite(given)

    def _gradient_attributions(self, forward: Forward) -> list[Tensor | None]:
        with self.probe(forward) as run:
            objective, recorded = run(), self._recorded()
            return output_gradients(objective, [tape for _, tape in recorded]) if recorded else []

    def _integrated_attributions(self, forward: Forward) -> list[Tensor | None]:
        with self.probe(forward, same_draws=True) as run:
            how = {"steps": self.integrated_steps, "path": self.integrated_path}
            return integrated_attribution(run, self.attached_sites, **how)

    def _attention_attributions(self, forward: Forward) -> list[Tensor | None]:
        with without_gradients(), self.probe(forward) as run:
            run()
        return [tape.weights for _, tape in self._recorded()]

    def _recorded(self) -> list[tuple[AttentionSite, Tape]]:
        """Every call that the probe came through, site by site: LayerDrop leaves layers out."""
        return [(site, tape) for site in self.attached_sites for tape in site.tapes]

    def _sample_at_random(self, shape: tuple[int, ...], valid: Tensor | None, generator: torch.Generator) -> Tensor:
        """A keep mask (B, H, T, S) over a candidate region drawn at random."""
        attribution = torch.rand(shape, generator=generator, device=generator.device)
        return sample_keep(attribution, valid, self.p, self.q, self.direction, generator=generator)

    # -- the probe --------------------------------------------------------------------------------------------------

    @contextmanager
    def probe(self, forward: Forward, same_draws: bool = False) -> Iterator[Callable[[], Tensor]]:
        """A function that runs the probe and returns F; with `same_draws`, every run draws what the first does."""
        inputs = forward.inputs
        if same_draws and self.integrated_labels == "frozen":
            inputs = {"pseudo_labels": PseudoLabels(), **inputs}
        device, bfloat16 = forward.device, partial(torch.autocast, dtype=torch.bfloat16, cache_enabled=False)
        precision = partial(bfloat16, device.type) if self.probe_dtype == "bfloat16" else nullcontext
        draw_again = remember_randomness(device) if same_draws else lambda: None

        def run() -> Tensor:
            put_back()
            draw_again()
            with precision():
                outputs = forward.run()
            objective = check_scalar("the objective", self.objective(outputs, inputs), graph=False)
            return objective * AGAINST_UNDERFLOW

        with ExitStack() as stack:
            put_back = stack.enter_context(unchanged(forward.model))
            if not self.probe_dropout:
                stack.enter_context(without_dropout(forward.model))
            stack.enter_context(ready_for_probe(self._attachment.backends, forward.model))
            yield run

    def check_finite(self, tensors: list[Tensor | None]) -> Tensor:
        """Whether all are finite, as a bool scalar on their device; counts the update if not."""
        finite = all_finite(tensors)
        self.statistics.add("fallbacks", 1.0 - finite.float())
        return finite
