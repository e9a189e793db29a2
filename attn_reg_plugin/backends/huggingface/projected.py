"""Attention of older families, which project queries, keys and values and compute the rest in their modules.

Encoders made after BERT (MegatronBERT, RemBERT, RoFormer; MPNet, with a bias by relative position) and translators and
decoders made after BART (LED's decoder, MVP, TrOCR, XGLM), for self and cross attention, with keys of a cache.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.backends.huggingface.ordinary import attend, computes, heads_of, joined, refuse

#: what families call the projections of queries, keys and values, and that of the output; without a name there is none
PROJECTIONS = (("query", "key", "value", ""), ("q_proj", "k_proj", "v_proj", "out_proj"), ("q", "k", "v", "o"))


def cached(
    module: nn.Module, encoded: bool, cache: Any, project: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, S, D), with those of the cache; those of an encoder are put into it once.

    Args:
        encoded: whether they are an encoder's, for cross attention.
        cache: a `Cache` of transformers, an `EncoderDecoderCache`, or None.
        project: computes those of the states at hand.
    """
    if cache is None:
        return project()
    both = hasattr(cache, "cross_attention_cache")
    if both and encoded and cache.is_updated.get(module.layer_idx):
        known = cache.cross_attention_cache.layers[module.layer_idx]
        return known.keys, known.values
    if both and encoded:
        cache.is_updated[module.layer_idx] = True
    chosen = (cache.cross_attention_cache if encoded else cache.self_attention_cache) if both else cache
    return chosen.update(*project(), module.layer_idx)


@computes(
    "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention",
    "mpnet.modeling_mpnet.MPNetSelfAttention",
    "mvp.modeling_mvp.MvpAttention",
    "rembert.modeling_rembert.RemBertSelfAttention",
    "roformer.modeling_roformer.RoFormerSelfAttention",
    "trocr.modeling_trocr.TrOCRAttention",
    "xglm.modeling_xglm.XGLMAttention",
)
def projected(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    encoder_hidden_states: Tensor | None = None,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    sinusoidal_pos: Tensor | None = None,
    attn_prompt: Tensor | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """hidden_states (B, T, C), attention_mask and position_bias broadcastable to (B, H, T, S).

    Args:
        encoder_hidden_states, key_value_states: the encoder's (B, S, C), for cross attention; a family has either name.
        sinusoidal_pos: (1, 1, T, D), turns queries and keys (and values) of self attention.

    Returns:
        (B, T, C), and with `output_attentions` the weights before dropout, (B, H, T, S).

    Raises:
        RuntimeError: there is a prompt of learned keys.
    """
    if attn_prompt is not None:
        refuse(call, "has learned keys (use_prompt=True), which cannot be regularized")
    queries, keys, values, out = next(names for names in PROJECTIONS if hasattr(module, names[0]))
    heads = module.num_heads if hasattr(module, "num_heads") else module.num_attention_heads
    encoded = key_value_states if encoder_hidden_states is None else encoder_hidden_states
    query = heads_of(getattr(module, queries)(hidden_states), heads)

    def project() -> tuple[Tensor, Tensor]:
        nonlocal query
        states = hidden_states if encoded is None else encoded
        key, value = (heads_of(getattr(module, name)(states), heads) for name in (keys, values))
        if sinusoidal_pos is not None and encoded is None:
            turned = query, key, *([value] if module.rotary_value else [])
            query, key, *rest = module.apply_rotary_position_embeddings(sinusoidal_pos, *turned)
            value = rest[0] if rest else value
        return key, value

    key, value = cached(module, encoded is not None, past_key_values, project)
    dropout_p = module.dropout.p if isinstance(module.dropout, nn.Dropout) else module.dropout
    output, weights = attend(
        call, query, key, value, attention_mask, position_bias, dropout_p=dropout_p, with_weights=output_attentions
    )
    return getattr(module, out, nn.Identity())(joined(output)), weights


@computes("led.modeling_led.LEDDecoderAttention")
def led_decoder(*given: Any, past_key_values: Any = None, **named: Any) -> tuple[Tensor, Tensor | None, Any]:
    """As `projected`; returns the cache as well."""
    return *projected(*given, past_key_values=past_key_values, **named), past_key_values
