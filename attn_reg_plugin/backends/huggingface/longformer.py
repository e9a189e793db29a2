"""Longformer's attention (Beltagy et al. 2020, arXiv 2004.05150), also that of LED's encoder.

A token attends within a window and to the global tokens, and a global token, with projections of its own, to all. These
are two calls of one site: the first over (B, H, T, T), in which only windows and global keys are valid, the second over
(B, H, G, T) for G global tokens. So a site that has something to do needs memory that grows with T², as ordinary
attention does; one that has nothing to do runs Longformer's own code.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.backends.huggingface.ordinary import attend, computes, heads_of, joined, refuse


@computes("longformer.modeling_longformer.LongformerSelfAttention", "led.modeling_led.LEDEncoderSelfAttention")
def longformer(
    module: nn.Module,
    call: AttentionCall,
    hidden_states: Tensor,
    attention_mask: Tensor,
    is_index_masked: Tensor,
    is_index_global_attn: Tensor,
    is_global_attn: bool,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """hidden_states (B, T, C); attention_mask (B, T), of which the two bool ones tell what is padded and what global.

    Returns (B, T, C); the weights, which the model returns by window, are refused by a RuntimeError.
    """
    if output_attentions:
        refuse(call, "returns no weights while it is regularized; give output_attentions=False")
    heads, real = module.num_heads, ~is_index_masked
    value = heads_of(module.value(hidden_states), heads)
    query = key = value
    if not call.uniform:
        query, key = heads_of(module.query(hidden_states), heads), heads_of(module.key(hidden_states), heads)
    places = torch.arange(hidden_states.size(1), device=hidden_states.device)
    near = (places[:, None] - places).abs() <= module.one_sided_attn_window_size
    keys = (near & real[:, None, :]) | is_index_global_attn[:, None, :]
    valid = keys & (real & ~is_index_global_attn)[:, :, None]
    output, _ = attend(call, query, key, value, valid.unsqueeze(1), dropout_p=module.dropout)
    output = joined(output)
    if is_global_attn:
        output = _with_global_rows(module, call, hidden_states, real, is_index_global_attn, output)
    return (output,)


def _with_global_rows(
    module: nn.Module, call: AttentionCall, states: Tensor, real: Tensor, everywhere: Tensor, output: Tensor
) -> Tensor:
    """The output (B, T, C) of all tokens, with that of the global ones, bool `everywhere` (B, T), in their places."""
    heads, most = module.num_heads, int(everywhere.sum(-1).max())
    index = torch.argsort(everywhere.int(), dim=-1, descending=True, stable=True)[:, :most]
    there = everywhere.gather(-1, index)
    asking = states.gather(1, index.unsqueeze(-1).expand(-1, -1, states.size(-1)))
    further = call if call.uniform else _second_call(call.site)
    query, key, value = (
        heads_of(project(x), heads)
        for project, x in ((module.query_global, asking), (module.key_global, states), (module.value_global, states))
    )
    valid = there[:, None, :, None] & real[:, None, None, :]
    rows, _ = attend(further, query, key, value, valid, dropout_p=module.dropout)
    return output.masked_scatter(everywhere.unsqueeze(-1), joined(rows)[there].to(output.dtype))


def _second_call(site: AttentionSite) -> AttentionCall | None:
    """Enter the site once more; attention LayerDrop, which drops both calls or neither, draws nothing for this one."""
    request, site.request = site.request, replace(site.request, uniform=None)
    try:
        return site.enter()
    finally:
        site.request = request
