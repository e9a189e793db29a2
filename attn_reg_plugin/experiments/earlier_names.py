"""Folders of runs that were made when their method had another name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.methods import known_methods
from attn_reg_plugin.experiments.run_settings import difference_of


def take_over(
    folder: Path,
    names: Sequence[str],
    seed: int,
    settings: dict[str, Any],
    read: Callable[[Path], dict[str, Any]],
    hold: Callable[[Path], AbstractContextManager[int]],
) -> None:
    """Give a run's folder the present name of its method, if it has an earlier one and the same settings.

    Args:
        folder: of the run; nothing happens if it is there.
        names: what earlier versions called the method.
        seed: of the run.
        settings: of the run.
        read: reads the settings in a file of a run.
        hold: holds a run's folder.

    Raises:
        RunInUse: another process works in the earlier folder.
    """
    for name in names:
        before = folder.with_name(f"{name}-seed{seed}")
        if folder.exists() or not before.is_dir():
            continue
        recorded = read(before / "run.json")
        if recorded and not difference_of(recorded, settings):
            with hold(before):
                before.rename(folder)


def hint(name: str) -> str:
    """Where the name was that of another method once: what that one is called now, for a sentence; else nothing."""
    now = next((row.name for row in known_methods().values() if name in row.earlier and row.name != name), None)
    return f" (the method that earlier versions called {name} is {now})" if now else ""
