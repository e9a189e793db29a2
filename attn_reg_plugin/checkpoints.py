"""Reading checkpoints: where a run has one, and which types it may hold besides tensors and plain containers."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    """Let `torch.load` read fairseq checkpoints with `weights_only=True`, its default since torch 2.6.

    Importing the package does so. Whoever allows one of the types for a while, as transformers' Trainer does when it
    continues a training, takes it away for all at the end; so reading here and the end of a callback allow them again.
    """
    torch.serialization.add_safe_globals(allowed_types())


def load_weights(path: Path, mmap: bool = False) -> Any:
    """What a file of weights or a checkpoint holds; nothing but tensors, plain containers and allowed types is made.

    Args:
        path: `.safetensors`, or what `torch.save` wrote.
        mmap: leave tensors in the file until they are used, for who wants a few numbers.

    Raises:
        ValueError: it is no such file, is damaged, or holds other types.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        allow_checkpoint_types()
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # safetensors, torch and pickle each have their own for a damaged file
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise ValueError(f"{path} holds other types than weights need, so it is not read") from None
        reason = type(error).__name__ if "\n" in str(error) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be read: it is damaged or no file of weights ({reason})") from None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of fairseq's, on the CPU.

    Raises:
        ValueError: it is damaged, holds types that are not allowed, or is something else.
    """
    state = load_weights(path)
    if not isinstance(state, dict) or "model" not in state:
        raise ValueError(f"{path} is not a fairseq checkpoint")
    return state


def find_checkpoint(run: Path, names: Sequence[str] = ("checkpoint_best.pt", "checkpoint_last.pt")) -> Path:
    """The checkpoint of a run: a file, or one of a folder or its `checkpoints`.

    Args:
        names: what it may be called, the first that is there counts.

    Raises:
        FileNotFoundError: there is none.
    """
    if run.is_file():
        return run
    for name in names:
        for folder in (run, run / "checkpoints"):
            if (folder / name).is_file():
                return folder / name
    raise FileNotFoundError(f"{run} has no checkpoint; looked for {', '.join(names)}, there and in checkpoints/")
