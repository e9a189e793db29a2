"""Attribution: how much the objective depends on each attention position, which AD-DROP compares.

Gradient attribution is B = ∂F/∂A. Because O = A V, it equals ∂F/∂O · Vᵀ, so no attention map has to be kept in the
autograd graph: the probe runs the fused kernel, keeps O and V of each site, and one backward gives every ∂F/∂O.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.attention.requests import Tape
from attn_reg_plugin.attention.sites import AttentionSite

NO_GRADIENTS = (
    "the selected attention ran without gradients: if it is frozen, choose other sites; if activation checkpointing "
    "runs it, use the non-reentrant kind (use_reentrant=False)"
)


#: bytes of the maps in fp32 that are worked on together: more would show in the peak memory, fewer are more kernels
CHUNK_BYTES = 2**23


def sites_of_a_chunk(shape: tuple[int, ...]) -> int:
    """Return how many sites with maps of `shape` (B, H, T, S) are worked on together, at least 1."""
    return max(1, CHUNK_BYTES // max(1, 4 * math.prod(shape)))


#: a call of the probe: its site, its tape, and what it is attributed by, None where F does not depend on it
Attributed = tuple[AttentionSite, Tape, Tensor | None]


def together(calls: Iterable[Attributed]) -> Iterator[list[Attributed]]:
    """Split calls into chunks of one shape, whose maps may be stacked; see `CHUNK_BYTES`."""
    alike: dict[tuple[Any, ...], list[Attributed]] = {}
    for call in calls:
        _, tape, given = call
        shapes = [None if one is None else one.shape for one in (tape.output, tape.value, tape.valid)]
        alike.setdefault((*shapes, given is None, tape.output.device), []).append(call)
    for (output, value, *_), group in alike.items():
        size = sites_of_a_chunk((*output[:-1], value[-2]))
        yield from (group[i : i + size] for i in range(0, len(group), size))


def gradients_of(objective: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """∂F of each tensor by one backward; None where F does not depend on it, or it came without gradients.

    Only what lies between F and the tensors is computed: no parameter's gradient is, and none is touched. (Parameters
    are not frozen for the probe all the same: PyTorch multiplies three-dimensional inputs by a frozen weight through
    copies of the weight, one per example.)

    Raises:
        ValueError: the objective is not a scalar, or has no graph; or none of the tensors has gradients.
    """
    if objective.dim() != 0:
        raise ValueError(f"the objective must be a scalar, but has the shape {tuple(objective.shape)}")
    if not objective.requires_grad:
        raise ValueError("the objective depends on no selected attention site; compute it from the model's outputs")
    graded = [tensor for tensor in tensors if tensor.requires_grad]
    if not graded:
        raise ValueError(NO_GRADIENTS)
    gradients = iter(torch.autograd.grad(objective, graded, allow_unused=True))
    return [next(gradients) if tensor.requires_grad else None for tensor in tensors]


def output_gradients(objective: Tensor, tapes: Sequence[Tape]) -> list[Tensor | None]:
    """∂F/∂O (B, H, T, D) of every tape of the probe, F a scalar in its graph; see `gradients_of`."""
    return gradients_of(objective, [tape.output for tape in tapes])


def map_gradient(output_gradient: Tensor, value: Tensor) -> Tensor:
    """∂F/∂A = ∂F/∂O · Vᵀ in fp32, under autocast as well: (B, H, T, D) and (B, H, S, D) give (B, H, T, S)."""
    with torch.autocast(value.device.type, enabled=False):
        return output_gradient.float() @ value.float().transpose(-1, -2)


def gradient_attribution(objective: Tensor, sites: Sequence[AttentionSite]) -> list[Tensor]:
    """Gradient attribution B = ∂F/∂A (AD-DROP), one backward for all sites.

    Args:
        objective: F, a scalar computed from a forward run inside `recording(sites)`.
        sites: the recorded sites.

    Returns:
        One (B, H, T, S) fp32 tensor per site, zeros where F does not depend on it. With attention dropout on, A is
        the map after dropout.

    Raises:
        ValueError: a site recorded nothing or several calls, the objective isn't a scalar, or has no graph.
    """
    for site in sites:
        if len(site.tapes) > 1:
            raise ValueError(
                f"{site.name} ran {len(site.tapes)} times in the forward; give output_gradients the tapes of its "
                "calls, site.tapes, and map_gradient each of them"
            )
        if not site.tapes:
            raise ValueError(
                f"{site.name} recorded nothing; run the forward inside recording(sites), in training mode, and with no "
                "method attached"
            )
    tapes = [site.tapes[0] for site in sites]
    gradients = output_gradients(objective, tapes)
    given = [torch.zeros_like(t.output) if g is None else g for g, t in zip(gradients, tapes, strict=True)]
    return [map_gradient(gradient, tape.value) for gradient, tape in zip(given, tapes, strict=True)]
