"""Attention dropout as it always was, for comparison: of the weights, or of the scores.

Of the weights (Vaswani et al. 2017; Srivastava et al. 2014): softmax(QKᵀ) is multiplied by a mask of Bernoulli(1 - p)
and divided by 1 - p, so that rows keep their sum on average. Of the scores (Wu, Zhao & Zhang 2021, arXiv 2104.04692,
equation 3): the mask is drawn in the same way, but -∞ is added to a dropped score before the softmax, so that every row
sums to one and nothing is rescaled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.masks import check_ratio
from attn_reg_plugin.attention.sites import AttentionSite, SiteSelector
from attn_reg_plugin.regularizers.base import Preset, Regularizer, option, register
from attn_reg_plugin.regularizers.base.attachment import Attachment
from attn_reg_plugin.regularizers.base.forward import Forward
from attn_reg_plugin.regularizers.base.options import OptionError

EXAMPLE = "encoder.self[0]: 0.2; decoder.cross: 0"


@register("attention_dropout")
@dataclass(eq=False)
class AttentionDropout(Regularizer):
    """Drop attention weights, rescaled, or attention scores at random, each with probability p.

    It comes on top of the model's own attention dropout, independently of it: of both together, 1 - (1 - own)(1 - p) of
    the weights are dropped. For p alone, set the model's own to 0 (fairseq: `--attention-dropout 0`). Kernels do not
    tell which weights they drop: the logged drop rate of weights is p itself, that of scores is counted.

    Attributes:
        p: probability of dropping a position, in [0, 1]; 0 is plain training, bit for bit. Below 1 for weights.
        where: `weights` drops after the softmax and rescales, `scores` before it; a row whose scores are all dropped is
            uniform over its valid keys.
        p_by_site: probabilities of some sites, such as `encoder.self[0]: 0.2; decoder.cross: 0`; later entries override
            earlier ones, the other sites have `p`.

    Raises:
        ValueError: a probability is out of its range, or `p_by_site` is malformed.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("attention_dropout", "weights dropout 0.1", {"sites": "encoder.self", "where": "weights", "p": 0.1}),
        Preset("scores_dropout_0.1", "scores dropout 0.1", {"sites": "encoder.self", "where": "scores", "p": 0.1}),
        Preset("scores_dropout_0.2", "scores dropout 0.2", {"sites": "encoder.self", "where": "scores", "p": 0.2}),
    )

    acts: ClassVar[int] = 3

    p: float = option(0.1, "probability of dropping a position, in [0, 1]; below 1 for weights", within="[0, 1]")
    where: str = option(
        "weights", "drop weights after the softmax and rescale, or scores before it", choices=("weights", "scores")
    )
    p_by_site: str = option("", f"probabilities of some sites, e.g. '{EXAMPLE}'; the others have p")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.entries = [_entry(text.strip()) for text in self.p_by_site.split(";") if text.strip()]
        if self.where == "weights" and 1.0 in (self.p, *(p for _, p in self.entries)):
            raise ValueError("p is 1, but must be below 1 where weights are dropped: what is left is divided by 1 - p")
        self.probabilities: dict[str, float] = {}

    @property
    def uses(self) -> frozenset[str]:
        """Scores are dropped by a mask."""
        return frozenset({"mask" if self.where == "scores" else "weights"})

    def attach(self, model: nn.Module) -> Attachment:
        """As `Regularizer.attach`.

        Raises:
            OptionError: an entry of `p_by_site` fits none of the regularized sites.
        """
        attachment = super().attach(model)
        try:
            self.probabilities = self._assigned(attachment.sites)
        except ValueError as error:
            self.detach()
            raise OptionError("p_by_site", str(error)) from None
        return attachment

    def _assigned(self, sites: Iterable[AttentionSite]) -> dict[str, float]:
        """p of every site, by its name."""
        sites = list(sites)
        found = {site.name: self.p for site in sites}
        for selector, p in self.entries:
            found.update({site.name: p for site in selector.select(sites)})
        return found

    def due(self) -> bool:
        """Regularized when any site has something to drop."""
        return any(p > 0 for p in self.probabilities.values())

    def before_forward(self, forward: Forward) -> None:
        """Tell each site its p, or leave on it how its mask is drawn."""
        for site in self.attached_sites:
            p = self.probabilities[site.name]
            if p == 0:
                continue
            if self.where == "scores":
                site.ask(sampler=self.sampler(site, partial(_bernoulli, p)))
                continue
            site.ask(weights_dropout=p)

    def after_forward(self, outputs: Any) -> None:
        """Count p of weights, for each call that came."""
        for site in self.attached_sites if self.where == "weights" else ():
            p, calls = site.request.weights_dropout, len(site.calls.made)
            if calls and p > 0:
                self.count_share(site, p * calls, calls)


def _entry(text: str) -> tuple[SiteSelector, float]:
    """Parse `pattern: probability`.

    Raises:
        ValueError: it is not of this form, or the probability is out of its range.
    """
    pattern, _, number = text.rpartition(":")
    try:
        p = float(number)
    except ValueError:
        p = None
    if p is None or not pattern.strip():
        raise ValueError(f"p_by_site entry {text!r} is not understood; write for example {EXAMPLE!r}")
    return SiteSelector(pattern.strip()), check_ratio(f"p_by_site entry {text!r}: p", p)


def _bernoulli(p: float, shape: tuple[int, ...], valid: Tensor | None, generator: torch.Generator) -> Tensor:
    """A keep mask (B, H, T, S)."""
    keep = torch.empty(shape, dtype=torch.bool, device=generator.device).bernoulli_(1.0 - p, generator=generator)
    return keep if valid is None else keep & valid
