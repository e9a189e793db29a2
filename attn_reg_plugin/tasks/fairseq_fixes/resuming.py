"""Resuming as fairseq does not: with the batches and the patience of an undisturbed training, and a last checkpoint.

fairseq draws the order of equally long sentences with `seed + epoch` when it first makes batches, and keeps these for
all epochs; a resumed training would make others. `--patience` keeps the best value and the number of validations since
as attributes of a function, `should_stop_early`; here these go into the checkpoint. And fairseq writes one checkpoint
whole and copies it to the other names byte by byte, so that a kill may leave half of `checkpoint_last.pt`.
"""

import itertools
import logging
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq.checkpoint_utils import save_checkpoint

from attn_reg_plugin.checkpoints import is_damaged, load_weights
from attn_reg_plugin.files import whole_file
from attn_reg_plugin.regularizers.base.distributed import done_by_first_rank, object_from_first_rank, rank

logger = logging.getLogger(__name__)

#: in the task's state: what `waited` says
PATIENCE = "patience"


class ResumedTask:
    """Mixin for a fairseq task: a training that is resumed goes on as if nobody had disturbed it."""

    _begun = False  # this process has come to its first step

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """fairseq's iterator; in a training resumed in a later epoch with the batches that an undisturbed one has.

        A task that makes new batches in each epoch still does.
        """
        kept = self.can_reuse_epoch_itr(dataset) and not (
            kwargs.get("disable_iterator_cache", False) or kwargs.get("update_epoch_batch_itr", False)
        )
        epoch = kwargs.get("epoch", 1)
        later = kept and epoch > 1 and not self._begun and dataset not in self.dataset_to_epoch_iter
        if later:  # what the task keeps of this call, the next one returns
            super().get_batch_iterator(dataset, *args, **{**kwargs, "epoch": 1})
        iterator = super().get_batch_iterator(dataset, *args, **kwargs)
        if later:
            iterator.epoch = epoch
        return iterator

    def continue_from(self, checkpoint: Path, updates: int, *keys: str) -> list[Any]:
        """Go on waiting where the checkpoint was that the training goes on from; before the first step, on every rank.

        Args:
            updates: made so far.

        Returns:
            What the task's state in the checkpoint has by the keys; None where it has none.
        """
        self._begun = True
        if not updates:
            return [None] * len(keys)
        state = task_state(checkpoint, updates) if rank() == 0 else {}
        patience, *own = object_from_first_rank([state.get(key) for key in (PATIENCE, *keys)])
        go_on_waiting(patience)
        return own

    def state_dict(self) -> dict[str, Any]:
        """The task's state and, with `--patience`, how long it has been waiting."""
        state, patience = dict(super().state_dict()), waited()
        return {**state, PATIENCE: patience} if patience else state


def task_state(checkpoint: Path, updates: int) -> dict[str, Any]:
    """The task's state in the checkpoint of so many updates, which fairseq gives no task back.

    Empty where the file is one of other updates, is missing or cannot be read.
    """
    if not checkpoint.is_file():
        return {}
    try:
        kept = load_weights(checkpoint, mmap=zipfile.is_zipfile(checkpoint))
        return kept["task_state"] if kept["optimizer_history"][-1]["num_updates"] == updates else {}
    except (KeyError, IndexError, TypeError, ValueError):
        return {}


# -- patience ---------------------------------------------------------------------------------------------------------


def _should_stop_early() -> Callable | None:
    """fairseq's function in the training that is running: `python -m fairseq_cli.train` is the main module."""
    modules = (sys.modules.get(name) for name in ("__main__", "fairseq_cli.train"))
    return next((module.should_stop_early for module in modules if hasattr(module, "should_stop_early")), None)


def waited() -> dict[str, Any] | None:
    """The best value so far, and for how many validations it hasn't improved; None without patience."""
    function = _should_stop_early()
    if function is None or getattr(function, "best", None) is None:
        return None
    return {"best": float(function.best), "num_runs": int(function.num_runs)}


def go_on_waiting(state: dict[str, Any] | None) -> None:
    """Continue from what `waited` said; None: there was no patience.

    Where fairseq took the best value from the checkpoint: a training that resets its optimizer or its meters waits
    anew.
    """
    function = _should_stop_early()
    if function is not None and state is not None and hasattr(save_checkpoint, "best"):
        function.best, function.num_runs = state["best"], state["num_runs"]


# -- the last checkpoint ----------------------------------------------------------------------------------------------


def repair_last(folder: Path | None) -> None:
    """Finish a copy to `checkpoint_last.pt` that a kill interrupted; rank 0 does it, the other ranks wait.

    If the last checkpoint cannot be read, the newest other checkpoint that can is what was being copied. What it takes
    the place of is kept, as `checkpoint_last.pt.damaged`.

    Args:
        folder: fairseq's --save-dir; None: there is none.

    Raises:
        ValueError: the copy cannot be written, or there is nothing to make it from.
    """
    if folder is None:
        return
    last = folder / "checkpoint_last.pt"

    def repair() -> None:
        try:
            _repair(last)
        except OSError as error:
            raise ValueError(f"{last} is damaged and cannot be made anew: {error}") from None

    done_by_first_rank(repair)


def _repair(last: Path) -> None:
    if last.is_dir():
        raise ValueError(f"{last} is a folder, but must be a checkpoint; move it away")
    if not last.is_file() or not is_damaged(last):
        return
    others = [path for path in last.parent.glob("checkpoint*.pt") if path != last and path.is_file()]
    others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    source = next((path for path in others if not is_damaged(path)), None)
    if source is None:
        raise ValueError(f"{last} is damaged, and no other checkpoint beside it can be read; move it to begin anew")
    with whole_file(last) as unfinished:
        shutil.copyfile(source, unfinished)
        kept = _free_name(last.with_suffix(".pt.damaged"))
        os.link(last, kept)  # a second name: there is a last checkpoint at every moment
    logger.warning(f"{last} is damaged: made anew from {source.name}; the damaged one is kept as {kept.name}")


def _free_name(path: Path) -> Path:
    """`path`, or with the first number behind it that no file has."""
    names = (path if not n else path.with_name(f"{path.name}.{n}") for n in itertools.count())
    return next(name for name in names if not name.exists())
