"""A method's state in a checkpoint of `torch.distributed.checkpoint` (DCP), beside the shards of the model."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attn_reg_plugin.regularizers.distributed import rank

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base import Regularizer


class ShardedState:
    """What `torch.distributed.checkpoint.save` and `load` take for a regularizer:

        state = {"model": ..., "optimizer": ..., "regularizer": ShardedState(regularizer)}

    It is one entry of bytes: DCP loads only what is there before loading, and what a method keeps grows as it trains.
    Of a method with a large state (AD-DROP with kept regions) each rank has an entry of its own, so at least as many
    ranks have to save as load.

    Args:
        regularizer: attached, where its state is one of a model and its sites.
    """

    def __init__(self, regularizer: Regularizer) -> None:
        self.regularizer = regularizer

    @property
    def _key(self) -> str:
        return f"rank_{rank()}" if self.regularizer.large_state else "all_ranks"

    def state_dict(self) -> dict[str, Any]:
        """The regularizer's state, as bytes of `torch.save`."""
        written = io.BytesIO()
        torch.save(self.regularizer.state_dict(), written)
        return {self._key: written.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from it; nothing but tensors and plain containers is made of the bytes.

        Raises:
            TypeError, ValueError: as `Regularizer.resume`.
        """
        loaded = torch.load(io.BytesIO(state[self._key]), map_location="cpu", weights_only=True)
        self.regularizer.resume(loaded)
