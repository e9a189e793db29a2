"""AD-DROP without a probe: candidate regions from the backward of the last update that trained on an example.

The gradient of every attention's output passes through the training's own backward. Where it does, B = -∂L/∂O · Vᵀ is
one small product away; its candidate region is packed to bits and kept until the example comes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import map_gradient
from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.masks import candidate_region, pack_bits
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.distributed import object_from_first_rank, rank, wait_for_all, world_size
from attn_reg_plugin.regularizers.example_digests import Examples, examples_of
from attn_reg_plugin.regularizers.probing import Forward
from attn_reg_plugin.regularizers.region_files import VERSION, Setting
from attn_reg_plugin.regularizers.region_lookup import Found, Where, check_rows, in_order, stacks_of
from attn_reg_plugin.regularizers.region_store import RegionStore
from attn_reg_plugin.regularizers.statistics import Statistics

logger = logging.getLogger(__name__)


class _Watched(torch.autograd.Function):
    """The identity, whose backward tells of the gradient. V is saved as the kernel saves it: checkpointing drops and
    recomputes it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor, valid: Tensor | None, arrived: Callable[..., None]) -> Tensor:
        ctx.arrived = arrived
        ctx.save_for_backward(value, valid)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        with torch.no_grad():
            ctx.arrived(gradient, *ctx.saved_tensors)
        return gradient, None, None, None


@dataclass
class _Part:
    """The regions of one call: packed bits (N, H, T, ⌈S/8⌉), which of the N are finite, and S."""

    bits: Tensor
    finite: Tensor
    keys: int


@dataclass
class Recording:
    """What one forward's backward brings.

    Attributes:
        examples: of the forward.
        sites: by index.
        update: updates made before.
        setting: p and direction.
        parts: by site and call.
        ready: events of a device after which the parts are here.
        partial: whether a call's gradient came in parts, each of a backward of its own; their sum isn't known.
    """

    examples: Examples
    sites: list[AttentionSite]
    update: int
    setting: Setting
    parts: dict[Where, _Part] = field(default_factory=dict)
    ready: list[torch.cuda.Event] = field(default_factory=list)
    partial: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        """Of a copied model: itself. The copy's sites forget it at their next forward."""
        return self

    def watch(self, index: int, call: AttentionCall, output: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
        """See `AttentionSite.watch`."""
        if not torch.is_grad_enabled():
            return output
        check_rows(self.examples, call, output.size(0))
        if not output.requires_grad:  # nothing below it is trained
            output = output.detach().requires_grad_()
        return _Watched.apply(output, value, valid, partial(self._arrived, (index, call.index)))

    def _arrived(self, where: Where, gradient: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """∂L/∂O (N, H, T, D) of a call: rank B, and let the region go to the host."""
        self.partial = self.partial or where in self.parts
        attribution = -map_gradient(gradient, value)
        extremes = torch.stack([attribution.amax((1, 2, 3)), attribution.amin((1, 2, 3))])  # NaN if anything is
        finite = extremes.isfinite().all(0)
        region = candidate_region(attribution, valid, self.setting.p, self.setting.direction)
        packed = pack_bits(in_order(region, self.sites[where[0]], self.examples.order))
        self.parts[where] = _Part(self._to_host(packed), self._to_host(finite), region.size(-1))

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU that is being made; nothing waits for it."""
        if tensor.device.type != "cuda":
            return tensor.cpu()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        self.ready.append(torch.cuda.Event())
        self.ready[-1].record()
        return copy

    def keep_in(self, store: RegionStore, statistics: Statistics) -> None:
        """Put the finite examples into the store, without their padding; waits for what isn't here yet."""
        for event in self.ready:
            event.synchronize()
        parts = sorted(self.parts.items())
        if self.partial:
            statistics.add("kept_lost", float(len(self.examples)))
        if not parts or self.partial:
            return
        ends = {where: self._ends(where, part) for where, part in parts}
        finite = torch.stack([part.finite for _, part in parts]).all(0).tolist()
        statistics.add("kept_lost", float(len(finite) - sum(finite)))
        for i, digest in enumerate(self.examples.digests):
            if not finite[i]:
                continue
            shapes, pieces = [], []
            for where, part in parts:
                queries, keys = ends[where][0][i], ends[where][1][i]
                pieces.append(part.bits[i, :, :queries, : -(-keys // 8)].reshape(-1))
                shapes.append((*where, part.bits.size(1), queries, keys))
            bits = torch.cat(pieces)
            store.put(digest, self.update, self.setting, tuple(shapes), bits)
            statistics.add("kept_bytes", float(bits.numel()))
            statistics.add("kept_examples", 1.0)

    def _ends(self, where: Where, part: _Part) -> tuple[list[int], list[int]]:
        queries, keys = stacks_of(self.sites[where[0]])
        lengths = self.examples.lengths
        return lengths(queries, part.bits.size(2)).tolist(), lengths(keys, part.keys).tolist()


class KeptRegions:
    """The kept regions of one training: recorded in its backwards, looked up before its forwards.

    Args:
        store_gb: see `RegionStore`.
        folder: for files; by default the face's.
    """

    def __init__(self, store_gb: float, folder: Path | None) -> None:
        self.store_gb, self.folder, self.vocabulary = store_gb, folder, ""
        self.store: RegionStore | None = None
        self._unfinished: list[Recording] = []
        self._finished: list[Recording] = []
        self._epoch: int | None = None
        self._resumed: int | None = None
        self._expected = 0
        self._saved: int | None = None
        self._told = self._told_partial = self._told_unfinished = False
        self._misfits: set[str] = set()
        self._awaiting: Mapping[str, Any] | None = None  # what was loaded, until there is a store

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has a store of its own, which is empty."""
        return KeptRegions, (self.store_gb, self.folder)

    def ready(self, sites: list[AttentionSite], model: torch.nn.Module, epoch: int | None) -> RegionStore:
        """The store, with what other ranks kept in earlier epochs; every rank comes here together.

        Raises:
            ValueError: it is of another model, tokenizer or version.
        """
        self.open(sites, model)
        begun, first = epoch or 1, self._epoch is None
        if first:
            self.store.open(self.folder, rank(), world_size(), self._resumed)
            if self._resumed is not None:  # the last checkpoint is the one that training goes on from
                self._saved = begun
        if self._epoch != begun:
            self._drop_unfinished()
            self.collect(None)
            wait_for_all()
            self.store.begin_epoch(begun, object_from_first_rank(self._saved))
            self._epoch = begun
        if first and rank() == 0 and len(self.store) < self._expected:
            logger.warning(
                f"ad_drop: {self._expected - len(self.store)} of {self._expected} examples' kept regions aren't in "
                f"{self.folder or 'memory'} any more; they count as missing until these examples are trained on again"
            )
        return self.store

    def open(self, sites: list[AttentionSite], model: torch.nn.Module) -> None:
        """Have a store, with what was loaded; nothing happens if there is one.

        Raises:
            ValueError: what was loaded is of another model, tokenizer or version, or damaged; it is left out then.
        """
        if self.store is not None:
            return
        store, loaded = RegionStore(self.store_gb, self.fingerprint(sites, model)), self._awaiting
        if loaded is not None:
            try:
                store.load(loaded)
            except ValueError:
                self.close()
                raise
            self._expected = loaded.get("examples", 0)
        self.store, self._awaiting = store, None

    def fingerprint(self, sites: list[AttentionSite], model: torch.nn.Module) -> dict[str, Any]:
        """What the regions are of, in the words of refusals."""
        return {
            "version": VERSION,
            "model": f"{type(model).__name__} of {sum(one.numel() for one in model.parameters())} parameters",
            "tokenizer": self.vocabulary,
            "choice of sites": ", ".join(site.name for site in sites),
        }

    def find(self, forward: Forward, setting: Setting, statistics: Statistics) -> Found:
        """What is kept of a forward's examples."""
        examples = examples_of(forward)
        self.collect(statistics)
        kept = [self.store.get(digest) for digest in examples.digests]
        other = next((one.setting for one in kept if one is not None and one.setting != setting), None)
        if other is not None:
            kept = [None if one is None or one.setting != setting else one for one in kept]
            if not self._told:
                self._told = True
                logger.warning(
                    f"ad_drop: what is kept was made with p = {other.p} and the {other.direction} attributions, so it "
                    f"doesn't serve p = {setting.p} and the {setting.direction} ones; it counts as missing"
                )
        if forward.supplied.counts:
            statistics.add("kept_hits", float(sum(one is not None for one in kept)))
            statistics.add("kept_asked", float(len(kept)))
        return Found(examples, kept, misfits=self._misfits)

    def record(self, forward: Forward, sites: list[AttentionSite], update: int, setting: Setting) -> None:
        """Watch a forward: its backward brings the regions of its examples."""
        recording = Recording(examples_of(forward), sites, update, setting)
        self._unfinished.append(recording)
        for index, site in enumerate(sites):
            site.watch = partial(recording.watch, index)

    def finish(self, statistics: Statistics) -> None:
        """The update was made: what its backwards brought is kept, as soon as it is here."""
        if not self._told_partial and any(recording.partial for recording in self._unfinished):
            self._told_partial = True
            logger.warning(
                "ad_drop: a forward's attentions got several gradients, from backwards one after the other or from "
                "checkpointing that runs one forward for another, so its examples are not kept; call backward once "
                "with the sum of the losses"
            )
        self._finished += self._unfinished
        self._unfinished = []
        while self._finished and all(event.query() for event in self._finished[0].ready):
            self._finished.pop(0).keep_in(self.store, statistics)

    def _drop_unfinished(self) -> None:
        """At the end of an epoch, what no update followed: a loop that announces none would pile it up."""
        if self._unfinished and not len(self.store) and not self._finished and not self._told_unfinished:
            self._told_unfinished = True
            logger.warning(
                "ad_drop: nothing is kept, since no update was announced: call regularizer.end_update() after each"
            )
            self._unfinished = []

    def collect(self, statistics: Statistics | None) -> None:
        """Keep what is on its way as well."""
        while self._finished:
            self._finished.pop(0).keep_in(self.store, Statistics() if statistics is None else statistics)

    def forget_unfinished(self) -> None:
        """The optimizer's step was skipped."""
        self._unfinished = []

    def state(self, epoch: int | None) -> Mapping[str, Any] | None:
        """For a checkpoint made now."""
        if self.store is None:
            return self._awaiting
        self.collect(None)
        self._saved = epoch or 1
        return self.store.state()

    def load(self, state: Mapping[str, Any] | None, updates: int) -> None:
        """Go on from a checkpoint made after `updates` updates; `open` takes it in. With None nothing was kept then."""
        self.close()
        if state is not None:
            self._awaiting, self._resumed = state, updates

    def close(self) -> None:
        """Release files and what is on its way."""
        if self.store is not None:
            self.store.close()
        self.store = self._epoch = self._resumed = self._saved = self._awaiting = None
        self._unfinished, self._finished = [], []
        self._expected = 0
