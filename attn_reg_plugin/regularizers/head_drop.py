"""DropHead: whole attention heads are dropped (Zhou, Ge, Xu, Wei & Zhou 2020, "Scheduled DropHead", arXiv 2004.13342).

For every example and attention each head is dropped with probability p; the outputs of the others are multiplied by
the number of heads divided by that of those left, before the output projection. A draw that drops all heads would leave
nothing to rescale: then one, any of them alike, is kept. The paper's schedule has the shape of a V: p falls linearly to
0 in the early part of training, when a few heads come to dominate, and rises again until the end, against overfitting.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from attn_reg_plugin.attention.masks import dropped_fraction
from attn_reg_plugin.regularizers.base import Preset, option, register
from attn_reg_plugin.regularizers.base.drawn import Drawn
from attn_reg_plugin.regularizers.base.hooks.forward import Forward
from attn_reg_plugin.regularizers.base.schedule import STARTS, UNITS, Curve, Timed


@register("head_drop")
@dataclass(eq=False)
class HeadDrop(Timed):
    """Drop whole attention heads of each example, each with probability p, and rescale the others; never all heads.

    p = 0 is plain training, bit for bit, 1 leaves one head. With `turn` and `end`, counted in `unit` as `Timed` says, p
    is a V over training: p at its start, 0 at `turn`, p again from `end` on.

    Raises:
        ValueError: p is out of its range, or `turn` is not between the start and `end`, or `end` is after the training.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("head_drop", "DropHead 0.2", {"sites": "encoder.self", "p": 0.2}),
        Preset(
            "head_drop_v",
            "DropHead 0.2, V-shaped",
            # where it turns is chosen here
            {"sites": "encoder.self", "p": 0.2, "unit": "progress", "turn": 0.3, "end": 1.0},
        ),
    )

    draws_last: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"factor"})

    p: float = option(0.2, "probability of dropping a head, in [0, 1]", within="[0, 1]")
    turn: float = option(0, "V-shaped schedule: when p has fallen to 0; 0: p throughout", within="[0, inf)")
    end: float = option(0, "V-shaped schedule: when p has risen again; 0: p throughout", within="[0, inf)")
    unit: str = option("update", "what turn and end count; progress: the share of the training", choices=UNITS)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        start = STARTS[self.unit]
        points = ((start, self.p),)
        if self.turn or self.end:
            if not start < self.turn < self.end:
                raise ValueError(
                    f"turn is {self.turn:g} and end is {self.end:g}, but a V-shaped schedule that counts {self.unit} "
                    f"needs {start} < turn < end; with both 0, p stays as it is"
                )
            if self.unit == "progress" and self.end > 1:
                raise ValueError(f"end is {self.end:g}, but progress ends at 1, with the training")
            points = ((start, self.p), (self.turn, 0.0), (self.end, self.p))
        self.curve = Curve(points)

    def drop_probability(self) -> float:
        """p at the present place in the training; errors as in `position`."""
        return self.curve(self.position()) if self.turn else self.p

    def begin_training(self, updates: int | None, epochs: int | None = None) -> None:
        """Announce the number of updates, which only a V needs."""
        if self.turn:
            super().begin_training(updates, epochs)

    def due(self) -> bool:
        """Regularized when anything can be dropped at all."""
        return self.drop_probability() > 0

    def before_forward(self, forward: Forward) -> None:
        """Leave on each site how its heads are drawn."""
        draw = partial(heads_kept, self.drop_probability())
        factor = Drawn(self, draw, lambda keep, _, n: (rescaled(keep).chunk(n), *dropped_fraction(keep, None, n)))
        for site in self.attached_sites:
            site.ask(factor=factor)


def heads_kept(p: float, shape: tuple[int, ...], valid: Tensor | None, generator: torch.Generator) -> Tensor:
    """Draw the heads that stay, bool (B, H, 1, 1), at least one of each example."""
    draws = torch.rand((*shape[:2], 1, 1), generator=generator, device=generator.device)
    return (draws >= p) | (draws == draws.amax(1, keepdim=True))


def rescaled(keep: Tensor) -> Tensor:
    """Return the factor of the heads' outputs: H / (number kept) or 0, fp32 (B, H, 1, 1)."""
    return keep.float() * (keep.size(1) / keep.sum(1, keepdim=True))
