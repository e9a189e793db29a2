"""Processes of the tests' own, forked from one server that has the frameworks imported (see preloaded.py)."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

#: longer than anything here takes, even on a busy machine
PATIENCE = 300
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])


def start(target: Any, *arguments: Any) -> BaseProcess:
    """A process that runs `target(*arguments)`; with one thread, so that sums are always made in the same order."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.chdir(Path(__file__).parents[1]):  # where the server finds `tests`
        forkserver.ensure_running()
    os.environ.pop("OMP_NUM_THREADS")
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before
    process = _CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """While open, this process is the only rank of a process group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run(function: Callable[..., None], environment: dict[str, str], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(environment["OUTPUT"], "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        function(*arguments)
        sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_in_processes(folder: Path, function: Callable[..., None], *given: Any, processes: int = 1) -> list[int | None]:
    """Run `function(*given)` in so many data-parallel processes; their exit codes, negative for a signal's."""
    folder.mkdir(parents=True, exist_ok=True)
    port, started = str(free_port()), []
    for rank in range(processes):
        environment = {"OUTPUT": str(folder / f"output_{rank}.txt")}
        if processes > 1:
            named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            environment |= {name: str(value) for name, value in named.items()} | {"MASTER_ADDR": "127.0.0.1"}
        started.append(start(_run, function, environment, given))
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
