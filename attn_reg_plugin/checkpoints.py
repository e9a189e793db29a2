"""Which types a checkpoint may hold besides tensors and plain containers."""

from __future__ import annotations

import argparse
from collections import OrderedDict, defaultdict

import torch


def allowed_types() -> list[type | tuple[type, str]]:
    """The types that fairseq writes into its checkpoints: configurations, and numpy numbers in the meters.

    numpy 1 wrote two of them under other names, given as pairs.
    """
    types: list = [argparse.Namespace, OrderedDict, defaultdict]
    try:
        import numpy as np
    except ImportError:
        return types
    numbers = (np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_)
    reconstruct = np.array(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    return [
        *types,
        np.dtype,
        np.ndarray,
        reconstruct,
        scalar,
        *{type(np.dtype(number)) for number in numbers},
    ]


def allow_checkpoint_types() -> None:
    """Let `torch.load` read fairseq checkpoints with `weights_only=True`, its default since torch 2.6."""
    torch.serialization.add_safe_globals(allowed_types())
