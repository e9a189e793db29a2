"""Resuming as fairseq does not: with the batches and the patience of an undisturbed training.

fairseq draws the order of equally long sentences with `seed + epoch` when it first makes batches, and keeps these for
all epochs; a resumed training would make others. `--patience` keeps the best value and the number of validations since
as attributes of a function, `should_stop_early`; here these go into the checkpoint.
"""

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq.checkpoint_utils import save_checkpoint

from attn_reg_plugin.checkpoints import load_weights
from attn_reg_plugin.regularizers.base.distributed import object_from_first_rank, rank

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
