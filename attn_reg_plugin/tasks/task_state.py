"""What a task kept in the checkpoint that its training goes on from; fairseq gives tasks no state back."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from attn_reg_plugin.checkpoints import load_weights


def task_state(checkpoint: Path, updates: int) -> dict[str, Any]:
    """The task's state in a checkpoint.

    Args:
        checkpoint: its file.
        updates: made so far, by which it is known as the one that the training goes on from.

    Returns:
        The state; empty at the start, or where the file is another, is missing or cannot be read.
    """
    if not updates or not checkpoint.is_file():
        return {}
    try:
        kept = load_weights(checkpoint, mmap=zipfile.is_zipfile(checkpoint))
        return kept["task_state"] if kept["optimizer_history"][-1]["num_updates"] == updates else {}
    except (KeyError, IndexError, TypeError, ValueError):
        return {}
