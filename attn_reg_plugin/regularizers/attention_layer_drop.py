"""Attention LayerDrop, a by-product of AttendOut (Wu, Zhao & Zhang 2021, arXiv 2104.04692).

A generator that drops every position of a layer leaves the uniform row of equation 4: the mean of the values. Here
each layer is dropped so with probability p, and since a uniform row needs neither queries nor keys, a dropped layer
computes neither; under transformers they are computed before, and only their backward is saved. The layer itself
stays, and with it its residual path, its values and its output projection.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from attn_reg_plugin.attention.calls import drops
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base import Preset, Regularizer, option, register
from attn_reg_plugin.regularizers.base.hooks.forward import Forward


@register("attention_layer_drop")
@dataclass(eq=False)
class AttentionLayerDrop(Regularizer):
    """Replace whole attentions by the mean of their values, each with probability p, drawn anew at every call.

    The logged drop rate of a site is the share of its calls in which it was dropped. A dropped attention gives its
    query and key projections no gradient: under PyTorch's own data parallel, ask it to find unused parameters
    (fairseq: `--find-unused-parameters` with `--ddp-backend pytorch_ddp`; `legacy_ddp` needs nothing).
    p = 0.2 is the paper's, 0 is plain training, bit for bit.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("attention_layer_drop", "attention LayerDrop 0.2", {"sites": "encoder.self", "p": 0.2}),
    )

    draws_last: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"map"})

    p: float = option(
        0.2, "probability of replacing an attention by the mean of its values, in [0, 1]", within="[0, 1]"
    )

    def leaves_unused(self) -> bool:
        """A dropped attention gives its queries and keys no gradient."""
        return self.p > 0

    def before_forward(self, forward: Forward) -> None:
        """Draw a seed for each site; its calls draw from it, recomputed ones stay as they were."""
        sites = self.attached_sites
        for site, seed in zip(sites, torch.randint(2**62, (len(sites),)).tolist(), strict=True):
            site.ask(uniform=partial(self._draw, site, seed))

    def _draw(self, site: AttentionSite, seed: int, call: int) -> bool:
        dropped = drops(self.p, seed, call)
        self.count_share([site], float(dropped))
        return dropped
