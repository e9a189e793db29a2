"""DeBERTa's disentangled attention (He et al. 2021, arXiv 2006.03654, equation 4; version 3: arXiv 2111.09543).

Scores are those of the contents, plus content to position and position to content, all over sqrt(3 D). The last two are
the bias of the one attention computation, which also zeroes them in rows that lost all their keys. DeBERTa masks
queries as well as keys: the row of a padded query has no valid key, and is uniform over all of them, padding included.
Where padding comes first, a classifier reads such a row.
"""

from typing import Any

from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.backends.huggingface.attention import padded_queries
from attn_reg_plugin.backends.huggingface.ordinary import attend, computes, joined, refuse


def _mixes_heads(module: nn.Module) -> str | None:
    """Talking heads make outputs of several maps at once."""
    mixes = getattr(module, "talking_head", False)
    return "mixes its heads' maps (talking_head=True), which cannot be regularized" if mixes else None


@computes("deberta.modeling_deberta.DisentangledSelfAttention", refusal=_mixes_heads)
def deberta(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The first version: hidden_states (B, T, C), attention_mask (B, 1, T, S) of 0 and 1.

    Returns:
        (B, T, C), and with `output_attentions` the weights before dropout, (B, H, T, S). Other `query_states`, which
        transformers' own code cannot compute either, are a RuntimeError.
    """
    if query_states is not None:
        refuse(call, "was given query_states, which cannot be regularized")
    query, key, value = module.transpose_for_scores(module.in_proj(hidden_states)).chunk(3, dim=-1)
    value = value + module.transpose_for_scores(module.v_bias[None, None, :])
    bias = None
    if call.uniform:
        query = key = value
    else:
        factor = 1 + len(module.pos_att_type)
        query = query + module.transpose_for_scores(module.q_bias[None, None, :])
        query = query * (query.size(-1) * factor) ** -0.5
        if module.relative_attention and rel_embeddings is not None and relative_pos is not None:
            positions = module.pos_dropout(rel_embeddings)
            bias = module.disentangled_att_bias(query, key, relative_pos, positions, factor)
    return _attended(module, call, query, key, value, attention_mask, bias, 1.0, output_attentions)


@computes("deberta_v2.modeling_deberta_v2.DisentangledSelfAttention")
def deberta_v2(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Versions 2 and 3, as the first one; query_states (B, T, C) ask in place of the hidden states."""
    heads = module.num_attention_heads
    asking = hidden_states if query_states is None else query_states
    value = module.transpose_for_scores(module.value_proj(hidden_states), heads)
    bias, factor = None, 1 + sum(kind in module.pos_att_type for kind in ("c2p", "p2c"))
    if call.uniform:
        query, key = value[:, :1].expand(-1, asking.size(1), -1), value
    else:
        query = module.transpose_for_scores(module.query_proj(asking), heads)
        key = module.transpose_for_scores(module.key_proj(hidden_states), heads)
        if module.relative_attention:
            positions = module.pos_dropout(rel_embeddings)
            bias = module.disentangled_attention_bias(query, key, relative_pos, positions, factor)
    query, key, value = (states.unflatten(0, (-1, heads)) for states in (query, key, value))
    bias = bias.unflatten(0, (-1, heads)) if isinstance(bias, Tensor) else None
    scale = (query.size(-1) * factor) ** -0.5
    return _attended(module, call, query, key, value, attention_mask, bias, scale, output_attentions)


def _attended(
    module: nn.Module,
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    bias: Any,
    scale: float,
    with_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return output and weights of either version; a bias to which no kind of position contributes is the number 0."""
    valid, bias = mask.bool(), bias if isinstance(bias, Tensor) else None
    options = {"scale": scale, "dropout_p": module.dropout.p, "with_weights": with_weights}
    output, weights = attend(call, query, key, value, valid, bias, **options)
    return joined(padded_queries(output, value, valid)), weights
