"""Compatibility of a method with others on one model, and with the forms of a model that it cannot act in.

A method names in `Regularizer.uses` the parts of a request that it fills. Methods whose parts differ act on one
attention together: AD-DROP's mask, DropHead's factor of the heads, LayerDrop's layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

if TYPE_CHECKING:
    from attn_reg_plugin.attention.sites import AttentionSite
    from attn_reg_plugin.regularizers.base import Regularizer

#: each part of a request that a method may use, and the clash of two methods that both do
PARTS = {
    "mask": "both choose which positions are attended",  # keep, masks, sampler, once
    "map": "both need the attention map, to read it or to put another in its place",  # look, uniform
    "weights": "both add dropout of the attention weights",  # weights_dropout
    "factor": "both multiply the output of the attention",  # factor
    "layer": "both leave layers out",  # layer
    "gradient": "both read the gradients of the attention",  # recording
}
_REPLICAS = (
    "{method} cannot act in the replicas of nn.DataParallel, whose threads would use each other's masks; use "
    "torch.nn.parallel.DistributedDataParallel with a process for each device, or one device"
)


def clash(first: Regularizer, second: Regularizer) -> str:
    """Return the reason why both cannot act on one attention; empty if they can."""
    names = f"{first.name} and {second.name}"
    untold = next((method.name for method in (first, second) if method.uses is None), None)
    if untold is not None:
        return f"{names} would act on the same attention, of which {untold} doesn't say in `uses` what it fills"
    shared = sorted(first.uses & second.uses)
    return f"{names} {PARTS.get(shared[0], f'both use the {shared[0]!r} of a site')}" if shared else ""


def check_beside(method: Regularizer, others: Iterable[Regularizer]) -> None:
    """Refuse, by a ValueError, what the others of a model, attached by themselves, make impossible at any site."""
    for other in (other for other in others if not any(other is one for one in method.companions)):
        if other.name == method.name and not method.needs_sites:
            raise ValueError(f"{method.name} acts on the model already; detach() the other one first")
        if method.passes > 1 and other.passes > 1:
            raise ValueError(
                f"{other.name} and {method.name} each run the batch several times and compare the passes; detach() one"
            )


def check_free(method: Regularizer, site: AttentionSite) -> None:
    """Refuse, by a ValueError, a site of another method, unless both are of one combination and fill other parts."""
    if not site.attached:
        return
    beside = [other for other in method.companions if other is not method and site in other.attached_sites]
    if not beside:
        raise ValueError(f"{site.name} is regularized already; detach that regularizer first")
    reason = next(filter(None, (clash(other, method) for other in beside)), "")
    if reason:
        raise ValueError(f"{reason}, at {site.name}; give them sites of their own")


def refuse_several_devices(regularizer: Regularizer, model: nn.Module) -> None:
    """Refuse `nn.DataParallel` over several devices: its replicas run in threads that share the sites of one model."""
    if any(isinstance(part, DataParallel) and len(part.device_ids) > 1 for part in model.modules()):
        raise ValueError(_REPLICAS.format(method=regularizer.name))


def refuse_replica(regularizer: Regularizer, model: nn.Module) -> None:
    """Refuse to train one of the replicas that `nn.DataParallel` made of an attached model."""
    if vars(model).get("_is_replica") and model.training and torch.is_grad_enabled():
        raise RuntimeError(_REPLICAS.format(method=regularizer.name))


def refuse_script(*_: Any) -> None:
    """Refuse to be compiled by `torch.jit.script`, which asks an attached model for this first."""
    raise RuntimeError(
        "torch.jit.script cannot compile a model while a regularizer is attached to it; detach() the regularizer first"
    )
