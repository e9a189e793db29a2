"""Reading checkpoints: where a run has one, and which types it may hold besides tensors and plain containers.

And writing what is kept beside them: whole or not at all.
"""

from __future__ import annotations

import argparse
import errno
import pickle
import re
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attn_reg_plugin.files import naming_writer, open_file, whole_file

#: how the files of weights are called that transformers reads from a folder
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
#: in torch's refusals of a type that is not allowed
_FOREIGN = re.compile("unsupported (global|class)|can only (build|create)", re.IGNORECASE)
#: of a system that does not let us read a file now, whatever is in it
_HINDRANCES = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE)
#: what to do about a state that cannot be used
ANEW = "move it away, and the method starts anew from the checkpoint's weights"


class ForeignTypes(ValueError):
    """A file is whole, but holds types that are not allowed."""


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
        ValueError: it isn't such a file, is damaged, or holds other types.
    """
    try:
        open_file(path).close()
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        allow_checkpoint_types()
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # safetensors, torch and pickle each have their own for a damaged file
        if isinstance(error, pickle.UnpicklingError) and (zipfile.is_zipfile(path) or _FOREIGN.search(str(error))):
            raise ForeignTypes(f"{path} holds other types than weights need, so it is not read") from None
        reason = type(error).__name__ if "\n" in str(error) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be read: it is damaged or isn't a file of weights ({reason})") from None


def is_damaged(path: Path) -> bool:
    """Whether a checkpoint cannot be read because it is not whole, in any format of torch's; it is read to know.

    One that is refused for the types in it is whole. So may be one that the system does not let us read now, for want
    of memory or permission.
    """
    try:
        load_weights(path, mmap=zipfile.is_zipfile(path))
    except ForeignTypes:
        return False
    except ValueError as error:
        reason = error.__context__
        hindered = isinstance(reason, OSError) and reason.errno in _HINDRANCES
        return not (hindered or isinstance(reason, MemoryError) or "not enough memory" in str(reason))
    except OSError:
        return False
    return False


def load_state(path: Path, needed: Iterable[str] = ("epoch", "updates")) -> dict[str, Any]:
    """The state of a method, kept in a file of its own, on the CPU.

    Args:
        path: what `save_state` wrote.
        needed: the keys that it must have.

    Raises:
        ValueError: it is damaged, holds other types, isn't a state or lacks a key; the sentence says what to do.
    """
    try:
        state = load_weights(path)
    except ValueError as error:
        raise ValueError(f"{error}; {ANEW}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__} instead of a method's state; {ANEW}")
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}, so it isn't a method's state; {ANEW}")
    return state


@contextmanager
def refuse_state(place: str | Path, method: str, advice: str = ANEW) -> Iterator[None]:
    """While a state is given to a method: what does not fit is reported with its place.

    Args:
        place: the file, or what holds the state.
        method: what it is given to, for the message.
        advice: what to do.

    Raises:
        ValueError: the state is damaged, or another method's or model's.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        raise ValueError(
            f"{place}: the state of the method does not fit {method} on this model and its sites ({reason}); {advice}"
        ) from error


def save_state(path: Path, state: Any) -> None:
    """Write `state` to `path` by `torch.save`, whole or not at all; nothing half-written stays after an error.

    Raises:
        OSError: with `path`: the disk is full, or the folder cannot be written.
    """
    with whole_file(path) as unfinished, naming_writer(path):
        torch.save(state, unfinished)


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
