"""A method's state in a Trainer checkpoint: written whole or not at all, and read with care."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from attn_reg_plugin.checkpoints import load_weights


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state`; after an error nothing half-written is left.

    Raises:
        OSError: it cannot be written, such as on a full disk.
    """
    unfinished = path.with_suffix(".tmp")
    try:
        torch.save(state, unfinished)
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):  # torch's for a disk that is full
            raise OSError(f"{path} cannot be written: {error}") from error
        raise


def read_state(path: Path) -> dict[str, Any]:
    """The state in `path`; nothing but tensors, plain containers and allowed types is made of it.

    Raises:
        ValueError: it is damaged, holds other types, or is no state; the sentence says how to go on.
    """
    try:
        state = load_weights(path)
    except ValueError as error:
        raise ValueError(f"{error}; {_how_to_go_on(path)}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not the state of a method; {_how_to_go_on(path)}")
    return state


def continued(path: Path, load: Callable[..., Any], *args: Any) -> Any:
    """`load(*args)`, which takes over the state that `path` held.

    Raises:
        ValueError: entries are missing, or belong to other sites or another method.
    """
    try:
        return load(*args)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error).strip().splitlines()[0].rstrip(":.")
        raise ValueError(
            f"{path} is not the state of this method on this model's sites ({what}); {_how_to_go_on(path)}"
        ) from error


def _how_to_go_on(path: Path) -> str:
    anew = f"delete {path.name} to start the method anew from the checkpoint's weights"
    return f"{anew}, or continue from another checkpoint"
