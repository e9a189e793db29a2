"""Sites in models of PyTorch's own layers: every `torch.nn.MultiheadAttention`, alone or in `torch.nn.Transformer*`.

While the site of a module is open, one of its methods is replaced, in the module alone (`replace`): the module's own
code runs until the site has something to do, so an idle site changes no bit. No hook is used: PyTorch's encoder layer
leaves its fast path in evaluation for modules with hooks.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.functional import Inputs, attention_weights, regularized_attention
from attn_reg_plugin.attention.masks import PackedMask
from attn_reg_plugin.attention.sites import AttentionSite

CROSS = re.compile(r"cross|encoder_attn|src_attn|enc_dec|encdec|memory", re.IGNORECASE)
STACK = re.compile(r"(?:^|[._])(encoder|decoder)(?=[._]|$)")
#: whether the attentions of PyTorch's own layers are cross attention, by their name in them
LAYERS = {"self_attn": False, "multihead_attn": True}
#: packages whose models are other backends' affair
OTHERS = ("transformers.", "fairseq.")
#: additive masks from here down mean "masked": a dtype's minimum, or -1e4 for -inf in older ones
MASKED = -(10.0**4)
_ATTRIBUTE = "attn_reg_site"


@dataclass(frozen=True)
class Computation:
    """How the attention of a class of modules is computed while its site has something to do.

    Attributes:
        compute: is called as `method` is, with the module and the call before its arguments; returns what it returns.
        method: the method that is replaced.
        refusal: why a module of the class cannot be a site, as the end of a sentence, or None; None for every module.
        time_first: whether states around the module are (T, B, C) and not (B, T, C).
    """

    compute: Callable[..., Any]
    method: str = "forward"
    refusal: Callable[[nn.Module], str | None] | None = None
    time_first: bool = False


def layer_of(path: str) -> int:
    """The layer that a module stands in: the first number in its path, or behind a name, as `encoder_layer_0`."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path) or re.search(r"_(\d+)(?:\.|$)", path)
    return int(number[1]) if number else 0


def replaced_site(module: nn.Module) -> AttentionSite | None:
    """The open site of a module with a replaced method."""
    return vars(module).get(_ATTRIBUTE)


class ReplacingBackend:
    """Opens a site by replacing a method of its module."""

    def computation(self, module: nn.Module) -> Computation | None:
        """How the attention of `module` is computed; None if no method is replaced for it."""
        raise NotImplementedError

    def site(self, path: str, module: nn.Module, decoder: bool, cross: bool, layer: int) -> AttentionSite:
        """The module's open site, or a new one."""
        stack, kind = "decoder" if decoder else "encoder", "cross" if cross else "self"
        return replaced_site(module) or AttentionSite(stack, kind, layer, path, module, self)

    def open(self, site: AttentionSite) -> None:
        """Put the site and a method that asks it into the module.

        Raises:
            ValueError: the module is of a kind that cannot be regularized.
        """
        module, how = site.module, self.computation(site.module)
        if how.refusal is not None and (reason := how.refusal(module)) is not None:
            raise ValueError(f"{site.name} ({site.path}) {reason}")
        setattr(module, _ATTRIBUTE, site)
        # not a closure: a copy of an attached model runs the copy's module, and a model is pickled with it
        vars(module)[how.method] = partial(_run, module, how, vars(module).get(how.method))

    def close(self, site: AttentionSite) -> None:
        """Take them out; a wrapper that somebody put around our method meanwhile stays, and runs the model's own."""
        module, how = site.module, self.computation(site.module)
        delattr(module, _ATTRIBUTE)
        ours = vars(module).get(how.method)
        if isinstance(ours, partial) and ours.func is _run:
            del vars(module)[how.method]
            if ours.args[2] is not None:
                vars(module)[how.method] = ours.args[2]

    def time_first(self, site: AttentionSite) -> bool:
        """Whether states around it are (T, B, C)."""
        how = self.computation(site.module)
        return how is not None and how.time_first


def _run(module: nn.Module, how: Computation, before: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """In place of a module's method: the model's own computation, unless the site has something to do in this call."""
    site = replaced_site(module)
    call = None if site is None else site.enter()
    if call is None:
        return (before or partial(getattr(type(module), how.method), module))(*args, **kwargs)
    return how.compute(module, call, *args, **kwargs)


def split_mask(
    mask: Tensor | None, query: Tensor, bias: Tensor | None, masked: float = MASKED
) -> tuple[Tensor | None, Tensor | None]:
    """A mask, bool (True = attend) or additive, as `valid`, and `bias` with the finite part of an additive mask.

    The bias has the query's dtype; additive masks from `masked` down mean "masked".
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, bias
    valid = mask > masked
    finite = mask.masked_fill(~valid, 0.0).to(query.dtype)
    return valid, finite if bias is None else bias + finite


def merged_masks(masks: Iterable[Tensor | None], query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Masks as `valid` and as a bias, see `split_mask`; in bool ones True = masked."""
    valid = bias = None
    for mask in masks:
        if mask is not None:
            seen, bias = split_mask(mask if mask.is_floating_point() else ~mask.bool(), query, bias)
            valid = seen if valid is None else valid & seen
    return valid, bias


def weights_of(call: AttentionCall, query: Tensor, key: Tensor, **shared: Any) -> Tensor:
    """The weights of a call as its mask leaves them, (B, H, T, S), before dropout; `shared` as `Inputs`' fields."""
    keep = None
    if call.uniform:
        keep = PackedMask.of(torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=query.device), shared["valid"])
    elif call.tape is None:
        keep = call.keep_mask((*query.shape[:-1], key.size(-2)), shared["valid"], query.device)
    return attention_weights(Inputs(query, key, key, **shared), keep)


def multihead_attention(
    module: nn.MultiheadAttention,
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As PyTorch's: query (T, B, C), (B, T, C) with `batch_first`, or (T, C); True in a bool mask = masked.

    `is_causal` is only a hint about `attn_mask`. `bias_k` and the zero of `add_zero_attn` are keys like the others, at
    the end.

    Returns:
        output, shaped as the query; and with `need_weights` the weights before dropout: (B, T, S), (B, H, T, S)
        without `average_attn_weights`, without B for a query without it.
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched, first = query.dim() == 3, module.batch_first
    query, key, value = (
        x.unsqueeze(0) if not batched else x if first else x.transpose(0, 1) for x in (query, key, value)
    )
    q, k, v = _projected(module, query, key, value, bare=call.uniform)
    valid, bias = _masks(module, key_padding_mask, attn_mask, q)
    dropout_p = module.dropout if module.training else 0.0
    output = regularized_attention(q, k, v, valid=valid, site=call, dropout_p=dropout_p, bias=bias)
    output = module.out_proj(output.transpose(1, 2).flatten(2))
    weights = weights_of(call, q, k, valid=valid, bias=bias) if need_weights else None
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return output.squeeze(0), None if weights is None else weights.squeeze(0)
    return output if first else output.transpose(0, 1), weights


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, bare: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, T, D), keys and values (B, H, S, D); with `bare` the first two only have the shape."""

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)

    def extended(projected: Tensor, learned: Tensor | None) -> Tensor:
        if learned is not None:
            learned = learned.to(projected.dtype).expand(projected.size(0), 1, -1)
            projected = torch.cat([projected, learned], 1)
        return heads(F.pad(projected, (0, 0, 0, 1)) if module.add_zero_attn else projected)

    if module._qkv_same_embed_dim:
        w_q, w_k, w_v = module.in_proj_weight.chunk(3)
    else:
        w_q, w_k, w_v = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    b_q, b_k, b_v = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    v = extended(F.linear(value, w_v, b_v), module.bias_v)
    if bare:
        return v.new_zeros(*v.shape[:2], query.size(1), module.head_dim), v.detach(), v
    return heads(F.linear(query, w_q, b_q)), extended(F.linear(key, w_k, b_k), module.bias_k), v


def _masks(
    module: nn.MultiheadAttention, key_padding_mask: Tensor | None, attn_mask: Tensor | None, query: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """PyTorch's masks as `valid` (True = the key exists), and as a bias what of them is finite."""
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.view(-1, 1, 1, key_padding_mask.size(-1))
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.view(-1, module.num_heads, *attn_mask.shape[1:])
    extra = (module.bias_k is not None) + module.add_zero_attn
    masks = (key_padding_mask, attn_mask)
    return merged_masks([None if mask is None else F.pad(mask, (0, extra)) for mask in masks], query)


class PyTorchBackend(ReplacingBackend):
    """Finds and opens `torch.nn.MultiheadAttention`; see `Backend`."""

    def computation(self, module: nn.Module) -> Computation:
        """See `ReplacingBackend`."""
        return Computation(multihead_attention, time_first=not module.batch_first)

    def find(self, model: nn.Module) -> list[AttentionSite]:
        """Every `MultiheadAttention` of `model`, in the order of `named_modules`, but for those in others' models.

        In PyTorch's own layers `self_attn` is self and `multihead_attn` cross attention; both of its decoder layer are
        the decoder's. Elsewhere the path decides: the last of `encoder` and `decoder` in it is the stack; `cross`,
        `memory`, `encoder_attn`, `src_attn` or `enc_dec` is the decoder's cross attention. A subclass is a site unless
        it has a forward of its own.
        """
        sites, modules = [], dict(model.named_modules())
        others = (path for path, module in modules.items() if type(module).__module__.startswith(OTHERS))
        others = tuple(f"{path}." if path else "" for path in others)
        for path, module in modules.items():
            own = getattr(type(module), "forward", None) is nn.MultiheadAttention.forward
            if own and not path.startswith(others):
                holder, _, name = path.rpartition(".")
                layer = modules.get(holder)
                known = isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) and name in LAYERS
                cross = LAYERS[name] if known else bool(CROSS.search(path))
                named = STACK.findall(path.lower())[-1:] == ["decoder"]
                decoder = isinstance(layer, nn.TransformerDecoderLayer) or cross or named
                sites.append(self.site(path, module, decoder, cross, layer_of(path)))
        return sites


BACKEND = PyTorchBackend
