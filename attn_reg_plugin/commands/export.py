"""`attn-reg export`: a trained encoder as a folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin.experiments.trained import add_run_arguments, load_trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg export`."""
    add_run_arguments(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must be empty or not there yet")


def run(arguments: argparse.Namespace) -> int:
    """Write model and tokenizer.

    Raises:
        ValueError: OUT is not empty, or RUN is no training of an encoder.
        FileNotFoundError: RUN has no checkpoint.
    """
    out = arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; give an empty folder, or one that is not there yet")
    trained = load_trained(arguments.run_folder)
    trained.model.model.save_pretrained(out)
    trained.tokenizer.save_pretrained(out)
    print(f"{out}: {type(trained.model.model).__name__} of {trained.checkpoint}, with its tokenizer")
    return 0
