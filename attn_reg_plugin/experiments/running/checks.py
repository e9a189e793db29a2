"""The commands of a comparison, tried before anything is written, so that what they would refuse is reported first."""

import contextlib
import io
import json
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from attn_reg_plugin.experiments.running.run import Run
from attn_reg_plugin.files import first_line

#: held while the process's streams are replaced: of two threads one would put back what the other has put in place
_SILENT = threading.RLock()
#: data and flags of a training -> its updates, which all seeds share
_UPDATES: dict[tuple[str, str, int | None], int] = {}


def check_runs(runs: Iterable[Run]) -> None:
    """Try what is not done yet of some runs, once where they differ in the seed only.

    A ValueError says which method's command cannot work, and why.
    """
    tried: list[tuple[str, object]] = []
    for one in runs:
        key = (one.method, one.flags)
        if key in tried or one.finished():
            continue
        tried.append(key)
        if "training" not in one.result():
            _tried(lambda one=one: _dry_run().try_training(one.train_command()), one.title)
        for command in one.further_commands() if one.measured else ():
            _tried(lambda command=command: _dry_run().parse_command(command, "generation"), one.title)


def _dry_run() -> ModuleType:
    from attn_reg_plugin.experiments.running import dry_run  # in silence: fairseq opens the log as it is imported

    return dry_run


def updates_of(one: Run, examples: int | None = None) -> int:
    """Updates of a run's whole training in one process; a command that cannot work is refused.

    Args:
        examples: of the training set; None, as with `--max-tokens`: fairseq makes the batches.
    """
    key = (one.settings["data"], json.dumps(one.flags, default=str), examples)
    if key not in _UPDATES:
        _UPDATES[key] = _tried(lambda: _counted(one, examples), one.title)
    return _UPDATES[key]


def _counted(one: Run, examples: int | None) -> int:
    from attn_reg_plugin.tasks.fairseq_settings import total_updates

    args = _dry_run().parse_command(one.train_command(), "training")
    if examples is None or (args.max_tokens and args.max_epoch):
        return _dry_run().count_updates(one.train_command())
    if not args.batch_size or args.batch_size < 0:
        raise ValueError(f"--batch-size is {args.batch_size}, but must be at least 1")
    found = total_updates(args, math.ceil(examples / args.batch_size))
    if found is None:
        raise ValueError("--max-epoch is 0, so give --max-update: the learning rate falls until the last update")
    return found


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
        raise ValueError(f"{title}: {first_line(error)}") from error


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
