"""The attention functions that open sites of transformers models run, and what is put into their modules meanwhile."""

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from attn_reg_plugin.attention.functional import regularized_attention
from attn_reg_plugin.attention.graphs import outside_graphs
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.backends.pytorch import MASKED, split_mask, weights_of

#: the name that stands for a model's own attention while it has open sites. Names tell which one it was, so that a
#: copy of an attached model still knows; transformers reads meaning into `sdpa`, `flash` and slashes, so none is there
REGISTERED = {"sdpa": "attn_reg_fused", "eager": "attn_reg_eager"}
ORIGINALS = {ours: original for original, ours in REGISTERED.items()}

#: additive masks from here down mean "masked", by class: Swin adds -100 between regions of a shifted window
_MASKED_BY = {"SwinAttention": -50.0}
#: keywords of an attention call that are computed here
COMPUTED = frozenset(("dropout", "is_causal", "position_bias", "s_aux", "scaling", "sinks", "softcap"))
#: keywords that change nothing in `sdpa` and `eager`: what the mask says already, what the flash kernels need, and the
#: options of a model's forward that travel through it
HARMLESS = frozenset([
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "logits_to_keep", "max_length_k",
    "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
    "past_key_value", "past_key_values", "position_embeddings", "position_ids", "return_dict", "seq_idx",
    "sliding_window", "token_type_ids", "use_cache",
])  # fmt: skip
_ATTRIBUTE = "attn_reg_sites"
_OPEN: WeakSet["OpenSites"] = WeakSet()


class OpenSites:
    """The open sites of one attention module; kept in the module as an attribute.

    Attributes:
        sites: one, or one for each layer of a shared module.
        function: the model's own attention, called `original`.
        layers: the layers of a shared module in the order of its calls, else None.
        calls: how often a shared module was called in this forward.
        called: whether our function has been reached in this call of the module.
    """

    def __init__(
        self, module: nn.Module, original: str, caller: nn.Module | None = None, layers: list[int] | None = None
    ) -> None:
        """Put it into `module`; `caller` runs a shared module once per layer."""
        self.original, self.function, self.layers = original, original_function(module, original), layers
        self.sites: list[AttentionSite] = []
        self.calls, self.called = 0, False
        self.handles = [module.register_forward_hook(_check_called)]
        if caller is not None:
            self.handles.append(caller.register_forward_pre_hook(partial(_restart, self)))
        setattr(module, _ATTRIBUTE, self)
        _OPEN.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's sites are open, too."""
        vars(self).update(state)
        _OPEN.add(self)

    def remove(self, module: nn.Module) -> None:
        """Leave `module` as it was."""
        for handle in self.handles:
            handle.remove()
        delattr(module, _ATTRIBUTE)
        _OPEN.discard(self)

    def site(self) -> AttentionSite | None:
        """The site of this call, if it is open; of a shared module, if it has anything to do.

        Raises:
            RuntimeError: a shared module is called more often than it has layers.
        """
        self.called = True
        if self.layers is None:
            return self.sites[0]
        if not any(site.active for site in self.sites):
            return None  # uncounted: a compiled graph would check the number at each call
        call, self.calls = self.calls, self.calls + 1
        if call >= len(self.layers):
            raise RuntimeError(
                f"{self.sites[0].path} serves {len(self.layers)} layers but was called once more in one forward, so "
                "its layers cannot be told apart; turn activation checkpointing off, or attach to the whole model"
            )
        return next((s for s in self.sites if s.layer == self.layers[call] and s.active), None)


def _restart(held: OpenSites, caller: nn.Module, args: Any) -> None:
    held.calls = 0


def _check_called(module: nn.Module, args: Any, output: Any) -> None:
    """A model may accept an attention function and never call it, or be given another one meanwhile."""
    held = open_sites(module)
    called, held.called = held.called, False
    if not called and any(site.active for site in held.sites):
        raise RuntimeError(
            f"{held.sites[0].name} ({held.sites[0].path}) ran without calling the attention interface, so it is not "
            f"regularized; leave the model's attn_implementation ({module.config._attn_implementation!r} now) alone "
            "while a regularizer is attached"
        )


def open_sites(module: nn.Module) -> OpenSites | None:
    """State that is put into `module` while any of its sites is open."""
    return module.__dict__.get(_ATTRIBUTE)


def runs_open_sites(config: PreTrainedConfig) -> bool:
    """Whether a module with an open site runs with this very configuration."""
    return any(site.module.config is config for held in _OPEN for site in held.sites)


def interface_of(module: nn.Module) -> AttentionInterface | None:
    """The attention interface that the forward of `module` itself looks its attention up in; None if it does not."""
    forward, name = inspect.unwrap(type(module).forward), "ALL_ATTENTION_FUNCTIONS"
    named = name in getattr(getattr(forward, "__code__", None), "co_names", ())
    return forward.__globals__.get(name) if named else None


def original_function(module: nn.Module, name: str) -> Callable | None:
    """The attention function `name` as `module` would find it: `eager` is its model's own."""
    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    return interface_of(module).get(name, eager if name == "eager" else None)


def asks_by_name(module: nn.Module) -> bool:
    """Whether the forward of `module` asks if its attention is called `eager` or `sdpa`, to mask by itself if so."""
    consts = inspect.unwrap(type(module).forward).__code__.co_consts
    return any(isinstance(const, tuple | frozenset) and {"eager", "sdpa"} <= set(const) for const in consts)


@lru_cache(maxsize=4096)
def _mentions(code: CodeType, name: str) -> bool:
    """Whether a function names the keyword `name`: takes it, passes it on by name, or looks it up."""
    named = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    named.update(const for const in code.co_consts if isinstance(const, str))
    named.update(*(const for const in code.co_consts if isinstance(const, tuple)))
    return name in named


def _check_keywords(held: OpenSites, site: AttentionSite, module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse, by a RuntimeError, a keyword that the model's attention may read and ours does not.

    What neither the module nor its attention function names is the user's, on its way through `**kwargs`.
    """
    functions = inspect.unwrap(type(module).forward), inspect.unwrap(held.function)
    codes = [getattr(function, "__code__", None) for function in functions]
    for name in sorted(name for name in kwargs.keys() - COMPUTED - HARMLESS if kwargs[name] is not None):
        if any(code is None or _mentions(code, name) for code in codes):
            raise RuntimeError(
                f"{site.name} ({site.path}) passes {name}= to its attention, which cannot be regularized; choose "
                "other sites, or a model without it"
            )


def _attention(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers' attention functions: query (B, H, T, D), key and value (B, G, S, D) with G heads for H.

    Models pass `attention_mask` by keyword as well, so it has to be called so.

    Returns:
        output (B, T, H, D), and with `eager` the weights (B, H, T, S), before dropout.
    """
    held = open_sites(module)
    attention_mask = _mask_of_last_queries(original, module, query, key, attention_mask, kwargs)
    site = None if held is None else held.site()
    if site is None or site.idle():
        function = original_function(module, original) if held is None else held.function
        return function(module, query, key, value, attention_mask, **kwargs)
    return _regularized(held, site, module, query, key, value, attention_mask, kwargs)


@outside_graphs
def _regularized(
    held: OpenSites,
    site: AttentionSite,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """`_attention` of a site that has anything to do; a RuntimeError names what of its call cannot be regularized."""
    call, eager = site.enter(), held.original == "eager"
    if call is None:
        return held.function(module, query, key, value, mask, **kwargs)
    _check_keywords(held, site, module, kwargs)
    if eager and mask is not None and mask.dtype == torch.bool and not mask.all():
        raise RuntimeError(
            f"{site.name} ({site.path}) is given a bool mask, which attn_implementation='eager' adds to the scores as "
            "numbers instead of masking; load the model with attn_implementation='sdpa'"
        )
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    valid, bias = _valid_and_bias(held.original, module, query, key, mask, kwargs)
    scale, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
    if kwargs.get("softcap") is not None:
        # what is in the bias needs no kernel of its own; queries and keys have done their part then
        capped = soft_capped(query, key, scale, kwargs["softcap"])
        bias, query = capped if bias is None else capped + bias, torch.zeros_like(query)
    sink = kwargs.get("sinks")  # one score per query (B, H, T, 1), or as `s_aux` one per head (H,)
    if sink is None and kwargs.get("s_aux") is not None:
        sink = kwargs["s_aux"].reshape(1, -1, 1, 1)
    shared = {"valid": valid, "scale": scale, "bias": bias, "sink": sink}
    output = regularized_attention(query, key, value, site=call, dropout_p=dropout, **shared)
    weights = weights_of(call, query, key, **shared) if eager and call.tape is None else None
    if eager and valid is not None and sink is None:  # its softmax over nothing but masked keys is uniform
        output = padded_queries(output, value, valid)
        empty = ~valid.any(-1, keepdim=True)
        weights = None if weights is None else weights.masked_fill(empty, 1 / key.size(-2))
    return output.transpose(1, 2).contiguous(), weights


def padded_queries(output: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    """The output (B, H, T, D) with the mean of all values in rows without a valid key."""
    return torch.where(valid.any(-1, keepdim=True), output, value.mean(-2, keepdim=True))


def soft_capped(query: Tensor, key: Tensor, scale: float | None, cap: float) -> Tensor:
    """Scores that stay within ±cap (Gemma 2): cap · tanh(scale · QKᵀ / cap), (B, H, T, S)."""
    scores = (query @ key.transpose(-1, -2)) * (query.size(-1) ** -0.5 if scale is None else scale)
    return cap * torch.tanh(scores / cap)


def _valid_and_bias(
    original: str, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """transformers' masks as `valid`, and as a bias the position bias and what of an additive mask is finite.

    `sdpa` gets no mask where it can say `is_causal` to the kernel instead, by the rule that is repeated here.
    """
    bias, queries, keys = kwargs.get("position_bias"), query.size(-2), key.size(-2)
    if mask is None and original == "sdpa" and queries > 1 and _causal(module, kwargs):
        return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(), bias
    if mask is None:
        return None, bias
    mask = mask if mask.size(-1) == keys else mask[..., :keys]  # the same object for all layers, if it can be
    return split_mask(mask, query, bias, _MASKED_BY.get(type(module).__name__, MASKED))


def _causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether `sdpa` without a mask hides the future."""
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def _mask_of_last_queries(
    original: str, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """The mask of a layer that uses an earlier one's keys and may be given the last queries only (Gemma 4).

    The model leaves the first queries out unless its attention is called `sdpa` and has no mask: there `is_causal`
    would hide the future as if the first queries were the ones left. Ours has another name, so it gets the mask.
    """
    queries, keys = query.size(-2), key.size(-2)
    shares = mask is None and original == "sdpa" and getattr(module, "is_kv_shared_layer", False)
    if not shares or not 1 < queries < keys or not _causal(module, kwargs):
        return mask
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)


def _mask(original: str, *args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that the model's own attention gets.

    Where layers use earlier ones' keys, None stands for as many queries as keys only, see `_mask_of_last_queries`.
    """
    shares = getattr(kwargs.get("config"), "num_kv_shared_layers", None)
    if shares and kwargs.get("q_length", 1) not in (1, kwargs.get("kv_length")):
        kwargs["allow_is_causal_skip"] = False
    return AttentionMaskInterface()[original](*args, **kwargs)


for _original, _name in REGISTERED.items():
    AttentionInterface.register(_name, partial(_attention, _original))
    AttentionMaskInterface.register(_name, partial(_mask, _original))
