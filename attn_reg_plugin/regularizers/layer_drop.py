"""LayerDrop: whole layers are left out in training (Fan, Grave & Joulin 2020, arXiv 1909.11556).

Each layer is left out with probability p, independently of the others, for the whole batch; its states pass by it on
the residual path. Nothing is rescaled, and in evaluation every layer runs. fairseq has it as `--encoder-layerdrop` and
`--decoder-layerdrop`; this is for models that do not have it, such as encoders of transformers and torch's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from attn_reg_plugin.attention.calls import derived
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base import Preset, Regularizer, option, register
from attn_reg_plugin.regularizers.layers import Layer, layers_of
from attn_reg_plugin.regularizers.probing import Forward


@register("layer_drop")
@dataclass(eq=False)
class LayerDrop(Regularizer):
    """Leave whole layers out, those that the sites stand in, each with probability p, drawn anew at every call.

    A layer is left out with all that is in it, whichever of its attentions was selected. The logged drop rate of a site
    is the share of calls in which its layer was left out. A layer that was left out has no gradient: under PyTorch's
    own data parallel, ask it to find unused parameters (fairseq: `--find-unused-parameters` with `--ddp-backend
    pytorch_ddp`; `legacy_ddp` needs nothing).

    Attributes:
        p: probability of leaving a layer out, in [0, 1]; 0.2 is the paper's, 0 is plain training, bit for bit.

    Raises:
        ValueError: p is out of its range.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("layer_drop", "LayerDrop 0.2", {"sites": "encoder.self", "p": 0.2}),
    )

    acts: ClassVar[int] = 3
    slots: ClassVar[frozenset[str]] = frozenset({"layer"})

    p: float = option(0.2, "probability of leaving a layer out, in [0, 1]", within="[0, 1]")

    def hooks(self, model: nn.Module, sites: list[AttentionSite]) -> list[Any]:
        """Stand in for the forwards of the sites' layers.

        Raises:
            ValueError: a site stands in no layer that could be left out.
        """
        installed: list[Layer] = []
        try:
            installed += (layer.install() for layer in layers_of(model, sites))
        except BaseException:
            for layer in installed:
                layer.remove()
            raise
        return installed

    def leaves_unused(self) -> bool:
        """A layer that was left out has no gradient."""
        return self.p > 0

    def due(self) -> bool:
        """Regularized when anything can be left out at all."""
        return self.p > 0

    def before_forward(self, forward: Forward) -> None:
        """Draw a seed for each layer; its calls draw from it, recomputed ones stay as they were."""
        sites = self.attached_sites
        for site, seed in zip(sites, torch.randint(2**62, (len(sites),)).tolist(), strict=True):
            site.plan = partial(self._left_out, seed)

    def _left_out(self, seed: int, sites: list[AttentionSite], call: int) -> bool:
        """Whether a layer is left out of its call number `call`, counted for the sites that it has then."""
        generator = torch.Generator().manual_seed(derived(seed, call))
        left_out = bool(torch.rand((), generator=generator) < self.p)
        for site in sites:
            self.count_share(site, float(left_out))
        return left_out
