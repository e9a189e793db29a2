"""AttendOut's policy gradient (Wu, Zhao & Zhang, arXiv 2104.04692, equation 5): what the generator learns from masks.

    (1/m) Σ over the batches and their examples of (1/(n l²)) Σ log P(d) · (r_t - b)

The generator's weights stay as they are for a whole round, so the gradient of a batch's term can be taken from the very
pass that its masks are drawn from, and multiplied by r_t - b once that is known. The gradient of an embedding table is
kept as that of the rows that were looked up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.attention.masks import pack_bits, unpack_bits
from attn_reg_plugin.regularizers.attend_out.generator import (
    Generator,
    Tokens,
    log_probability,
    sample_masks,
    valid_pairs,
)
from attn_reg_plugin.regularizers.base.distributed import rank


@dataclass
class PolicyGradient:
    """The gradient of a batch's objective, before it is multiplied by r_t - b.

    Attributes:
        weights: of the attentions' parameters, in their order; None where there is none.
        rows: of the rows looked up in the generator's own tables, by `Generator.rows`' names.
    """

    weights: list[Tensor | None]
    rows: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(one.nbytes for one in (*self.weights, *self.rows.values()) if one is not None)

    @staticmethod
    def bytes_of(generator: Generator, tokens: Mapping[str, Tokens]) -> int:
        """Return the memory that a gradient takes at most."""
        return sum(parameter.nbytes for parameter in generator.attention.parameters()) + sum(
            tokens[stack].ids.numel() * table.size(1) * 4
            for tables in (generator.tokens, generator.positions)
            for stack, table in tables.items()
        )

    def descend(self, generator: Generator, tokens: Mapping[str, Tokens], factor: Tensor) -> None:
        """Add `factor` (a scalar) times this to the gradients of the generator.

        Args:
            tokens: those of the batch.
        """
        for parameter, gradient in zip(generator.attention.parameters(), self.weights, strict=True):
            if gradient is None:
                continue
            scaled = gradient * factor
            parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)
        if self.rows:
            with torch.enable_grad():
                rows = generator.rows(tokens)
            torch.autograd.backward([rows[name] for name in self.rows], [one * factor for one in self.rows.values()])


@dataclass
class CachedBatch:
    """One forward of the attacker: its tokens, and the packed masks that were drawn for it.

    Attributes:
        update: which update of the round it belonged to, from 0.
        tokens: by stack.
        masks: packed bits by site, with the shapes to unpack them to.
        gradient: of its objective, where it was kept; no state has it.
    """

    update: int
    tokens: dict[str, Tokens]
    masks: dict[str, tuple[Tensor, tuple[int, ...]]]
    gradient: PolicyGradient | None = None

    @classmethod
    def of(
        cls,
        update: int,
        tokens: Mapping[str, Tokens],
        masks: Mapping[str, Tensor],
        gradient: PolicyGradient | None = None,
    ) -> CachedBatch:
        """Pack what the round's end needs."""
        packed = {name: (pack_bits(mask.reshape(-1)), tuple(mask.shape)) for name, mask in masks.items()}
        return cls(update, dict(tokens), packed, gradient)

    def mask(self, site: str) -> Tensor:
        """The keep mask of a site, bool (B, T, S)."""
        packed, shape = self.masks[site]
        return unpack_bits(packed, math.prod(shape)).view(shape)

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, on the CPU; `rank` is the process that keeps the batch."""
        return {
            "rank": rank(),
            "update": self.update,
            "tokens": {k: tuple(tensor.cpu() for tensor in v) for k, v in self.tokens.items()},
            "masks": {k: (packed.cpu(), shape) for k, (packed, shape) in self.masks.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device) -> CachedBatch:
        """The batch that `state_dict` described, on `device`."""
        tokens = {k: Tokens(*(tensor.to(device) for tensor in v)) for k, v in state["tokens"].items()}
        masks = {k: (packed.to(device), tuple(shape)) for k, (packed, shape) in state["masks"].items()}
        return cls(state["update"], tokens, masks)


def drawn_with_gradient(
    generator: Generator, tokens: Mapping[str, Tokens], temperature: float
) -> tuple[dict[str, Tensor], PolicyGradient]:
    """Keep masks of a batch, as `sample_masks` draws them, and the gradient of their objective, in one pass."""
    logits, rows = _pass(generator, tokens)
    masks = sample_masks({name: logit.detach() for name, logit in logits.items()}, temperature)
    return masks, _gradient(generator, tokens, logits, masks, rows, temperature)


def policy_gradient(generator: Generator, batch: CachedBatch, temperature: float) -> PolicyGradient:
    """The gradient of a cached batch's objective, in a pass of its own."""
    logits, rows = _pass(generator, batch.tokens)
    masks = {name: batch.mask(name) for name in batch.masks}
    return _gradient(generator, batch.tokens, logits, masks, rows, temperature)


def _pass(generator: Generator, tokens: Mapping[str, Tokens]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The logits, and the rows of the tables that they come from, as leaves of their graph."""
    with torch.enable_grad():
        rows = {name: one.detach().requires_grad_(one.requires_grad) for name, one in generator.rows(tokens).items()}
        return generator(tokens, rows), rows


def _gradient(
    generator: Generator,
    tokens: Mapping[str, Tokens],
    logits: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    temperature: float,
) -> PolicyGradient:
    weights, learnt = list(generator.attention.parameters()), {k: v for k, v in rows.items() if v.requires_grad}
    with torch.enable_grad(), torch.autocast(next(iter(masks.values())).device.type, enabled=False):
        objective = policy_objective(generator, tokens, logits, masks, temperature)
        found = torch.autograd.grad(objective, [*weights, *learnt.values()], allow_unused=True)
    of_rows = dict(zip(learnt, found[len(weights) :], strict=True))
    return PolicyGradient(list(found[: len(weights)]), {k: v for k, v in of_rows.items() if v is not None})


def policy_objective(
    generator: Generator,
    tokens: Mapping[str, Tokens],
    logits: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    temperature: float = 1.0,
) -> Tensor:
    """Equation 5 for one batch, without r_t - b: Σ over its examples of (1/(n l²)) Σ log P(d), a scalar.

    n l² counts the positions of an example's masks over all layers; only valid ones exist.

    Args:
        tokens: by stack.
        logits: `generator(tokens)`, (B, T, S) by site.
        masks: keep masks drawn from them, bool (B, T, S) by site.
    """
    total, count = 0.0, 0.0
    for name, stack, kind, _ in generator.sites:
        pairs = valid_pairs(stack, kind, tokens)
        log_p = log_probability(logits[name], masks[name], temperature)
        total = total + (log_p * pairs).sum((1, 2))
        count = count + pairs.sum((1, 2))
    return (total / count.clamp(min=1)).sum()
