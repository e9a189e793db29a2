"""Random masks of weights that hold for an update: the same in all its batches and on all data-parallel ranks."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from attn_reg_plugin.regularizers.distributed import object_from_first_rank


def drawn_seed() -> int:
    """The seed of a training's masks, from PyTorch's random numbers; rank 0's on every rank."""
    return object_from_first_rank(int(torch.randint(2**62, ())))


def update_mask(weight: Tensor, p: float, seed: int, update: int, number: int) -> Tensor:
    """A bool mask of the shape and on the device of a weight, True with probability p.

    It is determined by `seed`, `update` and the `number` of the weight, and has nothing in common with that of another
    weight or update.
    """
    digest = hashlib.blake2b(f"{seed} {update} {number}".encode(), digest_size=8).digest()
    generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "big") >> 2)
    return torch.rand(weight.shape, generator=generator, device=weight.device) < p
