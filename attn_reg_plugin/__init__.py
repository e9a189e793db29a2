"""attn_reg_plugin: attention regularizers (AD-DROP and relatives) for fairseq, Hugging Face and PyTorch.

Importing it needs torch only. It also allows the few types that fairseq checkpoints hold to be read by
`torch.load(weights_only=True)`, PyTorch's default: nothing else in a pickle is run.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any


def _is_command_line() -> bool:
    """Whether this process is `attn-reg`: its help answers without torch, which `cli` imports once a command runs."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return name == "attn-reg" or (name == "-m" and "attn_reg_plugin.cli" in sys.orig_argv)


if TYPE_CHECKING or not _is_command_line():
    from attn_reg_plugin import backends as _backends
    from attn_reg_plugin.attention import (
        AttentionSite,
        candidate_region,
        drop_candidates,
        find_sites,
        gradient_attribution,
        recording,
        regularized_attention,
    )
    from attn_reg_plugin.attention.selection import register_backend
    from attn_reg_plugin.checkpoints import allow_checkpoint_types
    from attn_reg_plugin.regularizers import (
        ADDrop,
        AttendOut,
        AttentionDropout,
        AttentionLayerDrop,
        HeadDrop,
        HiddenCut,
        LayerDrop,
        RDrop,
        ScheduledDropout,
        attach,
        build,
    )

    if TYPE_CHECKING:
        from attn_reg_plugin.huggingface import AttnRegCallback as AttnRegCallback
        from attn_reg_plugin.lightning import LightningCallback as LightningCallback

    allow_checkpoint_types()
    del _backends

__all__ = [
    "ADDrop",
    "AttendOut",
    "AttentionDropout",
    "AttentionLayerDrop",
    "AttentionSite",
    "HeadDrop",
    "HiddenCut",
    "LayerDrop",
    "RDrop",
    "ScheduledDropout",
    "attach",
    "build",
    "candidate_region",
    "drop_candidates",
    "find_sites",
    "gradient_attribution",
    "recording",
    "register_backend",
    "regularized_attention",
]


def __getattr__(name: str) -> Any:
    """The callbacks, which import transformers or Lightning, once they are asked for."""
    face = {"AttnRegCallback": "huggingface", "LightningCallback": "lightning"}.get(name)
    if face is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{face}"), name)
