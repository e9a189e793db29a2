"""How sites are found in somebody's model: one backend a framework, imported once the framework is."""

from __future__ import annotations

from attn_reg_plugin.attention.sites import Backend, register_backend


def _fairseq() -> Backend:
    from attn_reg_plugin.backends.fairseq import FairseqBackend

    return FairseqBackend()


register_backend("fairseq", _fairseq)
