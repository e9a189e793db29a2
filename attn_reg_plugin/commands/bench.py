"""`attn-reg bench`: time and peak memory of a training step, method by method, beside plain training."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from attn_reg_plugin.commands.comparing import Listing
from attn_reg_plugin.files import write_json

if TYPE_CHECKING:
    from attn_reg_plugin.bench.families import Settings

EXAMPLES = (
    "attn-reg bench --family bert --methods plain,ad_drop,attend_out --repeats 5",
    "attn-reg bench --device cuda --dtype bfloat16 --json costs.json",
)
#: as the bench has them, which needs torch
FAMILIES, SIZES, CLOCKS = ("fairseq", "bert"), ("base", "tiny"), ("wall", "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg bench`."""
    families = "fairseq's Transformer, or Hugging Face's BERT as a classifier (default: %(default)s)"
    parser.add_argument("--family", choices=FAMILIES, default="fairseq", help=families)
    parser.add_argument("--size", choices=SIZES, default="base", help="of the model (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="sentences or pairs (default, as of the next two: of the size)")
    parser.add_argument("--length", type=int, help="tokens of the longest source and target")
    parser.add_argument("--vocabulary", type=int, help="words of the vocabulary")
    parser.add_argument(
        "--shortest",
        type=float,
        default=0.75,
        help="tokens of the shortest, as a fraction of --length; 1: no padding (default: %(default)s)",
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="of the model (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of PyTorch on the CPU (default: PyTorch's)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="wall: elapsed time; cpu: CPU time of this process, for a busy machine (best with --threads 1) "
        "(default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=7, help="measured steps per method (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before, not counted (default: %(default)s)")
    parser.add_argument("--methods", metavar="NAMES", help="which, with commas (default: all), see --list-methods")
    parser.add_argument("--list-methods", action=Listing, lines=_methods, help="list the methods and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE as well")


def _methods() -> list[str]:
    from attn_reg_plugin.bench.rows import all_rows

    return [row.name for row in all_rows()]


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the table. Gives 0; a row over its budget is marked, not an error.

    Raises:
        ValueError: an option is out of its range, or an unknown method.
    """
    from rich.console import Console

    from attn_reg_plugin.bench.benchmark import NOTES, benchmark, render
    from attn_reg_plugin.bench.rows import select_rows
    from attn_reg_plugin.terminal import show

    settings = _settings(arguments)
    names = None if arguments.methods is None else [name for name in arguments.methods.split(",") if name]
    rows = select_rows(names, settings.family, settings.dtype)
    how = {"repeats": arguments.repeats, "warmup": arguments.warmup, "clock": arguments.clock}
    figures, machine = benchmark(rows, settings, arguments.threads, **how)
    described = {**asdict(settings), **how}
    lines = [
        "machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()),
        "settings: " + ", ".join(f"{key} {value}" for key, value in described.items()),
    ]
    show(Console(), render(rows, figures), [*lines, *NOTES])
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine, "settings": described, "rows": figures})
    return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    """What is measured; refuses what is out of its range."""
    from attn_reg_plugin.bench import families

    size = families.FAMILIES[arguments.family].sizes[arguments.size]
    chosen = {
        name: getattr(size, name) if getattr(arguments, name) is None else getattr(arguments, name)
        for name in ("batch", "length", "vocabulary")
    }
    same = {name: getattr(arguments, name) for name in ("family", "size", "shortest", "dropout", "device", "dtype")}
    settings = families.Settings(**chosen, **same)
    for name, least in (("repeats", 1), ("warmup", 0), ("threads", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} is {value}, but must be at least {least}")
    if arguments.clock == "cpu" and settings.device == "cuda":
        raise ValueError("--clock is cpu, but --device is cuda, whose work it does not see; use --clock wall")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ValueError(f"--json: the folder {arguments.json.absolute().parent} does not exist")
    return settings
