"""`attn-reg probe`: what a trained model's attention leans on. Two questions, two pictures:

`dropping.png`, AD-DROP's prior experiment: what becomes of the loss where the positions of high, of low or of random
attribution are dropped; and `maps.png`: attention and attribution of a sentence, side by side.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attn_reg_plugin.attention.masks import check_ratio
from attn_reg_plugin.commands.trained_arguments import add_batch_arguments
from attn_reg_plugin.files import write_json
from attn_reg_plugin.pictures import load_matplotlib

ATTRIBUTIONS = ("gradient", "integrated", "attention")
LABELS = ("pseudo", "gold")
AVERAGES = ("mean", "layers", "heads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg probe`."""
    parser.add_argument(
        "run_folder",
        type=Path,
        metavar="RUN",
        help="a run of attn-reg finetune or compare, a checkpoint in it, or a folder of transformers' or Trainer's",
    )
    parser.add_argument("data", metavar="DATA", help="folder of labelled files, 'hub', or a prepared parallel corpus")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="folder of the pictures and probe.json"
    )
    parser.add_argument("--split", default="valid", help="of DATA (default: %(default)s)")
    parser.add_argument("--examples", type=_count, default=200, help="drawn at random; 0: all (default: %(default)s)")
    parser.add_argument("--task", help="of labelled text, for a folder of transformers': such as rte, see finetune")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="where it isn't in that folder")
    parser.add_argument("--sites", default="encoder.self", help="which attention (default: %(default)s)")
    text = "how positions are attributed (default: %(default)s)"
    parser.add_argument("--attribution", default="gradient", choices=ATTRIBUTIONS, help=text)
    parser.add_argument("--labels", default="pseudo", choices=LABELS, help="what is attributed (default: %(default)s)")
    ratios = "ratios of dropped positions, with commas (default: %(default)s)"
    parser.add_argument("--p", type=_ratios, default="0.1,0.3,0.5,0.7,0.9", metavar="P,P,...", help=ratios)
    parser.add_argument("--q", type=float, default=1.0, help="probability of dropping each (default: %(default)s)")
    parser.add_argument(
        "--seed", type=_count, default=1, help="of examples and random positions (default: %(default)s)"
    )
    text = "measure every checkpoint of the run at one --p: loss by epoch"
    parser.add_argument("--every-checkpoint", action="store_true", help=text)
    chosen = parser.add_mutually_exclusive_group()
    text = "draw the maps of the example of this number; 0: of none (default: %(default)s)"
    chosen.add_argument("--sentence", type=_count, default=1, metavar="N", help=text)
    chosen.add_argument("--text", nargs="+", metavar="TEXT", help="draw the maps of this text, or pair of texts")
    text = "mean over layers and heads, a map per layer, or a map per layer and head (default: %(default)s)"
    parser.add_argument("--maps", default="layers", choices=AVERAGES, help=text)
    text = "with --maps heads: mark the candidates of this p; 0: none (default: %(default)s)"
    parser.add_argument("--mark", type=float, default=0.3, metavar="P", help=text)
    add_batch_arguments(parser)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text!r}, but must be a whole number")
    return int(text)


def _ratios(text: str) -> list[float]:
    try:
        found = sorted({check_ratio("a ratio", float(word)) for word in text.split(",") if word.strip()})
    except ValueError:
        found = []
    if not found:
        raise argparse.ArgumentTypeError(f"it is {text!r}, but must be numbers in [0, 1], with commas")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Probe, write the pictures and `probe.json`, and print the figures.

    Raises:
        ValueError: anything that is wrong with the run, the data or an option, in one sentence.
        FileNotFoundError: either is missing.
    """
    check_ratio("--q", arguments.q)
    check_ratio("--mark", arguments.mark)
    if arguments.every_checkpoint and len(arguments.p) != 1:
        raise ValueError("--every-checkpoint measures one ratio: give one --p, such as --p 0.3")
    load_matplotlib("attn-reg probe")
    from attn_reg_plugin.experiments.probe_subjects import Wanted, checkpoints_of, load_subject

    wanted = Wanted(
        data=arguments.data,
        split=arguments.split,
        examples=arguments.examples,
        batch_size=arguments.batch_size,
        task=arguments.task,
        tokenizer=arguments.tokenizer,
        cpu=arguments.cpu,
        seed=arguments.seed,
    )
    options = {"sites": arguments.sites, "attribution": arguments.attribution, "labels": arguments.labels}
    found: dict[str, Any] = {**asdict(replace(wanted, tokenizer=None)), **options, "q": arguments.q}
    if arguments.every_checkpoint:
        checkpoints = checkpoints_of(arguments.run_folder)
    subject = load_subject(arguments.run_folder, wanted)
    if arguments.labels == "gold":
        subject.targets = True
    found |= _maps(arguments, subject, options)
    if arguments.every_checkpoint:
        found["checkpoints"] = _by_checkpoint(arguments, checkpoints, wanted, options)
    else:
        found["points"] = _dropping(arguments, subject, options)
    write_json(arguments.out / "probe.json", found)
    print(f"figures: {arguments.out / 'probe.json'}")
    return 0


def _maps(arguments: argparse.Namespace, subject: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Draw attention and attribution of the sentence; its tokens by stack."""
    if arguments.text is None and not arguments.sentence:
        return {}
    from attn_reg_plugin.experiments.probe_lens import looking
    from attn_reg_plugin.experiments.probe_plots import pictures, plot_maps

    sample = subject.sentence(arguments.text or arguments.sentence)
    row = subject.row(sample)
    with looking(subject.model, **options) as lens:
        maps = lens.look(subject, sample)
    tokens = dict(subject.tokens(sample, row))
    name = "own text" if arguments.text else f"sentence {arguments.sentence}"
    path = arguments.out / "maps.png"
    drawn = pictures(maps, tokens, row, arguments.maps, arguments.mark if arguments.maps == "heads" else 0.0)
    plot_maps(drawn, arguments.attribution, f"{subject.title}, {name}", path)
    print(f"maps of {name}: {path}")
    return {"sentence": {"name": name, "tokens": tokens}}


def _dropping(arguments: argparse.Namespace, subject: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure the model with positions dropped, and draw and print that."""
    from attn_reg_plugin.experiments.probe_plots import plot_dropping

    points = _measured(arguments, subject, options, "dropping")
    path = arguments.out / "dropping.png"
    plot_dropping(points, subject, path)
    for point in points:
        print(_line(point, subject))
    print(f"loss and score: {path}")
    return [asdict(point) for point in points]


def _by_checkpoint(
    arguments: argparse.Namespace, checkpoints: list[tuple[int, Path]], wanted: Any, options: dict[str, Any]
) -> dict[int, list[dict[str, Any]]]:
    """The same of every checkpoint at one ratio."""
    from attn_reg_plugin.experiments.probe_plots import plot_checkpoints
    from attn_reg_plugin.experiments.probe_subjects import load_subject

    measured = {}
    for number, path in checkpoints:
        subject = load_subject(path, wanted)
        measured[number] = _measured(arguments, subject, options, path.name)
        for point in measured[number]:
            print(f"{path.name}, {_line(point, subject)}")
    path = arguments.out / "checkpoints.png"
    unit = "epoch" if checkpoints[0][1].suffix == ".pt" else "update"
    plot_checkpoints(measured, subject, f"{unit} (p {arguments.p[0]:g}, q {arguments.q:g})", path)
    print(f"loss and score by {unit}: {path}")
    return {number: [asdict(point) for point in points] for number, points in measured.items()}


def _measured(arguments: argparse.Namespace, subject: Any, options: dict[str, Any], title: str) -> list[Any]:
    """The points, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from attn_reg_plugin.experiments.probe_lens import prior_experiment

    console = Console(file=sys.stderr)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:
        task = bars.add_task(title, total=len(subject.samples))
        return prior_experiment(
            subject,
            arguments.p,
            arguments.q,
            arguments.seed,
            watch=lambda done: bars.update(task, completed=done),
            **options,
        )


def _line(point: Any, subject: Any) -> str:
    """What is printed of a point."""
    share = f" ({point.attention:.0%} of the attention)"
    what = "nothing dropped" if point.which == "none" else f"{point.which}, p {point.p:g}{share}"
    score = "" if point.score is None else f", {subject.score} {point.score:.2f} %"
    return f"{what}: loss {point.loss:.4f} per {subject.unit}{score}"
