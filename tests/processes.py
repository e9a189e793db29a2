"""Processes of the tests' own, forked from one server that has the frameworks imported (see preloaded.py)."""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Iterator
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
