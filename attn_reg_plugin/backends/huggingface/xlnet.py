"""XLNet's relative attention (Yang et al. 2019, arXiv 1906.08237), of the content stream and of the query stream.

With permutation masks both streams run the same attention: the site has a mask for each of its two calls.
"""

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.backends.huggingface.attention import padded_queries
from attn_reg_plugin.backends.huggingface.ordinary import attend, computes


@computes("xlnet.modeling_xlnet.XLNetRelativeAttention", method="rel_attn_core", time_first=True)
def xlnet(
    module: nn.Module,
    call: AttentionCall,
    q_head: Tensor,
    k_head_h: Tensor,
    v_head_h: Tensor,
    k_head_r: Tensor,
    seg_mat: Tensor | None = None,
    attn_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q_head (T, B, H, D), k_head_h and v_head_h (S, B, H, D), k_head_r (T + S, B, H, D), attn_mask (T, S, B, 1 or H).

    In the mask 1 is masked; seg_mat, (T, S, B, 2), is whether two tokens are of one segment.

    Returns:
        (T, B, H, D), and with `output_attentions` the weights before dropout, (T, S, B, H).
    """
    key, value = (states.permute(1, 2, 0, 3) for states in (k_head_h, v_head_h))
    query = (q_head + module.r_w_bias).permute(1, 2, 0, 3)
    bias = None if call.uniform else _positions(module, q_head, k_head_r, seg_mat, key.size(-2))
    valid = None if attn_mask is None else attn_mask.permute(2, 3, 0, 1) == 0
    options = {"scale": module.scale, "dropout_p": module.dropout.p, "with_weights": output_attentions}
    output, weights = attend(call, query, key, value, valid, bias, **options)
    output = output if valid is None else padded_queries(output, value, valid)
    output = output.permute(2, 0, 1, 3)
    return output if weights is None else (output, weights.permute(2, 3, 0, 1))


def _positions(module: nn.Module, query: Tensor, positions: Tensor, segments: Tensor | None, keys: int) -> Tensor:
    """Compute the scores of relative positions and segments, (B, H, T, S), which are added to the others."""
    scores = torch.einsum("ibnd,jbnd->bnij", query + module.r_r_bias, positions)
    scores = module.rel_shift_bnij(scores, klen=keys)
    if segments is not None:
        same = torch.einsum("ibnd,snd->ibns", query + module.r_s_bias, module.seg_embed)
        scores = scores + torch.einsum("ijbs,ibns->bnij", segments, same)
    return scores * module.scale
