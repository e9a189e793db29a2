"""`attn-reg compare`: train, translate and score several methods on the same corpus; a table and learning curves.

Each method and seed is a run of fairseq-train and fairseq-generate in a folder of its own under --out.
What is done is not done again, and an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement

from attn_reg_plugin.experiments.comparison import (
    add_method_arguments,
    carry_out,
    has_gpu,
    method_names,
    parse_seeds,
    take_the_rest,
    threads,
)
from attn_reg_plugin.experiments.curve_plot import CURVES, plot_validation
from attn_reg_plugin.experiments.data_folder import DataFolder
from attn_reg_plugin.experiments.methods import METHODS, START, UNTUNED, Method, select_methods, split_flags
from attn_reg_plugin.experiments.recipe import Recipe
from attn_reg_plugin.experiments.runs import Run
from attn_reg_plugin.experiments.table import Row, cells, markdown, summarize, terminal_table
from attn_reg_plugin.files import write_json, write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg compare`; whatever follows `--` goes to every fairseq-train."""
    parser.usage = "attn-reg compare DATA --out FOLDER [options] [-- flags of fairseq-train]"
    parser.add_argument("data", type=Path, metavar="DATA", help="folder made by `attn-reg prepare`")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the runs")
    add_method_arguments(parser, METHODS)
    parser.add_argument("--beam", type=int, default=5, help="beam of the translation (default: %(default)s)")
    parser.add_argument(
        "--generate-flags", default="", metavar="FLAGS", help="more flags of fairseq-generate, in one text"
    )
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is a GPU")
    Recipe.add_arguments(parser)
    take_the_rest(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the comparison; write results.json, results.md and curves.png into --out and print the table.

    Gives 0, or 130 when interrupted from the keyboard.
    Raises ValueError or FileNotFoundError with one sentence on bad input and on a failed run.
    """
    methods = select_methods(method_names(arguments), arguments.method_flags)
    data = DataFolder.open(arguments.data)
    runs = plan(arguments, methods, data)
    console = Console()
    if not carry_out(runs, console, Recipe.from_arguments(arguments).epochs, _summary, arguments.jobs):
        return 130
    results = {method.name: [one.result() for one in runs if one.method == method] for method in methods}
    _report(console, arguments.out, data, summarize(methods, results), runs)
    _draw(console, arguments.out, methods, runs)
    return 0


def plan(arguments: argparse.Namespace, methods: Sequence[Method], data: DataFolder) -> list[Run]:
    """The runs, seed by seed, so that the first seed of all methods is done first."""
    if arguments.beam < 1:
        raise ValueError(f"--beam is {arguments.beam}, it must be at least 1")
    given = [word.partition("=")[0] for word in arguments.extra]
    if any(method.name == UNTUNED for method in methods) and START not in given:
        raise ValueError(f"the method {UNTUNED!r} wants a model to start from: give {START} FILE after --")
    device = ["--cpu", "--num-workers", "0"] if arguments.cpu or not has_gpu() else []
    recipe = Recipe.from_arguments(arguments)
    common = [*recipe.flags(data.joint), *device, *arguments.extra]
    generate = ["--beam", str(arguments.beam), "--batch-size", "64", "--post-process", "sentencepiece"]
    generate += ["--no-progress-bar", *device, *split_flags("--generate-flags", arguments.generate_flags)]
    return [
        Run(
            method=method,
            seed=seed,
            folder=arguments.out / f"{method.name}-seed{seed}",
            data=data,
            train_flags=(*common, *method.flags, *(recipe.standstill() if method.name == UNTUNED else [])),
            generate_flags=tuple(generate),
            threads=threads(arguments.jobs),
        )
        for seed in parse_seeds(arguments.seeds)
        for method in methods
    ]


def _summary(one: Run) -> str:
    scores = one.result()["translation"]["scores"].values()
    return f"BLEU {', '.join(format(score['bleu'], '.2f') for score in scores)}"


def _draw(console: Console, out: Path, methods: Sequence[Method], runs: Sequence[Run]) -> None:
    """Draw the learning curves into --out, and say where table and picture are."""
    by_method = {method.title: [one.log() for one in runs if one.method == method] for method in methods}
    console.print(f"table: {out / 'results.md'}", highlight=False, soft_wrap=True)
    try:
        drawn = plot_validation(by_method, runs[0].result()["training"]["loss"], out / CURVES)
    except ValueError as error:
        console.print(f"no picture of the learning curves: {error}", highlight=False, markup=False, soft_wrap=True)
        return
    if drawn:
        console.print(f"learning curves: {out / CURVES}", highlight=False, soft_wrap=True)


def _report(console: Console, out: Path, data: DataFolder, rows: Sequence[Row], runs: Sequence[Run]) -> None:
    results = {f"{one.method.name}-seed{one.seed}": one.settings() | one.result() for one in runs}
    first = runs[0].result()
    scores, loss = next(iter(first["translation"]["scores"].values())), first["training"]["loss"]
    signatures = {"bleu": scores["bleu_signature"], "chrf": scores["chrf_signature"]}
    notes = [
        f"{data.source} → {data.target}, seeds {', '.join(sorted({str(one.seed) for one in runs}))}",
        f"BLEU {signatures['bleu']}",
        f"chrF {signatures['chrf']}",
        f"best valid {loss}: the lowest over all validations"
        + (", bits per piece, without label smoothing" if loss == "nll_loss" else ""),
        "s/epoch: seconds in updates, without validation and saving",
    ]
    header, body = cells(rows, loss)
    content = {
        "pair": [data.source, data.target],
        "signatures": signatures,
        "loss": loss,
        "methods": [asdict(row) for row in rows],
        "runs": results,
    }
    write_json(out / "results.json", content)
    write_text(out / "results.md", markdown(header, body, notes))
    table = terminal_table(header, body)
    # a table is cut at the console's width; wrapped lines are better than missing figures
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
