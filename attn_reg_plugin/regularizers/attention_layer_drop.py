"""Attention LayerDrop, a by-product of AttendOut (Wu, Zhao & Zhang 2021, arXiv 2104.04692).

A generator that drops every position of a layer leaves the uniform row of equation 4: the mean of the values. Here
each layer is dropped so with probability p, and since a uniform row needs neither queries nor keys, a dropped layer
computes neither; under transformers they come computed, and their backward is saved. The layer itself stays, and with
it its residual path, its values and its output projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_reg_plugin.regularizers.base import Forward, Regularizer, option, register


@register("attention_layer_drop")
@dataclass(eq=False)
class AttentionLayerDrop(Regularizer):
    """Replace whole attentions by the mean of their values, each with probability p, drawn anew at every forward.

    The logged drop rate of a site is the share of forwards in which it was dropped. A dropped attention gives its
    query and key projections no gradient: under PyTorch's own data parallel, ask it to find unused parameters
    (fairseq: `--find-unused-parameters` with `--ddp-backend pytorch_ddp`; `legacy_ddp` needs nothing).

    Attributes:
        p: probability of dropping a site, in [0, 1]; 0.2 is the paper's, 0 is plain training, bit for bit.

    Raises:
        ValueError: p is out of its range.
    """

    p: float = option(
        0.2, "probability of replacing an attention by the mean of its values, in [0, 1]", within="[0, 1]"
    )

    def due(self) -> bool:
        """Regularized when anything can be dropped at all."""
        return self.p > 0

    def before_forward(self, forward: Forward) -> None:
        """Draw the sites to drop; recomputation finds them marked, so it drops the same."""
        sites = self.attached_sites
        for site, dropped in zip(sites, (torch.rand(len(sites)) < self.p).tolist(), strict=True):
            site.uniform = dropped
            self.statistics.add(f"dropped/{site.name}", float(dropped))
            self.statistics.add(f"valid/{site.name}", 1.0)
