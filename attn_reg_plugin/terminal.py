"""Output of commands: tables, never cut off, and lines as they are."""

from collections.abc import Iterable

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def say(console: Console, line: str) -> None:
    """Print a line as it is: without colors or markup of its own, and wrapped by the terminal alone."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def show(console: Console, table: Table, notes: Iterable[str]) -> None:
    """Print a table and notes below it, whole; the console is as wide as the table from then on."""
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
    for note in notes:
        say(console, note)
