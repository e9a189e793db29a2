"""Folders of runs that were made when their method had another name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.methods import known_methods
from attn_reg_plugin.experiments.run_settings import difference_of


def take_over(
    run: Any,
    settings: dict[str, Any],
    read: Callable[[Path], dict[str, Any]],
    hold: Callable[[Path], AbstractContextManager[int]],
) -> None:
    """Give a run's folder the present name of its method, if it has an earlier one and the same settings.

    Args:
        run: with `folder`, `method` and `seed`; nothing happens if the folder is there, or isn't called after both.
        settings: of the run.
        read: reads the settings in a file of a run.
        hold: holds a run's folder.

    Raises:
        RunInUse: another process works in the earlier folder.
    """
    folder, named = run.folder, run.folder.name == f"{run.method.name}-seed{run.seed}"
    for name in run.method.earlier if named else ():
        before = folder.with_name(f"{name}-seed{run.seed}")
        if folder.exists() or not before.is_dir():
            continue
        recorded = read(before / "run.json")
        if recorded and not difference_of(recorded, settings):
            # another process may have renamed it since it was read
            with suppress(FileNotFoundError), hold(before):
                before.rename(folder)


def said_difference(recorded: dict[str, Any], wanted: dict[str, Any], method: str) -> str:
    """The settings in which two runs differ, in brackets, or nothing.

    Where the method's name was that of another one once, what that one is called now comes after it.
    """
    difference = difference_of(recorded, wanted)
    now = next((row.name for row in known_methods().values() if method in row.earlier and row.name != method), None)
    hint = f" (the method that earlier versions called {method} is {now})" if now else ""
    return f"({difference}){hint}" if difference else ""
