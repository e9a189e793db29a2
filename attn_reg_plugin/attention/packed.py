"""A keep mask between its drawing and its use: as bits, so that long sequences do not hold a map for every site."""

from __future__ import annotations

from torch import Tensor

from attn_reg_plugin.attention.masks import pack_bits, unpack_bits


class PackedMask:
    """A mask as packed bits, an eighth of its size.

    Args:
        mask: bool (..., S).

    Attributes:
        shape: of the mask.
    """

    def __init__(self, mask: Tensor) -> None:
        self.bits, self.shape = pack_bits(mask), mask.shape

    def unpacked(self) -> Tensor:
        """The mask, a new tensor at every call."""
        return unpack_bits(self.bits, self.shape[-1])
