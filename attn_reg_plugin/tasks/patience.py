"""`--patience` over interruptions: fairseq forgets how long it has waited when a training is resumed.

It keeps the best value and the number of validations since as attributes of a function, `should_stop_early`. These go
into the checkpoint, so that a resumed training stops when an undisturbed one would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_reg_plugin.tasks.task_state import task_state


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


def go_on_waiting(save_dir: str | None, updates: int) -> None:
    """Continue where the checkpoint of this training after so many updates was; fairseq gives tasks no state back.

    A training that starts from another's weights waits anew: its own folder has no checkpoint yet.
    """
    function, path = _should_stop_early(), Path(save_dir or "") / "checkpoint_last.pt"
    if function is None or not save_dir:
        return
    state = task_state(path, updates).get("patience")
    if state is not None:
        function.best, function.num_runs = state["best"], state["num_runs"]
