"""How the commands of runs are started: as processes, or forked from a server that has the frameworks imported.

The latter is for trainings that take less time than imports do. A command still runs in a process of its own, and finds
the plugin as always, by `--user-dir`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

#: imported by the server; nothing of the plugin, since fairseq passes over a user dir that is imported already
PRELOADED = [
    *("fairseq_cli.train", "fairseq_cli.generate", "torch._dynamo", "sacrebleu", "sklearn.metrics", "scipy.stats"),
    *("transformers.models.bert.modeling_bert", "transformers.models.roberta.modeling_roberta"),
]
#: what a process does: `words` are a module and its arguments, `log` a file
_CHILD = """
import os, runpy, sys
target = os.open(log, os.O_WRONLY | os.O_APPEND)
os.dup2(target, 1), os.dup2(target, 2)
for name in [*sys.modules]:
    if name.partition(".")[0] == package or name == words[0]:
        del sys.modules[name]
sys.argv = list(words)
runpy.run_module(words[0], run_name="__main__", alter_sys=True)
"""


class Forked:
    """A command that was forked, with what a run needs of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout or 0.0)
        return self.process.exitcode

    def terminate(self) -> None:
        """End it."""
        self.process.terminate()


def start_forked(command: Sequence[str], log: Path, environment: Mapping[str, str], lock: int) -> Forked:
    """Fork a command whose output is appended to a file.

    Args:
        command: a Python, `-m`, a module and its arguments.
        environment: isn't used: the server has its own.
        lock: isn't inherited: the command ends with the process that started it.
    """
    given = {"words": list(command[2:]), "log": str(log), "package": __package__.partition(".")[0]}
    process = multiprocessing.get_context("forkserver").Process(target=exec, args=(_CHILD, given), daemon=True)
    process.start()
    return Forked(process)


def start_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str], lock: int
) -> subprocess.Popen[bytes]:
    """Start a command whose output is appended to a file, and which inherits the file descriptor `lock`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(lock,),
        )


#: how commands are started
start: Callable[..., Any] = start_process


@contextlib.contextmanager
def quick_starts() -> Iterator[None]:
    """Within it, the commands of runs are forked, and have one thread."""
    global start
    before, variables = start, {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    kept = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    start = start_forked
    try:
        yield
    finally:
        start = before
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
