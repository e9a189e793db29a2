"""Sites in fairseq models: every `MultiheadAttention`, wherever it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fairseq.modules import MultiheadAttention
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.modules.multihead_attention import RegularizedMultiheadAttention


class FairseqBackend:
    """Finds and opens the attention of any fairseq model; see `Backend`."""

    def find(self, model: nn.Module) -> list[AttentionSite]:
        """Every stock `MultiheadAttention` of `model`, in the order of `named_modules`.

        A subclass with a forward of its own is not among them: replacing its forward would change the model.
        """
        sites = []
        for path, module in model.named_modules():
            if isinstance(module, RegularizedMultiheadAttention):
                sites.append(module.attn_site)
            elif type(module) is MultiheadAttention:
                layer = re.search(r"\.(\d+)\.", f".{path}.")
                sites.append(
                    AttentionSite(
                        stack="decoder" if re.search(r"(^|\.)decoder(\.|$)", path) else "encoder",
                        kind="cross" if module.encoder_decoder_attention else "self",
                        layer=int(layer[1]) if layer else 0,
                        path=path,
                        module=module,
                        backend=self,
                    )
                )
        return sites

    def open(self, site: AttentionSite) -> None:
        """Put the site into its module."""
        RegularizedMultiheadAttention.adopt(site.module, site)

    def close(self, site: AttentionSite) -> None:
        """Take it out again."""
        site.module.release()

    def time_first(self, site: AttentionSite) -> bool:
        """Yes: states in layers are (T, B, C)."""
        return True

    def describe(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the forward's arguments show: `token_mask` (B, T), True where the output is a real token.

        A decoder's output at t belongs to its input at t, so both are padded alike, and it predicts a piece of the
        vocabulary, of which padding is never meant: `padding_label`. `adaptive_softmax` is the decoder's, if it gives
        the features of one instead of logits.
        """
        named = dict(zip(("src_tokens", "src_lengths", "prev_output_tokens"), args, strict=False)) | kwargs
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
