"""State that is too large for every checkpoint, in a file of its own beside them.

A checkpoint of update N finds its state as `attn_reg_state_N.pt` in the same folder, so `checkpoint_best.pt` stays as
small as a plain one. Files are written whole or not at all, and kept as long as a checkpoint may need them: the newest
and the one before for `checkpoint_last.pt` (a run may be killed between the two writes), and those of interval
checkpoints.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Sidecar:
    """The states in one checkpoint folder.

    Args:
        folder: fairseq's --save-dir; None keeps nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = None if not folder or folder.startswith("${") else Path(folder)
        self.last: int | None = None  # the state that `checkpoint_last.pt` needs until the next one is written

    def path(self, updates: int) -> Path:
        """The file that belongs to a checkpoint made after `updates` updates."""
        return self.folder / f"attn_reg_state_{updates}.pt"

    def save(self, updates: int, state: dict[str, Any]) -> None:
        """Write the state, and delete those that no checkpoint needs any more."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.path(updates).with_suffix(".tmp")
        torch.save(state, unfinished)
        os.replace(unfinished, self.path(updates))
        for old in self._kept() - {updates, self.last}:
            if not list(self.folder.glob(f"checkpoint_*_{old}.pt")):
                self.path(old).unlink()
        self.last = updates

    def load(self, updates: int) -> dict[str, Any] | None:
        """The state after `updates` updates; None at the start of a run, or with a warning if there is none."""
        if self.folder is None or updates == 0:
            return None
        if not self.path(updates).exists():
            logger.warning(
                f"no {self.path(updates).name} in {self.folder}: the method starts anew from the checkpoint's weights"
            )
            return None
        self.last = updates
        return torch.load(self.path(updates), map_location="cpu", weights_only=True)

    def repair_last(self) -> None:
        """Finish a copy to `checkpoint_last.pt` that a kill interrupted.

        fairseq writes one checkpoint whole and copies it to the other names, byte by byte. If the last one cannot be
        read, the newest other checkpoint is what was being copied.
        """
        if self.folder is None:
            return
        last = self.folder / "checkpoint_last.pt"
        if not last.exists() or zipfile.is_zipfile(last):
            return
        others = [path for path in self.folder.glob("checkpoint*.pt") if path != last and zipfile.is_zipfile(path)]
        if not others:
            return
        source = max(others, key=lambda path: path.stat().st_mtime_ns)
        logger.warning(f"{last} is incomplete: made anew from {source.name}")
        unfinished = last.with_suffix(f".{os.getpid()}.tmp")  # every data-parallel process comes by
        shutil.copyfile(source, unfinished)
        os.replace(unfinished, last)

    def _kept(self) -> set[int]:
        names = (re.fullmatch(r"attn_reg_state_(\d+)\.pt", path.name) for path in self.folder.iterdir())
        return {int(match[1]) for match in names if match}
