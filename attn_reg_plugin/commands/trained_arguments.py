"""Arguments that the commands on a trained model share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The argument RUN."""
    parser.add_argument(
        "run_folder",
        type=Path,
        metavar="RUN",
        help="folder of a training with --arch hf_encoder (its best checkpoint is taken), or a checkpoint in it",
    )


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """How the model is run."""
    parser.add_argument("--batch-size", type=_count, default=32, help="examples at once (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it is {text!r}, but must be a whole number of at least 1")
    return int(text)
