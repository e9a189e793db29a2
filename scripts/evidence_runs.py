"""Trained runs measured one by one, for scripts that are called as `SCRIPT DATA RUN...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def of_runs(measure: Callable[[Path, str], Any], usage: str) -> dict[str, Any]:
    """Call `measure(run, data)` for each run of the command line; results by the run's name. Leaves with `usage`."""
    if len(sys.argv) < 3:
        sys.exit(usage)
    data, *runs = sys.argv[1:]
    return {Path(run).name: measure(Path(run), data) for run in runs}
