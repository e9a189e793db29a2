"""Older families of transformers that keep their keys and values in a cache, and compute attention in their modules.

Encoders made after BERT (MegatronBERT, RemBERT, RoFormer) and translators and decoders made after BART (LED's decoder,
MVP, TrOCR, XGLM), for self and cross attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.backends.huggingface.ordinary import attend, computes, heads_of, joined

#: keys and values of a module's states, (B, H, S, D) each
Project = Callable[[Tensor], tuple[Tensor, Tensor]]


def cached(
    module: nn.Module, states: Tensor, encoded: Tensor | None, cache: Any, project: Project
) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, S, D), with those of the cache; those of an encoder are put into it once.

    Args:
        states: of the module's own stack (B, T, C).
        encoded: the encoder's (B, S, C), for cross attention.
        cache: a `Cache` of transformers, an `EncoderDecoderCache`, or None.
    """
    layer, both = module.layer_idx, hasattr(cache, "cross_attention_cache")
    if encoded is not None and both and cache.is_updated.get(layer):
        known = cache.cross_attention_cache.layers[layer]
        return known.keys, known.values
    keys_and_values = project(states if encoded is None else encoded)
    if cache is None:
        return keys_and_values
    if both and encoded is not None:
        cache.is_updated[layer] = True
        cache = cache.cross_attention_cache
    elif both:
        cache = cache.self_attention_cache
    return cache.update(*keys_and_values, layer)


@computes(
    "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention", "rembert.modeling_rembert.RemBertSelfAttention"
)
def encoder(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    rotated: Callable[..., tuple[Tensor, ...]] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """hidden_states (B, T, C), encoder_hidden_states (B, S, C), attention_mask broadcastable to (B, H, T, S).

    Args:
        rotated: turns queries, keys and values by their positions.

    Returns:
        (B, T, C), and with `output_attentions` the weights before dropout, (B, H, T, S).
    """
    heads = module.num_attention_heads
    query = heads_of(module.query(hidden_states), heads)

    def project(states: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal query
        key, value = heads_of(module.key(states), heads), heads_of(module.value(states), heads)
        if rotated is not None:
            query, key, value = rotated(query, key, value)
        return key, value

    key, value = cached(module, hidden_states, encoder_hidden_states, past_key_values, project)
    dropout_p = module.dropout.p
    output, weights = attend(
        call, query, key, value, attention_mask, dropout_p=dropout_p, with_weights=bool(output_attentions)
    )
    return joined(output), weights


@computes("roformer.modeling_roformer.RoFormerSelfAttention")
def roformer(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `encoder`; sinusoidal_pos (1, 1, T, D) turns queries and keys (and values) of self attention."""

    def rotated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if module.rotary_value:
            return module.apply_rotary_position_embeddings(sinusoidal_pos, query, key, value)
        return *module.apply_rotary_position_embeddings(sinusoidal_pos, query, key), value

    turns = encoder_hidden_states is None and sinusoidal_pos is not None
    return encoder(
        module,
        call,
        hidden_states,
        attention_mask,
        encoder_hidden_states,
        rotated=rotated if turns else None,
        **others,
    )


@computes("mvp.modeling_mvp.MvpAttention", "trocr.modeling_trocr.TrOCRAttention", "xglm.modeling_xglm.XGLMAttention")
def translator(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    attn_prompt: Tensor | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """hidden_states (B, T, C), key_value_states (B, S, C), attention_mask broadcastable to (B, 1, T, S).

    Returns:
        (B, T, C), and with `output_attentions` the weights before dropout, (B, H, T, S).

    Raises:
        RuntimeError: there is a prompt of learned keys.
    """
    if attn_prompt is not None:
        raise RuntimeError(f"{call.name} ({call.path}) has learned keys (use_prompt=True), which cannot be regularized")
    heads = module.num_heads
    query = heads_of(module.q_proj(hidden_states), heads)

    def project(states: Tensor) -> tuple[Tensor, Tensor]:
        return heads_of(module.k_proj(states), heads), heads_of(module.v_proj(states), heads)

    key, value = cached(module, hidden_states, key_value_states, past_key_values, project)
    output, weights = attend(
        call, query, key, value, attention_mask, dropout_p=module.dropout, with_weights=bool(output_attentions)
    )
    return module.out_proj(joined(output)), weights


@computes("led.modeling_led.LEDDecoderAttention")
def led_decoder(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    *others: Any,
    **named: Any,
) -> tuple[Tensor, Tensor | None, Any]:
    """As `translator`; returns the cache as well."""
    return *translator(
        module, call, hidden_states, key_value_states, past_key_values, *others, **named
    ), past_key_values
