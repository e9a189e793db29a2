"""A method's state, given back to it when a training is resumed; and one that is too large for every checkpoint.

Such a state is in a file of its own: a checkpoint of update N finds it as `attn_reg_state_N.pt` in the same folder, so
`checkpoint_best.pt` stays as small as a plain one. Files are written whole or not at all. The newest two are kept for
`checkpoint_last.pt` (a run may be killed between both writes), and those of interval checkpoints.
"""

from pathlib import Path
from typing import Any

from attn_reg_plugin.callbacks import state_in
from attn_reg_plugin.checkpoints import refuse_state, save_state
from attn_reg_plugin.files import TEMPORARY
from attn_reg_plugin.regularizers import Regularizer

#: what to do about a checkpoint whose state cannot be used
FROM_WEIGHTS = "use --finetune-from-model, and the method starts anew from its weights"


class Sidecar:
    """The states in one checkpoint folder, fairseq's --save-dir; None keeps nothing."""

    def __init__(self, folder: str | None) -> None:
        self.folder = Path(folder) if folder else None
        self.last: int | None = None  # the state that `checkpoint_last.pt` needs until the next one is written

    def path(self, updates: int, folder: Path | None = None) -> Path:
        """Name the file that belongs to a checkpoint made after `updates` updates, in this or another folder."""
        return (folder or self.folder) / f"attn_reg_state_{updates}.pt"

    def save(self, updates: int, state: dict[str, Any]) -> None:
        """Write the state whole or, with an OSError, not at all; delete those that no checkpoint needs any more."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for killed in self.folder.glob(f".attn_reg_state_*{TEMPORARY}*"):
            killed.unlink(missing_ok=True)
        save_state(self.path(updates), state)
        self._delete_but(updates, self.last)
        self.last = updates

    def delete_last(self) -> None:
        """Delete `checkpoint_last.pt`, and the states that no other checkpoint needs."""
        if self.folder is not None and self.folder.is_dir():
            (self.folder / "checkpoint_last.pt").unlink(missing_ok=True)
            self._delete_but()

    def _delete_but(self, *needed: int | None) -> None:
        """Delete the states but those of these updates and of interval checkpoints."""
        numbers = (path.stem.removeprefix("attn_reg_state_") for path in self.folder.glob("attn_reg_state_*.pt"))
        for updates in {int(number) for number in numbers if number.isdigit()} - {*needed}:
            if not list(self.folder.glob(f"checkpoint_*_{updates}.pt")):
                self.path(updates).unlink()

    def load(self, updates: int, folder: Path | None = None) -> dict[str, Any] | None:
        """Read the state after `updates` updates, on every rank; None at the start of a run, or if there is none.

        Args:
            folder: of the checkpoint that is continued; by default this one.

        Raises:
            ValueError: it is damaged, or no state; on every rank.
        """
        if self.folder is None or updates <= 0:
            return None
        state = state_in(self.path(updates, folder), "the method")
        self.last = self.last if state is None else updates
        return state


def resume(regularizer: Regularizer, state: dict[str, Any], file: Path, instead: str) -> None:
    """Give a method the state of an interrupted run, within the epoch that was announced.

    Args:
        regularizer: attached and bound.
        state: rank 0's, on every rank.
        file, instead: where it is from and what to do if it is damaged or does not fit, for the message.
    """
    epoch = regularizer.epoch
    with refuse_state(file, f"--attn-reg {regularizer.name}", instead):
        regularizer.resume(state)
    if epoch is not None:
        regularizer.begin_epoch(epoch)
