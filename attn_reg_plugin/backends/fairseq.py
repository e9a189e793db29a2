"""Sites in fairseq models: every `MultiheadAttention`, wherever it stands.

While a site is idle (evaluation, generation, incremental decoding, plain epochs) fairseq's own forward runs.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.functional import regularized_attention
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.backends.pytorch import (
    Computation,
    ReplacingBackend,
    layer_of,
    merged_masks,
    weights_of,
)


def multihead_attention(
    module: MultiheadAttention,
    call: AttentionCall,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_padding_mask: Tensor | None = None,
    incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
    need_weights: bool = True,
    static_kv: bool = False,
    attn_mask: Tensor | None = None,
    before_softmax: bool = False,
    need_head_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As fairseq's: query (T, B, C), key and value (S, B, C), key_padding_mask (B, S) with True = padding.

    Returns:
        output (T, B, C), and the weights if asked for: (B, T, S), or (H, B, T, S) with `need_head_weights`.
    """
    if incremental_state is not None or before_softmax:
        given = (incremental_state, need_weights, static_kv, attn_mask, before_softmax, need_head_weights)
        return MultiheadAttention.forward(module, query, key, value, key_padding_mask, *given)

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (module.num_heads, -1)).permute(1, 2, 0, 3)

    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.bool()[:, None, None, :]
    if attn_mask is not None:  # one of all, of each sentence, or of each head
        each = module.num_heads if attn_mask.dim() == 3 and attn_mask.size(0) not in (1, query.size(1)) else 1
        attn_mask = attn_mask.view(-1, each, *attn_mask.shape[-2:])
    valid, bias = merged_masks((key_padding_mask, attn_mask), query)
    v = heads(module.v_proj(value))
    if call.uniform:  # needs neither projection; the queries count only by their number
        q, k = (v.new_empty(v.size(0), module.num_heads, length, 0) for length in (query.size(0), v.size(2)))
    else:
        q, k = heads(module.q_proj(query)), heads(module.k_proj(key))
    shared = {"valid": valid, "scale": module.scaling, "bias": bias}
    dropout_p = module.dropout_module.p if module.dropout_module.training else 0.0
    output = regularized_attention(q, k, v, site=call, dropout_p=dropout_p, **shared)
    output, weights = module.out_proj(output.permute(2, 0, 1, 3).flatten(2)), None
    if (need_weights or need_head_weights) and call.tape is None:
        weights = weights_of(call, q, k, **shared)
        weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
    return output, weights


def _refusal(module: MultiheadAttention) -> str | None:
    """Extra keys and other kernels cannot be masked position by position."""
    odd = {"bias_k": module.bias_k is not None, "add_zero_attn": module.add_zero_attn, "xformers": module.use_xformers}
    used = ", ".join(name for name, present in odd.items() if present)
    return f"uses {used}, which cannot be regularized" if used else None


MULTIHEAD = Computation(multihead_attention, refusal=_refusal, time_first=True)


class FairseqBackend(ReplacingBackend):
    """Finds and opens the attention of any fairseq model; see `Backend`."""

    def computation(self, module: nn.Module) -> Computation:
        """See `ReplacingBackend`."""
        return MULTIHEAD

    def find(self, model: nn.Module) -> list[AttentionSite]:
        """Every `MultiheadAttention` of `model`, in the order of `named_modules`.

        A subclass with a forward of its own is not among them: replacing its forward would change the model.
        """
        sites = []
        for path, module in model.named_modules():
            if getattr(type(module), "forward", None) is MultiheadAttention.forward:
                decoder = re.search(r"(^|\.)decoder(\.|$)", path) is not None
                sites.append(self.site(path, module, decoder, module.encoder_decoder_attention, layer_of(path)))
        return sites

    def describe(self, model: nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
        """Read `token_mask` (B, T) off the forward's arguments, True where the output is a real token.

        A decoder's output at t belongs to its input at t, so both are padded alike, and it predicts a piece of the
        vocabulary, of which padding is never meant: `padding_label`. `adaptive_softmax` is the decoder's, if it gives
        the features of one instead of logits.
        """
        written = named.get("prev_output_tokens")
        tokens = named.get("src_tokens") if written is None else written
        padding = padding_index(model)
        softmax = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
        described = {} if softmax is None else {"adaptive_softmax": softmax}
        if tokens is None or padding is None:
            return described
        described["token_mask"] = tokens.ne(padding)
        return described | ({} if written is None else {"padding_label": padding})

    @contextmanager
    def probing(self, model: nn.Module) -> Iterator[None]:
        """While open, fairseq's activation checkpointing is PyTorch's non-reentrant one.

        fairseq's runs layers without a graph and rebuilds it inside `backward`, so nothing can be differentiated with
        respect to what a layer computes.
        """
        wrapped = [(m, m.forward) for m in model.modules() if hasattr(m, "precheckpoint_forward")]
        for module, _ in wrapped:
            module.forward = partial(checkpoint, module.precheckpoint_forward, use_reentrant=False)
        try:
            yield
        finally:
            for module, forward in wrapped:
                module.forward = forward


def padding_index(model: nn.Module) -> int | None:
    """The padding index of a fairseq model's output side: its decoder's, else its encoder's."""
    for part in (getattr(model, "decoder", None), getattr(model, "encoder", None), model):
        for owner in (part, getattr(part, "embed_tokens", None), getattr(part, "sentence_encoder", None)):
            index = getattr(owner, "padding_idx", None)
            if index is not None:
                return int(index)
        dictionary = getattr(part, "dictionary", None)
        if hasattr(dictionary, "pad"):
            return int(dictionary.pad())
    return None


BACKEND = FairseqBackend
