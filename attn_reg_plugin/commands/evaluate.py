"""`attn-reg evaluate`: a trained classifier on data of another distribution."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin.experiments.robustness import FOLDS, evaluate
from attn_reg_plugin.experiments.trained import add_batch_arguments, add_run_arguments, load_trained
from attn_reg_plugin.files import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg evaluate`."""
    add_run_arguments(parser)
    parser.add_argument("--on", required=True, choices=tuple(FOLDS), help="the test")
    parser.add_argument(
        "--data",
        required=True,
        metavar="SOURCE",
        help="its folder or file in the official format, or 'hub' for the datasets hub",
    )
    parser.add_argument("--split", default="test", help="of a folder or the hub (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here too, as JSON")
    add_batch_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print.

    Raises:
        ValueError: the model's labels do not fit the test, or its data has no labels or cannot be read.
        FileNotFoundError: no checkpoint.
    """
    trained = load_trained(arguments.run_folder, arguments.cpu)
    figures = evaluate(trained, arguments.on, arguments.data, arguments.split, arguments.batch_size)
    for name, figure in figures.items():
        print(f"{name}: {figure:.2f}" if isinstance(figure, float) else f"{name}: {figure}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, figures)
    return 0
