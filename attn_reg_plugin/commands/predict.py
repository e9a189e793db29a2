"""`attn-reg predict`: predictions of a trained encoder, in the format that GLUE takes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from attn_reg_plugin.commands.trained_arguments import add_batch_arguments, add_run_arguments
from attn_reg_plugin.experiments.glue_format import lines
from attn_reg_plugin.experiments.trained import load_trained
from attn_reg_plugin.files import write_text
from attn_reg_plugin.labelled import read_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg predict`."""
    add_run_arguments(parser)
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="file in the task's official format; labels in it are ignored"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write here; default: to the terminal")
    add_batch_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Predict and write.

    Raises:
        ValueError: anything that is wrong with the file or the run, in one sentence.
        FileNotFoundError: either is missing.
    """
    if not arguments.file.exists():
        raise FileNotFoundError(f"there is no file {arguments.file}")
    trained = load_trained(arguments.run_folder, arguments.cpu)
    examples = list(read_file(trained.labelled, arguments.file, needed=False, ignored=True))
    text = "".join(f"{line}\n" for line in lines(trained, examples, arguments.batch_size))
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.out, text)
    return 0
