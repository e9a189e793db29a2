"""fairseq's multi-head attention with an attention site in it."""

from __future__ import annotations

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from attn_reg_plugin.attention.functional import attention_weights, regularized_attention
from attn_reg_plugin.attention.sites import AttentionSite

#: attention masks with values from here down mean "masked": fairseq writes -1e8 (fp32) and -1e4 (fp16) for -inf
_MASKED = -(10.0**4)


class RegularizedMultiheadAttention(MultiheadAttention):
    """Takes the place of a `MultiheadAttention`: same parameters, same `state_dict`, same outputs when inactive.

    `RegularizedMultiheadAttention.adopt(module, site)` changes a module in place and `release` changes it back, so
    that tied parameters, optimizers and references to the module stay valid. While its site is inactive (evaluation,
    generation, incremental decoding, plain epochs) fairseq's own forward runs, untouched.

    Attributes:
        attn_site: the site.
    """

    attn_site: AttentionSite

    @classmethod
    def adopt(cls, module: MultiheadAttention, site: AttentionSite) -> None:
        """Put `site` into `module`.

        Raises:
            ValueError: the module has extra keys or another kernel, which cannot be masked position by position.
        """
        odd = {
            "bias_k": module.bias_k is not None,
            "add_zero_attn": module.add_zero_attn,
            "xformers": module.use_xformers,
        }
        unsupported = ", ".join(name for name, present in odd.items() if present)
        if unsupported:
            raise ValueError(f"{site.name} ({site.path}) uses {unsupported}, which cannot be regularized")
        module.__class__ = cls
        module.attn_site = site

    def release(self) -> None:
        """Become a plain `MultiheadAttention` again."""
        del self.attn_site
        self.__class__ = MultiheadAttention

    def forward(
        self,
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
        plain = incremental_state is not None or before_softmax
        call = None if plain else self.attn_site.enter()
        if call is None:
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                incremental_state,
                need_weights,
                static_kv,
                attn_mask,
                before_softmax,
                need_head_weights,
            )
        valid, bias = self._masks(key_padding_mask, attn_mask, query)
        v = self._heads(self.v_proj(value))
        if call.uniform:  # needs neither projection; the queries count only by their number
            q, k = (v.new_empty(v.size(0), self.num_heads, length, 0) for length in (query.size(0), v.size(2)))
        else:
            q, k = self._heads(self.q_proj(query)), self._heads(self.k_proj(key))
        dropout_p = self.dropout_module.p if self.dropout_module.training else 0.0
        output = regularized_attention(
            q, k, v, valid=valid, site=call, dropout_p=dropout_p, scale=self.scaling, bias=bias
        )
        output = self.out_proj(output.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), self.embed_dim))
        weights = None
        if (need_weights or need_head_weights) and call.tape is None and not call.uniform:
            keep = call.keep_mask((*q.shape[:-1], k.size(-2)), valid, q.device)
            weights = attention_weights(q, k, valid=valid, keep=keep, scale=self.scaling, bias=bias)
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        return output, weights

    def _heads(self, projected: Tensor) -> Tensor:
        """(T, B, C) to (B, H, T, D)."""
        length, batch, _ = projected.shape
        return projected.view(length, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def _masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, query: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """fairseq's masks as `valid` (True = the key exists), and as a bias what of `attn_mask` is finite."""
        valid = bias = None
        if key_padding_mask is not None:
            valid = ~key_padding_mask.bool()[:, None, None, :]
        if attn_mask is not None:
            attn_mask = attn_mask.view(-1, 1, *attn_mask.shape[-2:])
            if attn_mask.size(0) not in (1, query.size(1)):
                attn_mask = attn_mask.view(query.size(1), self.num_heads, *attn_mask.shape[-2:])
            if attn_mask.is_floating_point():
                seen = attn_mask > _MASKED
                bias = attn_mask.masked_fill(~seen, 0.0).to(query.dtype)
            else:
                seen = ~attn_mask.to(torch.bool)
            valid = seen if valid is None else valid & seen
        return valid, bias
