"""What a method says of itself in Trainer's log."""

from __future__ import annotations

import torch

from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.game import average


def quantities(regularizer: Regularizer, device: torch.device) -> dict[str, float]:
    """What happened since the last call, over all data-parallel processes; each has to call.

    Returns:
        `regularized`, the share of forwards that were; `drop_SITE`, the share of valid positions dropped, in [0, 1];
        `probe_share` of the training step's time and `probe_fallbacks` to plain updates; and the means over rounds of
        what a method with rounds counts. What did not happen is left out.
    """
    sites = [site.name for site in regularizer.attached_sites]
    keys, taken = [*regularizer.counted, "rounds", *regularizer.by_round], regularizer.statistics.take()
    dtype = torch.float32 if device.type == "mps" else torch.float64  # which that device does not have
    values = torch.stack([torch.as_tensor(taken.get(key, 0.0)).to(device, dtype) for key in keys])
    sums = dict(zip(keys, average(values).tolist(), strict=True))
    if not sums["forwards"]:
        return {}
    told = {"regularized": sums["regularized"] / sums["forwards"]}
    for key in regularizer.logged:
        if key == "probe_seconds":
            told["probe_share"] = sums[key] / max(sums["step_seconds"], 1e-9)
        elif key == "fallbacks":
            told["probe_fallbacks"] = sums[key]
    if sums["rounds"]:
        told |= {key: sums[key] / sums["rounds"] for key in regularizer.by_round}
    for site in sites:
        if sums[f"valid/{site}"] > 0:
            told[f"drop_{site}"] = sums[f"dropped/{site}"] / sums[f"valid/{site}"]
    return told
