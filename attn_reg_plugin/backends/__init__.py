"""How sites are found in somebody's model: one backend a framework, imported once the framework is.

fairseq's models, transformers' models (whatever calls the attention interface), and models of PyTorch's own attention
layers. Modules that hold an `AttentionSite` themselves need no backend.
"""

from __future__ import annotations

from attn_reg_plugin.attention.sites import Backend, register_backend


def _fairseq() -> Backend:
    from attn_reg_plugin.backends.fairseq import FairseqBackend

    return FairseqBackend()


def _huggingface() -> Backend:
    from attn_reg_plugin.backends.huggingface import HuggingFaceBackend

    return HuggingFaceBackend()


def _pytorch() -> Backend:
    from attn_reg_plugin.backends.pytorch import PyTorchBackend

    return PyTorchBackend()


register_backend("fairseq", _fairseq)
# transformers loads its parts when they are used: without this one there is no model yet
register_backend("transformers.modeling_utils", _huggingface)
register_backend("torch", _pytorch)
