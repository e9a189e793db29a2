"""`attn-reg export`: a trained encoder as a folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin.commands.trained_arguments import add_run_arguments
from attn_reg_plugin.experiments.trained import load_trained
from attn_reg_plugin.files import naming_writer, whole_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg export`."""
    add_run_arguments(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must be empty or not there yet")


def run(arguments: argparse.Namespace) -> int:
    """Write model and tokenizer.

    Raises:
        ValueError: OUT is a file or not empty, or RUN isn't a training of an encoder.
        FileNotFoundError: RUN has no checkpoint.
        OSError: OUT cannot be written; nothing is left there.
    """
    out = arguments.out
    with whole_folder(out) as folder:
        trained = load_trained(arguments.run_folder)
        with naming_writer(out):
            trained.model.model.save_pretrained(folder)
            trained.tokenizer.save_pretrained(folder)
    print(f"{out}: {type(trained.model.model).__name__} of {trained.checkpoint}, with its tokenizer")
    return 0
