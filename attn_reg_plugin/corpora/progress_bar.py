"""A progress bar, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def track(items: Iterable[Item], description: str) -> Iterator[Iterator[Item]]:
    """The items themselves, counted by a progress bar while standard error is a terminal.

    Args:
        items: any stream; its length is not asked for.
        description: a few words before the bar.
    """
    if not sys.stderr.isatty():
        yield iter(items)
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield iter(progress.track(items, description=description))
