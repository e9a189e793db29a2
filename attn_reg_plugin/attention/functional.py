"""The one attention computation: softmax(QKᵀ)V over the positions that a regularizer leaves.

A row in which every valid key is dropped is uniform over its valid keys (AttendOut, Wu, Zhao & Zhang 2021, equation
4), a row without any valid key is zero. No finite fill value does both in every dtype and fused kernels give NaN for
an empty row, so a dead row keeps its valid keys and loses its query instead: zero scores are a uniform row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.graphs import outside_graphs
from attn_reg_plugin.attention.masks import PackedMask, check_mask, pack_bits, rows_of, scores_of, unpack_bits
from attn_reg_plugin.attention.requests import Tape
from attn_reg_plugin.attention.tokens import with_bias

if TYPE_CHECKING:
    from attn_reg_plugin.attention.sites import AttentionSite


class Inputs(NamedTuple):
    """Inputs of an attention, by the arguments of `regularized_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None = None
    dropout_p: float = 0.0
    scale: float | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None


def regularized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    valid: Tensor | None = None,
    site: AttentionSite | AttentionCall | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention that a regularizer can watch and mask through `site`.

    Args:
        query: (B, H, T, D).
        key, value: (B, H, S, D).
        valid: bool, True = the key exists for the query, broadcastable to (B, H, T, S); None means all.
        site: what a regularizer holds of this attention; None, or a site with nothing to do, is plain attention. An
            attention that has asked `site.enter` itself gives the call.
        dropout_p: ordinary dropout of the attention weights, in [0, 1); give 0 in evaluation.
        scale: factor of the scores, D^-1/2 by default.
        bias: added to the scores, floating-point, broadcastable to (B, H, T, S); zeroed on rows that lost all their
            keys. A mask isn't a bias: give it as `valid`.
        sink: the score of one more key without a value (an attention sink), broadcastable to (B, H, T, 1): the other
            keys' weights sum to less than 1. Rows that lost all their keys are without it.

    Returns:
        (B, H, T, D). Never NaN: a row whose valid keys are all dropped is the mean of their values, a row without
        any valid key is zero.

    Raises:
        TypeError: `valid` is not bool, `bias` is not floating-point, or an input is no tensor of four dimensions.
        ValueError: key and value differ in length, `valid` has five dimensions, or dropout_p is out of its range.
    """
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not isinstance(given, Tensor) or given.dim() != 4:
            kind = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise TypeError(f"{name} is {kind}, but must be a tensor (batch, heads, length, head size)")
    check_mask("valid", valid)
    if key.size(-2) != value.size(-2):
        raise ValueError(f"key has {key.size(-2)} keys, but value {value.size(-2)}; each key has one value")
    if valid is not None and valid.dim() > 4:
        raise ValueError(f"valid has the shape {tuple(valid.shape)}, but must be broadcastable to (B, H, T, S)")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}, but must lie in [0, 1)")
    if bias is not None and not bias.is_floating_point():
        raise TypeError(
            f"bias is a tensor of {bias.dtype}, but must be floating-point: it is added to the scores; "
            "give a mask as valid, bool, True = attend"
        )
    inputs = Inputs(query, key, value, valid, dropout_p, scale, bias, sink)
    if site is None or (not isinstance(site, AttentionCall) and site.idle()):
        return _attend(inputs)
    return _regularized(site, inputs)


@outside_graphs
def _regularized(site: AttentionSite | AttentionCall, inputs: Inputs) -> Tensor:
    """Run an attention of which something is asked."""
    call = site if isinstance(site, AttentionCall) else site.enter()
    if call is None:
        return _attend(inputs)
    if call.tape is not None:
        return _record(call.tape, inputs)
    keys, valid = inputs.key.size(-2), inputs.valid
    if call.uniform:
        return call.scaled(uniform_attention(inputs.value, valid, inputs.query.size(-2)), keys, valid)
    keep = call.keep_mask((*inputs.query.shape[:-1], keys), valid, inputs.query.device)
    if call.request.look is not None:
        with torch.no_grad():
            call.request.look(call, attention_weights(inputs, keep), valid)
    return call.scaled(_attend(inputs._replace(dropout_p=call.total_dropout(inputs.dropout_p)), keep), keys, valid)


def uniform_attention(value: Tensor, valid: Tensor | None, queries: int) -> Tensor:
    """Every row uniform over its valid keys (AttendOut, equation 4): needs neither queries nor keys.

    Args:
        value: (B, H, S, D).
        valid: bool, broadcastable to (B, H, T, S); None means all.
        queries: T.

    Returns:
        (B, H, T, D), the mean of the valid values; zero in rows without any.
    """
    if valid is None:
        return value.mean(-2, keepdim=True).expand(*value.shape[:-2], queries, value.size(-1))
    valid = torch.atleast_2d(valid)
    valid = valid.expand(*valid.shape[:-1], value.size(-2))
    weights = valid.to(torch.promote_types(value.dtype, torch.float32)) / valid.sum(-1, keepdim=True).clamp(min=1)
    output = weights.to(value.dtype) @ value
    return output.expand(*value.shape[:-2], queries, value.size(-1))


def attention_weights(inputs: Inputs, keep: PackedMask | None = None) -> Tensor:
    """The attention map A = softmax(QKᵀ), materialized: (B, H, T, S) in the query's dtype, softmax in fp32.

    Rows without a valid key are zero; a sink's column is left out.
    """
    live, mask, empty = _live(inputs, keep)
    query, key, bias = live.query, live.key, live.bias
    scores = (query @ key.transpose(-1, -2)) * (query.size(-1) ** -0.5 if inputs.scale is None else inputs.scale)
    if bias is not None:
        scores = scores + (bias if keep is None else bias.masked_fill(keep.dead, 0.0))
    if mask is not None:
        scores = scores.masked_fill(~(mask.live() if isinstance(mask, PackedMask) else mask), float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., : inputs.key.size(-2)]
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def _live(inputs: Inputs, keep: PackedMask | None) -> tuple[Inputs, Tensor | PackedMask | None, Tensor | None]:
    """Inputs in which no row is empty, their mask (packed if there is a keep mask), and the rows without a valid key.

    The query of rows that lost all their keys is zeroed and they attend over their valid keys (a bias has to be zeroed
    there too); rows without valid keys attend over everything, and are to be zeroed afterwards.
    """
    query, bias = inputs.query, inputs.bias
    mask, empty = rows_of(inputs.valid)
    if keep is not None:
        mask, query = keep, _zeroed(query, keep.dead)
    if inputs.sink is None:
        return inputs._replace(query=query), mask, empty
    # a key of score `sink` and value 0, which is not there for dead rows
    shape = (*query.shape[:-1], inputs.key.size(-2))
    score = inputs.sink.to(query.dtype).expand(*shape[:-1], 1)
    bias = torch.cat([query.new_zeros(shape) if bias is None else bias.to(query.dtype).expand(shape), score], -1)
    there = torch.ones_like(score, dtype=torch.bool) if keep is None else ~keep.dead.expand(*shape[:-1], 1)
    attended = torch.ones_like(there) if mask is None else mask if keep is None else keep.live()
    mask = torch.cat([attended.expand(shape), there], -1)
    mask = mask if keep is None else PackedMask(pack_bits(mask), keep.dead, mask.size(-1))
    key, value = F.pad(inputs.key, (0, 0, 0, 1)), F.pad(inputs.value, (0, 0, 0, 1))
    return inputs._replace(query=query, key=key, value=value, bias=bias), mask, empty


def _zeroed(states: Tensor, rows: Tensor) -> Tensor:
    """Zero some rows (B, H, T, 1) of states (B, H, T, D), laid out as (B, T, H, D), as models need them."""
    return states.transpose(1, 2).masked_fill(rows.transpose(1, 2), 0.0).transpose(1, 2)


def _attend(inputs: Inputs, keep: PackedMask | None = None, *, probing: bool = False) -> Tensor:
    """Attention over `valid & keep` by PyTorch's fused kernel; in the probe rows without a valid key are not zeroed."""
    live, mask, empty = _live(inputs, keep)
    if isinstance(mask, PackedMask):
        output = _attend_saving_bits(live, mask)
    else:
        if live.bias is not None:
            mask = live.bias if mask is None else live.bias.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            mask = scores_of(mask, live.query.dtype)
        output = F.scaled_dot_product_attention(*live[:3], mask, live.dropout_p, scale=live.scale)
    return output if empty is None or probing else _zeroed(output, empty)


def _attend_saving_bits(live: Inputs, mask: PackedMask) -> Tensor:
    """Fused attention that keeps the mask's bits for its backward instead of the kernel's map of zeros and -inf."""
    keys, dead, bias, device = mask.keys, mask.dead, live.bias, live.query.device.type
    # autocast would cast a map of another dtype, and keep the copy
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else live.query.dtype

    def additive(bits: Tensor, bias: Tensor | None) -> Tensor:
        scores = unpack_bits(bits, keys, dtype)
        return scores if bias is None else scores + bias.to(dtype).masked_fill(dead, 0.0)

    if mask.shared and bias is None:
        return F.scaled_dot_product_attention(*live[:3], mask.scores(dtype), live.dropout_p, scale=live.scale)
    scores = additive(mask.bits, bias)
    if bias is not None and bias.requires_grad:
        return F.scaled_dot_product_attention(*live[:3], scores, live.dropout_p, scale=live.scale)

    # the hooks live as long as the graph: they hold neither the query nor, once they are saved, the bits, nor the map
    parts = [mask.bits, *([] if bias is None else [bias])]
    pointer = scores.data_ptr()

    # PyTorch asks the innermost hooks only: what checkpointing or offloading would do is asked for here
    keep, give = _outer_hooks()

    def pack(tensor: Tensor) -> tuple[torch.Size | None, Any]:
        if tensor.data_ptr() == pointer:
            return tensor.shape, [keep(part) for part in parts]
        return None, keep(tensor)

    def unpack(saved: tuple[torch.Size | None, Any]) -> Tensor:
        shape, held = saved
        if shape is None:
            return give(held)
        bits, *biases = (give(part) for part in held)
        # a kernel may keep the map expanded to all heads
        return additive(bits, biases[0] if biases else None).expand(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = F.scaled_dot_product_attention(*live[:3], scores, live.dropout_p, scale=live.scale)
    parts.clear()
    return output


def _outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The hooks for saved tensors in force; those that do nothing without any, or where torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    outer = None if top is None else top(False)
    return (lambda tensor: tensor, lambda held: held) if outer is None else outer


def _record(tape: Tape, inputs: Inputs) -> Tensor:
    """The probe's attention: its output is kept on the tape, at the start of the graph if nothing is below it.

    It equals the forward's except in rows without a valid key, which no row of a valid token reads.
    """
    value = inputs.value
    if tape.tokens is not None:
        scale = inputs.query.size(-1) ** -0.5 if inputs.scale is None else inputs.scale
        columns = tape.tokens.columns_of(tape.index, inputs.key, inputs.valid, scale)
        inputs = Inputs(*with_bias(*inputs[:3], *columns), *inputs[3:5], scale, *inputs[6:])
    if tape.needs_weights:
        if tape.weights is None:
            with torch.no_grad():
                tape.weights = attention_weights(inputs)
        # drawn anew in every pass, from the same generator state: the same map after dropout
        dropped = F.dropout(tape.weights, inputs.dropout_p)
        if tape.dropped_weights is None:
            tape.dropped_weights = dropped
        output = (tape.factor * dropped) @ value
    elif inputs.query.dtype == torch.bfloat16 and inputs.query.device.type == "cpu":
        # the CPU kernel's backward takes twice as long in bfloat16
        with torch.autocast("cpu", enabled=False):
            bias = None if inputs.bias is None else inputs.bias.float()
            query, key = inputs.query.float(), inputs.key.float()
            output = _attend(inputs._replace(query=query, key=key, value=inputs.value.float(), bias=bias), probing=True)
    else:
        output = _attend(inputs, probing=True)
    output = output[..., : value.size(-1)]
    if not output.requires_grad:
        output = output.detach().requires_grad_(torch.is_grad_enabled())
    tape.keep(output, value.detach(), inputs.valid)
    return output.to(value.dtype)
