"""`--patience` over interruptions: fairseq forgets how long it has waited when a training is resumed.

It keeps the best value and the number of validations since as attributes of a function, `should_stop_early`. These go
into the checkpoint, so that a resumed training stops when an undisturbed one would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fairseq.checkpoint_utils import save_checkpoint

#: in the task's state: what `waited` says
PATIENCE = "patience"


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
    """Continue where the checkpoint was that this training goes on from.

    Where fairseq took the best value from it: a training that resets its optimizer or its meters waits anew.

    Args:
        state: what `waited` said when that checkpoint was made; None of one without it.
    """
    function = _should_stop_early()
    if function is not None and state is not None and hasattr(save_checkpoint, "best"):
        function.best, function.num_runs = state["best"], state["num_runs"]
