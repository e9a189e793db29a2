"""The commands of a comparison, tried before anything is written, so that what they would refuse is reported first."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attn_reg_plugin.experiments.runs import Run

#: held while the process's streams are replaced: of two threads one would put back what the other has put in place
_SILENT = threading.RLock()
#: data and flags of a training -> its updates, which all seeds share
_UPDATES: dict[tuple[str, str], int] = {}


def check_runs(runs: Iterable[Run]) -> None:
    """Try what is not done yet of some runs, once where they differ in the seed only.

    Raises:
        ValueError: a command cannot work; one sentence that says of which method, and why.
    """
    with _silence(io.StringIO()):  # fairseq opens the log as it is imported
        from attn_reg_plugin.tasks.dry_run import parse_command, try_training
    tried: list[tuple[str, object]] = []
    for one in runs:
        key = (one.method, one.flags)
        if key in tried or one.finished():
            continue
        tried.append(key)
        if "training" not in one.result():
            _tried(lambda one=one: try_training(one.train_command()), one.title)
        for command, kind in one.further_commands() if one.measured else ():
            _tried(lambda command=command, kind=kind: parse_command(command, kind), one.title)


def updates_of(one: Run) -> int:
    """Updates of a run's whole training in one process, of the batches that fairseq makes.

    Raises:
        ValueError: the command cannot work.
    """
    key = (one.settings["data"], json.dumps(one.flags, default=str))
    if key not in _UPDATES:
        _UPDATES[key] = _counted(one)
    return _UPDATES[key]


def _counted(one: Run) -> int:
    with _silence(io.StringIO()):
        from attn_reg_plugin.tasks.dry_run import count_updates
    return _tried(lambda: count_updates(one.train_command()), one.title)


def _tried(function: Callable[[], Any], title: str) -> Any:
    """Call a function in silence; what it refuses becomes a ValueError that names the method."""
    said = io.StringIO()
    try:
        with _silence(said):
            return function()
    except SystemExit:  # argparse has no other way to refuse
        reason = (said.getvalue().strip().splitlines() or ["it asks for help, not for a training"])[-1]
        raise ValueError(f"{title}: {reason.partition('error: ')[2] or reason}") from None
    except (ValueError, OSError, AssertionError) as error:
        raise ValueError(f"{title}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}") from error


@contextlib.contextmanager
def _silence(said: io.StringIO) -> Iterator[None]:
    """Nothing is printed, warned of or logged."""
    with _SILENT:
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(before)
