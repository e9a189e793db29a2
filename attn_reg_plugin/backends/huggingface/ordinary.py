"""Attention of transformers models that is an ordinary module: it calls no attention interface.

Families of a kind are in a file beside this one: for each a function that computes its attention through
`regularized_attention`, registered by `computes` for the class of the attention; its method is replaced while a site is
open, see `Computation`. Nothing of transformers' models is imported for this.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.functional import regularized_attention
from attn_reg_plugin.backends.pytorch import Computation, split_mask, weights_of

#: by the class of the attention module, with the name of its Python module
ORDINARY: dict[str, Computation] = {}


def computes(*classes: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function for the attention of these classes, with the options of `Computation`.

    Classes are named as below `transformers.models`, such as `mpnet.modeling_mpnet.MPNetSelfAttention`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in classes:
            ORDINARY[f"transformers.models.{name}"] = Computation(function, **options)
        return function

    return register


def ordinary(module: nn.Module) -> Computation | None:
    """How the attention of `module` is computed; None if its class isn't registered, nor one that it inherits all of.

    A subclass with a method of its own in place of the registered one computes something else.
    """
    for parent in type(module).__mro__:
        found = ORDINARY.get(f"{parent.__module__}.{parent.__qualname__}")
        if found is not None:
            return found if getattr(type(module), found.method) is getattr(parent, found.method) else None
    return None


def refuse(call: AttentionCall, reason: str) -> NoReturn:
    """Raise a RuntimeError that names the site of a call and ends with `reason`."""
    raise RuntimeError(f"{call.site.name} ({call.site.path}) {reason}")


def heads_of(states: Tensor, heads: int) -> Tensor:
    """(B, T, C) to (B, H, T, D)."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(output: Tensor) -> Tensor:
    """(B, H, T, D) to (B, T, C)."""
    return output.transpose(1, 2).flatten(2)


def attend(
    call: AttentionCall | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`regularized_attention` of query (B, H, T, D), key and value (B, H, S, D) with a mask, bool (True = attend) or
    additive, and `dropout_p` of the weights, as a module in training has it; `call` None is plain attention.

    Returns:
        output (B, H, T, D), and `with_weights` the call's weights before dropout (B, H, T, S), else None.
    """
    valid, bias = split_mask(mask, query, bias)
    shared = {"valid": valid, "scale": scale, "bias": bias}
    output = regularized_attention(query, key, value, site=call, dropout_p=dropout_p, **shared)
    return output, weights_of(call, query, key, **shared) if with_weights and call is not None else None
