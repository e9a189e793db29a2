"""Trainings in processes of their own, which may be data-parallel."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import PATIENCE, free_port, start


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


def run_in_processes(
    folder: Path, function: Callable[..., None], *arguments: Any, processes: int = 1
) -> list[int | None]:
    """Run `function(*arguments)` in so many data-parallel processes; their exit codes, negative for a signal's."""
    folder.mkdir(parents=True, exist_ok=True)
    port, started = str(free_port()), []
    for rank in range(processes):
        environment = {"OUTPUT": str(folder / f"output_{rank}.txt")}
        if processes > 1:
            named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            environment |= {name: str(value) for name, value in named.items()} | {"MASTER_ADDR": "127.0.0.1"}
        started.append(start(_run, function, environment, arguments))
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
