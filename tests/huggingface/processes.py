"""Trainings in processes of their own, forked from a server that has transformers imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["transformers.trainer", "accelerate", "torch._dynamo"]
#: seconds, longer than anything here takes on a busy machine
PATIENCE = 300


def _run(function: Callable[..., None], environment: dict[str, str], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    with open(environment["OUTPUT"], "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        function(*arguments)
        sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start(folder: Path, function: Callable[..., None], *arguments: Any, processes: int = 1) -> list[int | None]:
    """Run `function(*arguments)` in so many data-parallel processes; their exit codes, negative for a signal's."""
    _CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(processes):
        environment = {"OUTPUT": str(folder / f"output_{rank}.txt")}
        if processes > 1:
            named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            environment |= {name: str(value) for name, value in named.items()} | {"MASTER_ADDR": "127.0.0.1"}
        process = _CONTEXT.Process(target=_run, args=(function, environment, arguments))
        process.start()
        started.append(process)
    for process in started:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in started]


def check(folder: Path, codes: list[int | None]) -> None:
    """All ended well, or what they printed."""
    printed = [path.read_text()[-2000:] for path in sorted(folder.glob("output_*.txt"))]
    assert codes == [0] * len(codes), "\n".join(printed)


def kill_oneself() -> None:
    """End as by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)
