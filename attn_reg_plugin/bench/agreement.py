"""How much of AD-DROP's candidate regions two probes of the same examples have in common.

Every row has as many candidates as its rank gives, whatever the attributions are, so the share |A ∩ B| / |A| is the
same seen from either side. What two fresh probes have in common that differ in their dropout only is what there is to
reach: the noise of a probe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.attribution import map_gradient
from attn_reg_plugin.attention.calls import Tape, recording
from attn_reg_plugin.attention.masks import candidate_counts, candidate_region
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.ad_drop import ADDrop
from attn_reg_plugin.regularizers.example_digests import Examples
from attn_reg_plugin.regularizers.ad_drop.objectives import Objective
from attn_reg_plugin.regularizers.base.forward import Forward, same_randomness, unchanged
from attn_reg_plugin.regularizers.region_files import Setting
from attn_reg_plugin.regularizers.region_lookup import Where, stacks_of
from attn_reg_plugin.regularizers.base.statistics import Statistics
from attn_reg_plugin.regularizers.base.context import Supplied


class Measure(NamedTuple):
    """What is compared.

    Attributes:
        title: as the table names it.
        first, second: of the regions that `Agreement` makes.
    """

    title: str
    first: str
    second: str


#: regions: `loss` and `loss_again` are fresh probes that differ in their dropout, as are `prediction` and
#: `prediction_again`; `loss` and `prediction` have the same dropout, and `bfloat16` is `prediction` in autocast;
#: `kept` is of the epoch that ends, `older` of the one before it
MEASURES: dict[str, Measure] = {
    "noise_loss": Measure("loss: noise", "loss", "loss_again"),
    "kept_loss": Measure("loss: kept", "kept", "loss"),
    "older_loss": Measure("loss: older", "older", "loss"),
    "noise_prediction": Measure("prediction: noise", "prediction", "prediction_again"),
    "kept_prediction": Measure("prediction: kept", "kept", "prediction"),
    "older_prediction": Measure("prediction: older", "older", "prediction"),
    "objectives": Measure("loss, prediction", "loss", "prediction"),
    "precision": Measure("fp32, bf16", "prediction", "bfloat16"),
}
NOTES = (
    "the share of AD-DROP's candidates that two probes of the same examples have in common, in percent; chance: that "
    "of regions drawn at random",
    "noise: two fresh probes with the weights at the end of the epoch that differ in their dropout only: the most that "
    "can be expected of anything that is compared with a fresh probe",
    "kept: what the epoch's own backwards gave, and a fresh probe; older: the same of the epoch before; both of the "
    "training loss, while the fresh probe is of the loss or of the prediction (the paper's objective)",
    "loss, prediction: two fresh probes with the same dropout; fp32, bf16: two of the prediction with the same dropout",
    "counted are the rows of real queries with fewer candidates than keys whose attributions aren't all equal: in a "
    "classifier's last layer these are the first rows only; all updates are plain",
)
#: the fresh probes, a forward each: the region of each objective, which dropout, and whether in bf16
_PROBES: tuple[tuple[dict[str, str], int, bool], ...] = (
    ({"loss": "loss", "prediction": "prediction"}, 0, False),
    ({"loss_again": "loss", "prediction_again": "prediction"}, 1, False),
    ({"bfloat16": "prediction"}, 0, True),
)
#: seeds of the probes begin here, far from those of a training's updates
_SEED = 10_000_000


@dataclass
class Probed:
    """What a probe gave at one call of a site.

    Attributes:
        region: the candidates, bool (N, H, T, S).
        count, keys: of each row, how many candidates and how many valid keys; int64, broadcastable to (N, H, T).
        varied: bool (N, H, T), rows whose attributions aren't all equal.
    """

    region: Tensor
    count: Tensor
    keys: Tensor
    varied: Tensor


@dataclass
class Overlap:
    """Candidates in common and candidates, summed up by site."""

    common: dict[str, float] = field(default_factory=partial(defaultdict, float))
    size: dict[str, float] = field(default_factory=partial(defaultdict, float))

    def add(self, site: str, first: Tensor, second: Tensor, rows: Tensor) -> None:
        """Count two regions, bool (N, H, T, S), in the rows (N, H, T) that are True."""
        self.common[site] += float(((first & second).sum(-1) * rows).sum())
        self.size[site] += float((first.sum(-1) * rows).sum())

    def add_chance(self, site: str, one: Probed, rows: Tensor) -> None:
        """Count what two regions drawn at random are expected to have in common: k² / n of k candidates and n keys."""
        self.common[site] += float((one.count.double() ** 2 / one.keys.clamp(min=1) * rows).sum())
        self.size[site] += float((one.count * rows).sum())

    def shares(self) -> dict[str, float]:
        """|A ∩ B| / |A| by site; a site without any candidate is left out."""
        return {site: self.common[site] / size for site, size in self.size.items() if size}


def forward_of(model: nn.Module, sites: Sequence[AttentionSite], inputs: dict[str, Any], supplied: Supplied) -> Forward:
    """A forward of an attached model, as its regularizer would see it.

    Args:
        inputs: the arguments by name.
    """
    described: dict[str, Any] = {}
    for backend in _backends(sites):
        if hasattr(backend, "describe"):
            described = {**backend.describe(model, (), inputs), **described}
    return Forward(model, (), inputs, supplied, described)


def _backends(sites: Sequence[AttentionSite]) -> list[Any]:
    return list({type(site.backend): site.backend for site in sites}.values())


@contextmanager
def _ready(model: nn.Module, sites: Sequence[AttentionSite]) -> Iterator[None]:
    """While open, a probe may run: it leaves the model and the random numbers as they were."""
    with ExitStack() as stack:
        stack.enter_context(same_randomness(next(model.parameters()).device))
        stack.enter_context(unchanged(model))
        for backend in _backends(sites):
            if hasattr(backend, "probing"):
                stack.enter_context(backend.probing(model))
        yield


def probe(
    forward: Forward,
    sites: Sequence[AttentionSite],
    objectives: Mapping[str, Objective],
    setting: Setting,
    seed: int,
    bfloat16: bool = False,
) -> dict[str, dict[Where, Probed]]:
    """A fresh probe by gradient, in the mode that the model is in: one forward, and a backward for each objective.

    Args:
        sites: attached ones.
        objectives: F by name.
        seed: of the dropout.
        bfloat16: run it in autocast.

    Returns:
        What it gave, by the name of the objective, and the index of a site and the call of it.
    """
    with _ready(forward.model, sites), recording(sites):
        torch.manual_seed(seed)
        with torch.autocast(forward.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            outputs = forward.run()
        tapes = {(i, call): tape for i, site in enumerate(sites) for call, tape in enumerate(site.tapes)}
        results = {name: objective(outputs, forward.inputs) for name, objective in objectives.items()}
        return {name: _probed(result, tapes, setting) for name, result in results.items()}


def _probed(objective: Tensor, tapes: Mapping[Where, Tape], setting: Setting) -> dict[Where, Probed]:
    """What attributing F gives at each call."""
    outputs = [tape.output for tape in tapes.values()]
    gradients = torch.autograd.grad(objective, outputs, retain_graph=True, allow_unused=True, materialize_grads=True)
    found = {}
    for (where, tape), gradient in zip(tapes.items(), gradients, strict=True):
        attribution = map_gradient(gradient, tape.value)
        region = candidate_region(attribution, tape.valid, setting.p, setting.direction)
        valid = torch.ones_like(region) if tape.valid is None else tape.valid.expand(region.shape)
        keys = valid.sum(-1)
        found[where] = Probed(region, candidate_counts(keys, setting.p), keys, _varied(attribution, valid))
    return found


def _varied(attribution: Tensor, valid: Tensor) -> Tensor:
    low = attribution.masked_fill(~valid, float("inf")).amin(-1)
    return low < attribution.masked_fill(~valid, float("-inf")).amax(-1)


class Agreement:
    """Compares what is kept with fresh probes of the same examples, whenever `measure` is called.

    Args:
        regularizer: attached, with `probe="kept"`.
        objectives: F by the names `loss` and `prediction`.
        forwards: of the examples to probe.
    """

    def __init__(self, regularizer: ADDrop, objectives: Mapping[str, Objective], forwards: Sequence[Forward]) -> None:
        self.regularizer, self.objectives, self.forwards = regularizer, objectives, forwards
        self.setting = Setting(float(regularizer.p), regularizer.direction)
        self._older: dict[int, dict[Where, Tensor]] = {}

    def measure(self) -> dict[str, Any]:
        """Probe all examples with the weights that the model has now.

        Only the rows of real queries count in which there is anything to choose: fewer candidates than keys, and
        attributions of loss and prediction that aren't all equal. (A classifier's last layer has those in its first
        row only; the others' are zero, and which of equals are candidates is arbitrary.)

        Returns:
            `examples`; how many of them are `kept`; and by site the `rows` that were compared, the share that two
            regions drawn at random would have in common as `chance`, and that of each of `MEASURES`. What is `older`
            is missing at the first call.
        """
        overlaps = {name: Overlap() for name in ("chance", *MEASURES)}
        rows: dict[str, int] = defaultdict(int)
        examples = kept = 0
        for number, forward in enumerate(self.forwards):
            there, known = self._compare(number, forward, overlaps, rows)
            examples, kept = examples + there, kept + known
        shares = {name: overlap.shares() for name, overlap in overlaps.items()}
        return {"examples": examples, "kept": kept, "rows": dict(rows), **{k: v for k, v in shares.items() if v}}

    def _compare(
        self, number: int, forward: Forward, overlaps: Mapping[str, Overlap], counted: dict[str, int]
    ) -> tuple[int, int]:
        """Add a batch to the overlaps and the rows. Returns how many examples it has, and how many of them are kept."""
        sites = self.regularizer.attached_sites
        found = self.regularizer.kept.find(forward, self.setting, Statistics())
        probes: dict[str, dict[Where, Probed]] = {}
        for wanted, draw, bfloat16 in _PROBES:
            objectives = {name: self.objectives[objective] for name, objective in wanted.items()}
            probes |= probe(forward, sites, objectives, self.setting, _SEED + 2 * number + draw, bfloat16)
        kept, older = {}, self._older.get(number, {})
        for where, one in probes["loss"].items():
            if not all(where in probed for probed in probes.values()):
                continue  # LayerDrop left the site out
            site = sites[where[0]]
            kept[where] = found.region(site, where, tuple(one.region.shape), forward.device)
            regions = {name: probed[where].region for name, probed in probes.items()} | {"kept": kept[where]}
            regions |= {"older": older[where]} if where in older else {}
            rows = one.varied & probes["prediction"][where].varied & (one.count < one.keys)
            rows = rows & _real_queries(found.examples, site, one.region)
            counted[site.name] += int(rows.sum())
            overlaps["chance"].add_chance(site.name, one, rows)
            for name, (_, first, second) in MEASURES.items():
                if first in regions:  # where nothing is kept of an example, its rows have no candidates
                    overlaps[name].add(site.name, regions[first], regions[second], rows & regions[first].any(-1))
        self._older[number] = kept
        return len(found.kept), len(found.kept) - len(found.missing)


def _real_queries(examples: Examples, site: AttentionSite, region: Tensor) -> Tensor:
    """Which rows (N, 1, T) of a site's region (N, H, T, S) are no padding."""
    real = examples.real.get(stacks_of(site)[0])
    if real is None or real.size(1) != region.size(2):
        real = torch.ones(region.size(0), region.size(2), dtype=torch.bool)
    return real.to(region.device)[:, None]


def mean_share(measured: Mapping[str, Any], name: str) -> float | None:
    """A share over all sites, each weighted by its rows; None where it is missing.

    Args:
        measured: what `Agreement.measure` gave.
        name: `chance`, or one of `MEASURES`.
    """
    shares = measured.get(name, {})
    rows = sum(measured["rows"][site] for site in shares)
    return sum(share * measured["rows"][site] for site, share in shares.items()) / rows if rows else None
