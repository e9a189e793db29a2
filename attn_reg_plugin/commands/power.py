"""`attn-reg power`: how many seeds a comparison needs, and what its present ones can show."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from attn_reg_plugin.experiments.report.power import MOST, POOLED, Pilot, effect_shown, read_pilots, seeds_needed
from attn_reg_plugin.experiments.report.table import NOTHING, markdown, terminal_table
from attn_reg_plugin.files import write_json, write_text
from attn_reg_plugin.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg power`."""
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="RESULTS",
        help="results.json of attn-reg compare or finetune with two seeds or more, or the folder that holds it",
    )
    parser.add_argument(
        "--difference",
        type=float,
        metavar="D",
        help="the difference that is to be shown (default: 0.3 for BLEU and chrF, 0.5 for every other metric)",
    )
    parser.add_argument("--power", type=float, default=0.8, help="how likely, in (0, 1) (default: %(default)s)")
    parser.add_argument("--level", type=float, default=0.05, help="two-sided, in (0, 1) (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table too: Markdown, or json by its ending")


def run(arguments: argparse.Namespace) -> int:
    """Print the table.

    Raises:
        ValueError: a value out of its range, or results that have no paired differences.
        OSError: a file cannot be read or written.
    """
    for name in ("power", "level"):
        if not 0 < getattr(arguments, name) < 1:
            raise ValueError(f"--{name} is {getattr(arguments, name)}, but must lie in (0, 1)")
    if arguments.power <= arguments.level:
        raise ValueError(f"--power is {arguments.power}, but must be above --level, {arguments.level}")
    if arguments.difference is not None and not 0 < arguments.difference < float("inf"):
        raise ValueError(f"--difference is {arguments.difference}, but must be above 0")
    rows = [_row(pilot, arguments) for path in arguments.results for pilot in read_pilots(path)]
    table = _cells(rows, several=len(arguments.results) > 1)
    notes = [
        f"two-sided paired t-test at {arguments.level:g}, power {arguments.power:g}; std: of the differences to plain "
        "of the same seed, [ ] its 95 % interval",
        "over seeds, on these evaluation examples: other examples add to the uncertainty, see the intervals of the "
        "comparison",
    ]
    if any(row["method"] == POOLED for row in rows):
        notes.append(f"{POOLED}: the root of their mean variance; they share the plain runs, so there is no interval")
    if not all(row["varies"] for row in rows):
        notes.append(f"{NOTHING}: all differences are the same, so nothing is known of their deviation")
    show(Console(), terminal_table(*table), notes)
    if arguments.out is not None and arguments.out.suffix == ".json":
        write_json(arguments.out, {"power": arguments.power, "level": arguments.level, "rows": rows})
    elif arguments.out is not None:
        write_text(arguments.out, markdown(*table, notes))
    return 0


def _row(pilot: Pilot, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of a method and a metric."""
    power, level, varies = arguments.power, arguments.level, pilot.varies
    wanted = pilot.worth if arguments.difference is None else arguments.difference
    return {
        **asdict(pilot),
        "varies": varies,
        "interval": pilot.interval() if varies and pilot.method != POOLED else None,
        "difference": wanted,
        "seeds_needed": seeds_needed(wanted / pilot.deviation, power, level) if varies else None,
        "difference_shown": effect_shown(pilot.seeds, power, level) * pilot.deviation if varies else None,
    }


def _cells(rows: list[dict[str, Any]], several: bool) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts."""
    header = ["comparison"] * several + ["method", "metric", "seeds", "difference", "std", "to show", "seeds for it"]
    body = []
    for row in rows:
        interval = "" if row["interval"] is None else " [{:.2f}, {:.2f}]".format(*row["interval"])
        metric = row["metric"] if row["subset"] in ("valid", "test") else f"{row['metric']} {row['subset']}"
        shown = needed = NOTHING
        if row["varies"]:
            shown = f"{row['difference_shown']:.2f}"
            needed = f"more than {MOST:,}" if row["seeds_needed"] is None else str(row["seeds_needed"])
        line = [row["method"], metric, str(row["seeds"]), f"{round(row['mean'], 9) + 0.0:+.2f}"]
        line += [f"{row['deviation']:.2f}{interval}", f"{row['difference']:g}", needed, shown]
        body.append([row["source"]] * several + line)
    return [*header, "shown by these seeds"], body
