"""R-Drop: regularized dropout for neural networks (Liang et al., NeurIPS 2021).

Two passes of the same examples under different dropout, P1 and P2, and the loss (the paper's equation 4)

    −log P1(y|x) − log P2(y|x) + α · ½ [KL(P1 ‖ P2) + KL(P2 ‖ P1)].

As in the paper the two passes are one forward of the batch repeated twice.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attn_reg_plugin.regularizers.base import option, register
from attn_reg_plugin.regularizers.base.registry import Preset
from attn_reg_plugin.regularizers.base.repeated_batch import SeveralPasses
from attn_reg_plugin.regularizers.base.statistics import Quantity


@register("r_drop")
@dataclass(eq=False)
class RDrop(SeveralPasses):
    """Train on two passes with different dropout, and keep their predictions close.

    Where there is no distribution, in a regression, the divergence is the squared difference of both predictions. In a
    loop of one's own the loss is `regularizer.loss(...)`; fairseq and Trainer ask for it themselves. The model needs
    dropout, or both passes are the same. The weight is the paper's α, 5 for translation, and 0.1 to 1 for most
    classifications; 0 is plain training (one pass), bit for bit.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("r_drop", "R-Drop", {"weight": 1.0}),
        Preset("r_drop_5", "R-Drop 5", {"weight": 5.0}),
    )
    logged: ClassVar[tuple[Quantity, ...]] = (Quantity("r_drop_divergence", "r_drop_items", "r_drop"),)
    needs_sites: ClassVar[bool] = False

    weight: float = option(1.0, "weight of the divergence between both passes, at least 0", within="[0, inf)")

    def due(self) -> bool:
        """Always, unless its weight is 0."""
        return self.weight > 0

    def divergence(self, first: Tensor, second: Tensor) -> Tensor:
        """½ [KL(P1 ‖ P2) + KL(P2 ‖ P1)] of each item: Σ (P1 − P2)(log P1 − log P2) / 2, 0 or more up to round-off."""
        first, second = first.log_softmax(-1), second.log_softmax(-1)
        return ((first.exp() - second.exp()) * (first - second)).sum(-1) / 2
