"""Attention of transformers models that is an ordinary module: it calls no attention interface.

A family is a file beside this one, `huggingface_NAME.py`: a function that computes its attention through
`regularized_attention`, registered by `computes` for the class of the attention. While the site of such a module is
open, one of its methods is replaced, in the module alone. The model's own code runs until the site has something to do,
so an idle site changes no bit. Nothing of transformers' models is imported for this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.functional import regularized_attention
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.backends.huggingface_attention import split_mask, weights_of

_ATTRIBUTE = "attn_reg_site"


@dataclass(frozen=True)
class Ordinary:
    """How the attention of a class is computed while its site has something to do.

    Attributes:
        compute: is called as `method` is, with the module and the call before its arguments; returns what it returns.
        method: the method that is replaced.
        refusal: why a module of the class cannot be a site, as the end of a sentence; None if it can.
        time_first: whether states around the module are (T, B, C) and not (B, T, C).
    """

    compute: Callable[..., Any]
    method: str = "forward"
    refusal: Callable[[nn.Module], str | None] = lambda module: None
    time_first: bool = False

    @property
    def first(self) -> str:
        """The name of the method's first argument, which tells one call from another."""
        return list(inspect.signature(self.compute).parameters)[2]


#: by the class of the attention module, with the name of its Python module
ORDINARY: dict[str, Ordinary] = {}


def computes(*classes: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function for attention of these classes, such as `mpnet.modeling_mpnet.MPNetAttention`.

    Args:
        classes: their names below `transformers.models`.
        options: of `Ordinary`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in classes:
            ORDINARY[f"transformers.models.{name}"] = Ordinary(function, **options)
        return function

    return register


def ordinary(module: nn.Module) -> Ordinary | None:
    """How the attention of `module` is computed; None if its class isn't registered, nor one that it inherits all of.

    A subclass with a method of its own in place of the registered one computes something else.
    """
    for parent in type(module).__mro__:
        found = ORDINARY.get(f"{parent.__module__}.{parent.__qualname__}")
        if found is not None:
            return found if getattr(type(module), found.method) is getattr(parent, found.method) else None
    return None


def replaced_site(module: nn.Module) -> AttentionSite | None:
    """The open site of an ordinary module."""
    return vars(module).get(_ATTRIBUTE)


def replace(site: AttentionSite) -> None:
    """Put the site and a method that asks it into the module.

    Raises:
        ValueError: the module is of a kind that cannot be regularized.
    """
    module, how = site.module, ordinary(site.module)
    reason = how.refusal(module)
    if reason is not None:
        raise ValueError(f"{site.name} ({site.path}) {reason}")
    setattr(module, _ATTRIBUTE, site)
    # not a closure: a copy of an attached model runs the copy's module, and a model is pickled with it
    vars(module)[how.method] = partial(_run, module, vars(module).get(how.method))


def restore(site: AttentionSite) -> None:
    """Take them out again; a wrapper that somebody put around our method meanwhile stays, and runs the model's own."""
    module, method = site.module, ordinary(site.module).method
    delattr(module, _ATTRIBUTE)
    ours = vars(module).get(method)
    if isinstance(ours, partial) and ours.func is _run:
        del vars(module)[method]
        if ours.args[1] is not None:
            vars(module)[method] = ours.args[1]


def _run(module: nn.Module, before: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """In place of a module's method: the model's own computation, unless the site has something to do in this call."""
    site, how = replaced_site(module), ordinary(module)
    call = None if site is None else site.enter()
    if call is None:
        return (before or partial(getattr(type(module), how.method), module))(*args, **kwargs)
    return how.compute(module, call, *args, **kwargs)


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
    """`regularized_attention` with a transformers mask, bool or additive.

    Args:
        call: None is plain attention.
        query: (B, H, T, D).
        key, value: (B, H, S, D).
        mask: bool (True = attend) or additive, broadcastable to (B, H, T, S).
        dropout_p: of the weights; give that of the module in training, since a call has something to do in training.
        with_weights: return the weights of the call as well.

    Returns:
        output (B, H, T, D), and the weights before dropout (B, H, T, S) if they are wanted.
    """
    valid, bias = split_mask(mask, query, bias)
    shared = {"valid": valid, "scale": scale, "bias": bias}
    output = regularized_attention(query, key, value, site=call, dropout_p=dropout_p, **shared)
    return output, weights_of(call, query, key, **shared) if with_weights and call is not None else None


def padded_queries(output: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    """The output (B, H, T, D) with the mean of all values in rows without a valid key."""
    return torch.where(valid.any(-1, keepdim=True), output, value.mean(-2, keepdim=True))
