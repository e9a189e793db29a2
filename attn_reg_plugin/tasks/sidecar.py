"""State that is too large for every checkpoint, in a file of its own beside them.

A checkpoint of update N finds its state as `attn_reg_state_N.pt` in the same folder, so `checkpoint_best.pt` stays as
small as a plain one. Files are written whole or not at all, and kept as long as a checkpoint may need them: the newest
and the one before for `checkpoint_last.pt` (a run may be killed between the two writes), and those of interval
checkpoints.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from attn_reg_plugin.checkpoints import ANEW, is_damaged, load_state, refuse_state, save_state
from attn_reg_plugin.files import TEMPORARY, whole_file
from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.base.distributed import object_from_first_rank, rank

logger = logging.getLogger(__name__)

#: what to do about a checkpoint whose state cannot be used
FROM_WEIGHTS = "use --finetune-from-model, and the method starts anew from its weights"


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

    def restored(self, file: str) -> Path:
        """Where fairseq's --restore-file is: its default is in this folder, any other as it was given."""
        return self.folder / file if self.folder is not None and file == "checkpoint_last.pt" else Path(file)

    def save(self, updates: int, state: dict[str, Any]) -> None:
        """Write the state, and delete those that no checkpoint needs any more.

        Raises:
            OSError: it cannot be written; nothing half-written is left.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for killed in self.folder.glob(f".attn_reg_state_*{TEMPORARY}*"):
            killed.unlink(missing_ok=True)
        save_state(self.path(updates), state)
        self._delete(self._kept() - {updates, self.last})
        self.last = updates

    def delete_last(self) -> None:
        """Delete `checkpoint_last.pt`, and the states that no other checkpoint needs."""
        if self.folder is not None and self.folder.is_dir():
            (self.folder / "checkpoint_last.pt").unlink(missing_ok=True)
            self._delete(self._kept())

    def _delete(self, states: set[int]) -> None:
        """Delete states, but those of interval checkpoints."""
        for updates in states:
            if not list(self.folder.glob(f"checkpoint_*_{updates}.pt")):
                self.path(updates).unlink()

    def load(self, updates: int) -> dict[str, Any] | None:
        """The state after `updates` updates; None at the start of a run, or with a warning if there is none.

        Raises:
            ValueError: it is damaged, or no state.
        """
        if self.folder is None or updates == 0:
            return None
        if not self.path(updates).exists():
            logger.warning(
                f"no {self.path(updates).name} in {self.folder}: the method starts anew from the checkpoint's weights"
            )
            return None
        self.last = updates
        return load_state(self.path(updates))

    def repair_last(self) -> None:
        """Finish a copy to `checkpoint_last.pt` that a kill interrupted.

        fairseq writes one checkpoint whole and copies it to the other names, byte by byte. If the last one cannot be
        read, the newest other checkpoint that can is what was being copied. What it takes the place of is kept, as
        `checkpoint_last.pt.damaged`. Rank 0 does it, the other ranks wait.

        Raises:
            ValueError: the copy cannot be written.
        """
        if self.folder is None:
            return
        problem = None
        if rank() == 0:
            try:
                self._repair(self.folder / "checkpoint_last.pt")
            except OSError as error:
                problem = f"{self.folder / 'checkpoint_last.pt'} is damaged and cannot be made anew: {error}"
        problem = object_from_first_rank(problem)
        if problem is not None:
            raise ValueError(problem)

    def _repair(self, last: Path) -> None:
        if not last.is_file() or not is_damaged(last):
            return
        others = [path for path in self.folder.glob("checkpoint*.pt") if path != last and path.is_file()]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        source = next((path for path in others if not is_damaged(path)), None)
        if source is None:
            logger.warning(f"{last} is damaged, and no other checkpoint beside it can be read; move it to begin anew")
            return
        with whole_file(last) as unfinished:
            shutil.copyfile(source, unfinished)
            kept = _free_name(last.with_suffix(".pt.damaged"))
            os.link(last, kept)  # a second name: there is a last checkpoint at every moment
        logger.warning(f"{last} is damaged: made anew from {source.name}; the damaged one is kept as {kept.name}")

    def _kept(self) -> set[int]:
        names = (re.fullmatch(r"attn_reg_state_(\d+)\.pt", path.name) for path in self.folder.iterdir())
        return {int(match[1]) for match in names if match}


def _free_name(path: Path) -> Path:
    """`path`, or with the first number behind it that no file has."""
    names = (path if not n else path.with_name(f"{path.name}.{n}") for n in itertools.count())
    return next(name for name in names if not name.exists())


def continue_from(sidecar: Sidecar, regularizer: Regularizer, updates: int) -> None:
    """Give a method the state of an interrupted run, if there is one; on every rank.

    Args:
        sidecar: of the run.
        regularizer: attached and bound.
        updates: made so far, which name the state.

    Raises:
        ValueError: the state is damaged, or that of another model or other sites; on every rank.
    """
    state = problem = None
    if rank() == 0:
        try:
            state = sidecar.load(updates)
        except ValueError as error:
            if regularizer.dispensable_state:
                logger.warning(f"{error}; it is left out, and what it held is made anew")
            else:
                problem = str(error)
    state, problem = object_from_first_rank((state, problem))
    if problem is not None:
        raise ValueError(problem)
    if state is not None:
        _resume(regularizer, state, sidecar.path(updates), ANEW)


def continue_from_checkpoint(checkpoint: Path, regularizer: Regularizer, state: Any) -> None:
    """Give a method the small state that the task kept in the checkpoint, unless it is another method's.

    Args:
        checkpoint: that the training goes on from, for the sentence.
        regularizer: attached and bound.
        state: rank 0's, on every rank; None where nothing was kept.

    Raises:
        ValueError: the state is damaged, or does not fit the model.
    """
    if is_of(state, regularizer):
        _resume(regularizer, state, checkpoint, FROM_WEIGHTS)


def is_of(state: Any, regularizer: Regularizer) -> bool:
    """Whether there is a state, and not another method's; a damaged one is refused where it is loaded."""
    other = isinstance(state, dict) and state.get("method") not in (None, regularizer.name)
    return state is not None and not other


def _resume(regularizer: Regularizer, state: dict[str, Any], file: Path, instead: str) -> None:
    """Resume within the epoch that was announced."""
    epoch = regularizer.epoch
    with refuse_state(file, f"--attn-reg {regularizer.name}", instead):
        regularizer.resume(state)
    if epoch is not None:
        regularizer.begin_epoch(epoch)
