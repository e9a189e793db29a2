"""Checkpoints: where a run has one, which types it may hold, and writing a method's state beside it."""

import argparse
import pickle
import re
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from attn_reg_plugin.files import naming_writer, open_file, whole_file

#: how the files of weights are called that transformers reads from a folder
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
#: what torch says where it refuses a type that is not allowed
_FOREIGN = re.compile("unsupported (global|class)|can only (build|create)", re.IGNORECASE)
#: what to do about a state that cannot be used
ANEW = "move it away, and the method starts anew from the checkpoint's weights"


def allowed_types() -> list[Any]:
    """The types that fairseq writes into its checkpoints: configurations, and numpy numbers in the meters."""
    types: list = [argparse.Namespace, OrderedDict, defaultdict]
    try:
        import numpy as np
    except ImportError:
        return types
    numbers = (np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_)
    functions = [np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    return [*types, np.dtype, np.ndarray, *functions, *{type(np.dtype(number)) for number in numbers}]


def allow_checkpoint_types() -> None:
    """Let `torch.load` read fairseq checkpoints with `weights_only=True`, its default since torch 2.6.

    transformers' Trainer takes one of the types away when it continues a training; so reading here allows them again.
    """
    torch.serialization.add_safe_globals(allowed_types())


def load_weights(path: Path | str, mmap: bool = False) -> Any:
    """The content of a file of weights or a checkpoint: tensors, plain containers and allowed types, and no others.

    Args:
        path: `.safetensors`, or what `torch.save` wrote; a ValueError says that it is something else or damaged.
        mmap: leave tensors in the file until they are used, for who wants a few numbers.
    """
    path = Path(path)
    try:
        open_file(path).close()
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        allow_checkpoint_types()
        if not mmap and zipfile.is_zipfile(path):
            _check_sums(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # safetensors, torch and pickle each have their own for a damaged file
        if isinstance(error, pickle.UnpicklingError) and (zipfile.is_zipfile(path) or _FOREIGN.search(str(error))):
            raise ValueError(f"{path} holds other types than weights need, so it is not read") from None
        reason = type(error).__name__ if "\n" in str(error) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be read: it is damaged or isn't a file of weights ({reason})") from None


def _check_sums(path: Path) -> None:
    """Refuse an archive with a part whose bytes are not those that its checksum is of, which torch doesn't notice."""
    with zipfile.ZipFile(path) as archive:
        if (part := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {part} is wrong")


def check_weights(path: Path) -> None:
    """Refuse a file of weights that is not whole, as far as it shows without reading it: safetensors, an empty .bin."""
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt"):
                pass
        elif path.suffix == ".bin" and not path.stat().st_size:
            raise ValueError("it is empty")
    except OSError:
        raise
    except Exception as error:  # safetensors has one of its own
        raise ValueError(f"{path} cannot be read: it is damaged or isn't a file of weights ({error})") from None


def load_state(path: Path) -> dict[str, Any]:
    """The state of a method, kept in a file of its own, on the CPU.

    Args:
        path: what `save_state` wrote; a ValueError says that it is missing, damaged or something else, and what to do.
    """
    if not Path(path).exists():
        raise ValueError(f"there is no file {path}")
    try:
        state = load_weights(path)
    except ValueError as error:
        raise ValueError(f"{error}; {ANEW}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__} instead of a method's state; {ANEW}")
    missing = [key for key in ("epoch", "updates") if key not in state]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}, so it isn't a method's state; {ANEW}")
    return state


@contextmanager
def refuse_state(place: str | Path, method: str, advice: str = ANEW) -> Iterator[None]:
    """Around giving a state to a method: a ValueError says what does not fit.

    Args:
        place: the file, or what holds the state.
        method: what it is given to, for the message.
        advice: what to do.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        raise ValueError(
            f"{place}: the state of the method does not fit {method} on this model and its sites ({reason}); {advice}"
        ) from error


def save_state(path: Path, state: Any) -> None:
    """Write `state` to `path` by `torch.save`, whole or not at all; an OSError names `path`."""
    with whole_file(path) as unfinished, naming_writer(path):
        torch.save(state, unfinished)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of fairseq's, on the CPU; a ValueError says that it is damaged or something else."""
    state = load_weights(path)
    if not isinstance(state, dict) or "model" not in state:
        raise ValueError(f"{path} is not a fairseq checkpoint")
    return state


def settings_in(state: dict[str, Any], part: str) -> Any:
    """Return a part of the settings in a checkpoint of fairseq's, `model` or `task`, by attributes; None without it.

    Earlier versions of fairseq have those of all parts together.
    """
    settings = state.get("args") or (state.get("cfg") or {}).get(part)
    return SimpleNamespace(**settings) if isinstance(settings, dict) else settings


def find_checkpoint(run: Path, names: Sequence[str] = ("checkpoint_best.pt", "checkpoint_last.pt")) -> Path:
    """The checkpoint of a run: a file, or the first of `names` in a folder or its `checkpoints`."""
    if run.is_file():
        return run
    for name in names:
        for folder in (run, run / "checkpoints"):
            if (folder / name).is_file():
                return folder / name
    raise FileNotFoundError(f"{run} has no checkpoint; looked for {', '.join(names)}, there and in checkpoints/")
