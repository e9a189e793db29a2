"""What a method says of itself in the log of a trainer that takes numbers by name."""

from __future__ import annotations

import torch

from attn_reg_plugin.regularizers.base import Regularizer
from attn_reg_plugin.regularizers.distributed import average
from attn_reg_plugin.regularizers.statistics import summary


def quantities(regularizer: Regularizer, device: torch.device) -> dict[str, float]:
    """What happened since the last call, over all data-parallel ranks; each has to call.

    Returns:
        `regularized`, the share of forwards that were; what the method logs of updates and of rounds; and
        `drop_SITE`, the share of valid positions dropped, in [0, 1]. What did not happen is left out.
    """
    logged = [*regularizer.quantities, *regularizer.by_round]
    keys = list(dict.fromkeys(["forwards", *(key for quantity in logged for key in quantity.keys)]))
    taken = regularizer.statistics.take()
    dtype = torch.float32 if device.type == "mps" else torch.float64  # which that device does not have
    values = torch.stack([torch.as_tensor(taken.get(key, 0.0)).to(device, dtype) for key in keys])
    sums = dict(zip(keys, average(values).tolist(), strict=True))
    if not sums["forwards"]:
        return {}
    return {title: shown.value for title, shown in summary(logged, sums).items()}
