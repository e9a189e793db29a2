"""`attn-reg evaluate`: trained classifiers on data of another distribution."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin.commands.trained_arguments import add_batch_arguments
from attn_reg_plugin.experiments.robustness import FOLDS, evaluate, folding
from attn_reg_plugin.experiments.robustness_table import evaluate_all, is_comparison
from attn_reg_plugin.experiments.trained import load_trained
from attn_reg_plugin.files import write_json
from attn_reg_plugin.labelled import find_split, find_task, is_hub


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg evaluate`."""
    parser.add_argument(
        "run_folder",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a training with --arch hf_encoder: its folder (the best checkpoint is taken) or a checkpoint; or the OUT "
        "of attn-reg finetune, or several of its runs: a table of all that are finished",
    )
    parser.add_argument("--on", required=True, choices=tuple(FOLDS), help="the test")
    parser.add_argument(
        "--data",
        required=True,
        metavar="SOURCE",
        help="its folder or file in the official format, or 'hub' for the datasets hub",
    )
    parser.add_argument("--split", default="test", help="of a folder or the hub (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="of one RUN a file: write the figures there too, as JSON; else the folder of the table and of what is "
        "measured (default: OUT/hans or OUT/paws-x)",
    )
    add_batch_arguments(parser)


def check(arguments: argparse.Namespace, task: str | None) -> None:
    """Refuse what cannot work before the steps of a file that come first.

    Args:
        task: that the file trains on, if it does.

    Raises:
        ValueError: the task's labels do not fit the test, or there is no such data.
    """
    test = find_task(arguments.on)
    if task is not None and not any(path.exists() for path in arguments.run_folder):
        try:
            folding(find_task(task), test)
        except ValueError as error:
            raise ValueError(f"evaluate: on: {error}") from None
    if not is_hub(arguments.data) and not Path(arguments.data).is_file():
        try:
            find_split(test, Path(arguments.data), arguments.split)
        except ValueError as error:
            raise ValueError(f"evaluate: data: {error}") from None


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print.

    Raises:
        ValueError: the model's labels do not fit the test, or its data has no labels or cannot be read; runs that no
            table can hold.
        FileNotFoundError: no checkpoint.
    """
    paths, test = arguments.run_folder, (arguments.on, arguments.data, arguments.split)
    if len(paths) > 1 or is_comparison(paths[0]):
        return evaluate_all(paths, *test, arguments.out, arguments.batch_size, arguments.cpu)
    trained = load_trained(paths[0], arguments.cpu)
    figures = evaluate(trained, *test, arguments.batch_size)
    for name, figure in figures.items():
        print(f"{name}: {figure:.2f}" if isinstance(figure, float) else f"{name}: {figure}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, figures)
    return 0
