"""`attn-reg export`: a trained encoder as a folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin.files import naming_writer, whole_folder

EXAMPLES = (
    "attn-reg export runs/rte/ad_drop-seed1 exported",
    "attn-reg export checkpoints/checkpoint_best.pt exported",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg export`."""
    text = "folder of a training with --arch hf_encoder (its best checkpoint is taken), or a checkpoint in it"
    parser.add_argument("run_folder", type=Path, metavar="RUN", help=text)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must be empty or not there yet")


def run(arguments: argparse.Namespace) -> int:
    """Write model and tokenizer.

    Raises:
        ValueError: OUT is a file or not empty, or RUN isn't a training of an encoder.
        FileNotFoundError: RUN has no checkpoint.
        OSError: OUT cannot be written; nothing is left there.
    """
    from attn_reg_plugin.experiments.trained import load_trained

    out = arguments.out
    with whole_folder(out) as folder:
        trained = load_trained(arguments.run_folder)
        with naming_writer(out):
            trained.model.model.save_pretrained(folder)
            trained.tokenizer.save_pretrained(folder)
    print(f"{out}: {type(trained.model.model).__name__} of {trained.checkpoint}, with its tokenizer")
    return 0
