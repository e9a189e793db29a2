"""What fairseq's tasks on sentences need on disk: a folder an input, each with its dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def check_folders(data: str, parts: Sequence[str]) -> None:
    """Refuse a data folder that fairseq-preprocess has not filled, before fairseq fails in it.

    Args:
        data: the task's data folder.
        parts: its subfolders that need a `dict.txt`.

    Raises:
        ValueError: the folder or one of these is missing.
    """
    folder = Path(str(data))
    if not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist; give the one with {' and '.join(parts)}")
    for part in parts:
        if not (folder / part / "dict.txt").is_file():
            raise ValueError(f"the data folder {folder} holds no {part}/dict.txt; make it with fairseq-preprocess")
