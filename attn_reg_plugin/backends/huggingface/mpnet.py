"""MPNet's attention (Song et al. 2020, arXiv 2004.09297): BERT's with a bias by relative position."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.backends.huggingface.ordinary import attend, computes, heads_of, joined


@computes("mpnet.modeling_mpnet.MPNetSelfAttention")
def mpnet(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, ...]:
    """hidden_states (B, T, C), position_bias (B, H, T, T), attention_mask broadcastable to it.

    Returns:
        (B, T, C), and with `output_attentions` the weights before dropout, (B, H, T, T).
    """
    heads = module.num_attention_heads
    value = heads_of(module.v(hidden_states), heads)
    query = key = value
    if not call.uniform:
        query, key = heads_of(module.q(hidden_states), heads), heads_of(module.k(hidden_states), heads)
    output, weights = attend(
        call,
        query,
        key,
        value,
        attention_mask,
        position_bias,
        dropout_p=module.dropout.p,
        with_weights=output_attentions,
    )
    output = module.o(joined(output))
    return (output, weights) if output_attentions else (output,)
