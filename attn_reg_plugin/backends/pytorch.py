"""Sites in models of PyTorch's own layers: every `torch.nn.MultiheadAttention`, alone or in `torch.nn.Transformer*`."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.functional import attention_weights, regularized_attention
from attn_reg_plugin.attention.sites import AttentionSite

CROSS = re.compile(r"cross|encoder_attn|src_attn|enc_dec|encdec|memory", re.IGNORECASE)
DECODER = re.compile(r"(^|[._])decoder([._]|$)", re.IGNORECASE)
LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
#: what the attentions of PyTorch's own decoder layer are, by their name in it
DECODER_LAYER = {"self_attn": "self", "multihead_attn": "cross"}
#: packages whose models are other backends' affair
OTHERS = ("transformers.", "fairseq.")

#: additive masks from here down mean "masked"
_MASKED = -(10.0**4)


class RegularizedMultiheadAttention(nn.MultiheadAttention):
    """Takes the place of a `torch.nn.MultiheadAttention`: same parameters, same outputs when inactive.

    `adopt` changes a module in place and `release` changes it back. No hook is used: PyTorch's encoder layer leaves
    its fast path in evaluation for modules with hooks. While the site is inactive PyTorch's own forward runs. A
    subclass, as of a parametrized module, gets a class of its own, of both.

    Attributes:
        attn_site: the site.
        adopted: the class of the module before.
    """

    attn_site: AttentionSite
    adopted: type[nn.MultiheadAttention] = nn.MultiheadAttention

    @classmethod
    def adopt(cls, module: nn.MultiheadAttention, site: AttentionSite) -> None:
        """Put `site` into `module`."""
        module.__class__ = cls.over(type(module))
        module.attn_site = site

    @classmethod
    def over(cls, adopted: type[nn.MultiheadAttention]) -> type[RegularizedMultiheadAttention]:
        """The class of a module that had the class `adopted`."""
        if adopted is cls.adopted:
            return cls
        own = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reduced, "adopted": adopted}
        return type(f"Regularized{adopted.__name__}", (cls, adopted), own)

    def release(self) -> None:
        """Have the former class again."""
        del self.attn_site
        self.__class__ = _without_ours(type(self))

    def forward(
        self,
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

        `is_causal` is only a hint about `attn_mask`, which has to be there. `bias_k` and the zero of `add_zero_attn`
        are keys like the others, at the end.

        Returns:
            output, shaped as the query; and with `need_weights` the weights before dropout: (B, T, S), (B, H, T, S)
            without `average_attn_weights`, without B for a query without it.
        """
        call = None if is_causal and attn_mask is None else self.attn_site.enter()
        if call is None:
            return super().forward(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        batched = query.dim() == 3
        query, key, value = (self._batch_first(states, batched) for states in (query, key, value))
        q, k, v = self._projected(query, key, value, bare=call.uniform)
        valid, bias = self._masks(key_padding_mask, attn_mask, q)
        dropout_p = self.dropout if self.training else 0.0
        output = regularized_attention(q, k, v, valid=valid, site=call, dropout_p=dropout_p, bias=bias)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        weights = self._weights(call, q, k, valid, bias) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _weights(
        self, call: AttentionCall, query: Tensor, key: Tensor, valid: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The weights of a call, before dropout, (B, H, T, S)."""
        keep = None
        if call.uniform:
            keep = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        elif call.tape is None:
            keep = call.keep_mask((*query.shape[:-1], key.size(-2)), valid, query.device)
        return attention_weights(query, key, valid=valid, keep=keep, bias=bias)

    def _batch_first(self, states: Tensor, batched: bool) -> Tensor:
        """(B, T, C), whatever the module takes."""
        if not batched:
            return states.unsqueeze(0)
        return states if self.batch_first else states.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, bare: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, H, S, D); with `bare` the first two only have the shape."""
        if self._qkv_same_embed_dim:
            w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        else:
            w_q, w_k, w_v = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        b_q, b_k, b_v = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        v = self._heads(self._extended(F.linear(value, w_v, b_v), self.bias_v))
        if bare:
            return v.new_zeros(*v.shape[:2], query.size(1), self.head_dim), v.detach(), v
        k = self._heads(self._extended(F.linear(key, w_k, b_k), self.bias_k))
        return self._heads(F.linear(query, w_q, b_q)), k, v

    def _extended(self, projected: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values (B, S, C) with the learned one and the zero one at the end, if the module has them."""
        if learned is not None:
            learned = learned.to(projected.dtype).expand(projected.size(0), 1, -1)
            projected = torch.cat([projected, learned], 1)
        return F.pad(projected, (0, 0, 0, 1)) if self.add_zero_attn else projected

    def _heads(self, projected: Tensor) -> Tensor:
        """(B, S, C) to (B, H, S, D)."""
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, query: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """PyTorch's masks as `valid` (True = the key exists), and as a bias what of them is finite."""
        valid = bias = None
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.view(-1, 1, 1, key_padding_mask.size(-1))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.view(-1, self.num_heads, *attn_mask.shape[1:])
        for mask in (key_padding_mask, attn_mask):
            if mask is None:
                continue
            seen = mask > _MASKED if mask.is_floating_point() else ~mask
            extra = (self.bias_k is not None) + self.add_zero_attn
            if mask.is_floating_point():
                finite = F.pad(mask.masked_fill(~seen, 0.0).to(query.dtype), (0, extra))
                bias = finite if bias is None else bias + finite
            seen = F.pad(seen, (0, extra), value=True)
            valid = seen if valid is None else valid & seen
        return valid, bias


def _without_ours(kind: type[nn.MultiheadAttention]) -> type[nn.MultiheadAttention]:
    """The class without ours, which a parametrization may have put one of its own on meanwhile."""
    if not issubclass(kind, RegularizedMultiheadAttention):
        return kind
    if "adopted" in vars(kind):
        return kind.adopted
    members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    name = kind.__name__.replace("Regularized", "")
    return type(name, tuple(_without_ours(base) for base in kind.__bases__), members)


def _reduced(module: RegularizedMultiheadAttention, protocol: int) -> tuple[Any, ...]:
    """For pickles: the class is made anew. A parametrized module refuses."""
    return _made_anew, (module.adopted,), module.__getstate__()


def _made_anew(adopted: type[nn.MultiheadAttention]) -> RegularizedMultiheadAttention:
    kind = RegularizedMultiheadAttention.over(adopted)
    return kind.__new__(kind)


class PyTorchBackend:
    """Finds and opens `torch.nn.MultiheadAttention`; see `Backend`."""

    def find(self, model: nn.Module) -> list[AttentionSite]:
        """Every `MultiheadAttention` of `model`, in the order of `named_modules`, but for those in others' models.

        In a `torch.nn.TransformerDecoderLayer` `self_attn` is self and `multihead_attn` cross attention, both of the
        decoder. Elsewhere the path decides: `decoder` in it is the decoder; `cross`, `memory`, `encoder_attn`,
        `src_attn` or `enc_dec` is the decoder's cross attention. A subclass is a site unless it has a forward of
        its own.
        """
        sites, modules = [], dict(model.named_modules())
        others = tuple(f"{path}." for path, m in modules.items() if type(m).__module__.startswith(OTHERS) and path)
        if type(model).__module__.startswith(OTHERS):
            return []
        for path, module in modules.items():
            if isinstance(module, RegularizedMultiheadAttention):
                sites.append(module.attn_site)
                continue
            own = getattr(type(module), "forward", None) is nn.MultiheadAttention.forward
            if own and not path.startswith(others):
                sites.append(self._site(path, module, modules.get(path.rpartition(".")[0])))
        return sites

    def _site(self, path: str, module: nn.Module, parent: nn.Module | None) -> AttentionSite:
        kind = "cross" if CROSS.search(path) else "self"
        own = isinstance(parent, nn.TransformerDecoderLayer)
        if own:
            kind = DECODER_LAYER.get(path.rpartition(".")[2], kind)
        layer = LAYER.search(path)
        return AttentionSite(
            stack="decoder" if own or kind == "cross" or DECODER.search(path) else "encoder",
            kind=kind,
            layer=int(layer[1]) if layer else 0,
            path=path,
            module=module,
            backend=self,
        )

    def open(self, site: AttentionSite) -> None:
        """Put the site into its module."""
        RegularizedMultiheadAttention.adopt(site.module, site)

    def close(self, site: AttentionSite) -> None:
        """Take it out again."""
        site.module.release()

    def time_first(self, site: AttentionSite) -> bool:
        """Whether states around it are (T, B, C), as its module says."""
        return not site.module.batch_first


BACKEND = PyTorchBackend
