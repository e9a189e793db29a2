"""`attn-reg average`: the mean of a fairseq run's last checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin.checkpoints import save_state
from attn_reg_plugin.experiments.averaging import NAMES, averaged, last_checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg average`."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="fairseq's --save-dir, or the folder above it")
    parser.add_argument("--last", type=int, default=5, metavar="N", help="how many checkpoints (default: %(default)s)")
    parser.add_argument(
        "--by",
        choices=sorted(NAMES),
        help="checkpoints of epochs, or those of --save-interval-updates (default: epochs if there are N)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: average_last_N.pt in RUN)")


def run(arguments: argparse.Namespace) -> int:
    """Average and write.

    Raises:
        ValueError: N is less than 1, checkpoints do not fit each other or cannot be read, or the file is there already.
        FileNotFoundError: RUN has fewer than N checkpoints.
        OSError: the file cannot be written.
    """
    paths = last_checkpoints(arguments.run_folder, arguments.last, arguments.by)
    out = arguments.out or paths[0].parent / f"average_last_{arguments.last}.pt"
    if out.exists():
        raise ValueError(f"{out} is there already; move it away, or give another --out")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} isn't a folder, so {out.name} cannot be written there")
    save_state(out, averaged(paths))
    print(f"{out}: the mean of {', '.join(path.name for path in reversed(paths))}")
    return 0
