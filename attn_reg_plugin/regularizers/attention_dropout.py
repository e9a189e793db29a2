"""Attention dropout as it always was, for comparison: of the weights, or of the scores.

Of the weights (Vaswani et al. 2017; Srivastava et al. 2014): softmax(QKᵀ) is multiplied by a mask of Bernoulli(1 - p)
and divided by 1 - p, so that rows keep their sum on average. Of the scores (Wu, Zhao & Zhang 2021, arXiv 2104.04692,
equation 3): the mask is drawn in the same way, but -∞ is added to a dropped score before the softmax, so that every row
sums to one and nothing is rescaled.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from attn_reg_plugin.regularizers.base import Preset, Regularizer, option, register
from attn_reg_plugin.regularizers.base.drawn import kept_at_random
from attn_reg_plugin.regularizers.base.hooks.forward import Forward


@register("attention_dropout")
@dataclass(eq=False)
class AttentionDropout(Regularizer):
    """Drop attention weights, rescaled, or attention scores at random, each with probability p.

    It comes on top of the model's own attention dropout, independently of it: of both together, 1 - (1 - own)(1 - p) of
    the weights are dropped. For p alone, set the model's own to 0 (fairseq: `--attention-dropout 0`). Kernels do not
    tell which weights they drop: the logged drop rate of weights is p itself, that of scores is counted.

    Attributes:
        p: 0 is plain training, bit for bit.
        where: `weights` drops after the softmax and rescales, `scores` before it; a row whose scores are all dropped is
            uniform over its valid keys.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("attention_dropout", "weights dropout 0.1", {"sites": "encoder.self", "where": "weights", "p": 0.1}),
        Preset("scores_dropout_0.1", "scores dropout 0.1", {"sites": "encoder.self", "where": "scores", "p": 0.1}),
        Preset("scores_dropout_0.2", "scores dropout 0.2", {"sites": "encoder.self", "where": "scores", "p": 0.2}),
    )

    draws_last: ClassVar[bool] = True

    p: float = option(0.1, "probability of dropping a position, in [0, 1]; below 1 for weights", within="[0, 1]")
    where: str = option(
        "weights", "drop weights after the softmax and rescale, or scores before it", choices=("weights", "scores")
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.where == "weights" and self.p == 1.0:
            raise ValueError("p is 1, but must be below 1 where weights are dropped: what is left is divided by 1 - p")

    @property
    def uses(self) -> frozenset[str]:
        """Scores are dropped by a mask."""
        return frozenset({"mask" if self.where == "scores" else "weights"})

    def before_forward(self, forward: Forward) -> None:
        """Tell each site its p, or how its mask is drawn."""
        asked: dict[str, Any] = {"weights_dropout": self.p}
        if self.where == "scores":
            asked = {"sampler": self.sampler(partial(kept_at_random, self.p))}
        for site in self.attached_sites:
            site.ask(**asked)

    def after_forward(self, outputs: Any) -> None:
        """Count p of weights, for each call that came."""
        for site in self.attached_sites if self.where == "weights" else ():
            calls = len(site.calls.made)
            if calls and site.request.weights_dropout > 0:
                self.count_share([site], self.p * calls, calls)
