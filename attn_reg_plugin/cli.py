"""The console script `attn-reg`: one subcommand a module, imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from attn_reg_plugin.files import explain

#: subcommand -> (module with `add_arguments(parser)` and `run(arguments) -> int`, help)
COMMANDS: dict[str, tuple[str, str]] = {
    "prepare": (
        "attn_reg_plugin.commands.prepare",
        "a corpus for fairseq: your own text, wmt16, phrasebook",
    ),
    "convert": ("attn_reg_plugin.commands.convert", "OPUS-MT models into fairseq, and back"),
    "compare": (
        "attn_reg_plugin.commands.compare",
        "train, translate and score several methods; one table",
    ),
    "finetune": (
        "attn_reg_plugin.commands.finetune",
        "fine-tune an encoder on labelled text with several methods; one table",
    ),
    "sweep": (
        "attn_reg_plugin.commands.sweep",
        "search the settings of a method, by a grid or by Optuna, beside as many plain trainings",
    ),
    "predict": ("attn_reg_plugin.commands.predict", "predictions of a trained encoder, as GLUE takes them"),
    "evaluate": ("attn_reg_plugin.commands.evaluate", "a trained classifier on HANS or PAWS-X"),
    "probe": (
        "attn_reg_plugin.commands.probe",
        "what a trained model's attention leans on: maps, and positions dropped",
    ),
    "export": ("attn_reg_plugin.commands.export", "a trained encoder as a folder for from_pretrained"),
    "average": ("attn_reg_plugin.commands.average", "the mean of a fairseq run's last checkpoints"),
    "bench": ("attn_reg_plugin.commands.bench", "time and memory of a training step, method by method"),
    "run": ("attn_reg_plugin.commands.run", "all steps of a configuration file: prepare, compare, finetune ..."),
    "power": (
        "attn_reg_plugin.commands.power",
        "how many seeds show a difference, from those of a finished comparison",
    ),
    "report": ("attn_reg_plugin.commands.report", "what runs say: an HTML page, or drop rates as a schedule"),
}
#: what a command may lack -> the extra of setup.py that brings it
EXTRAS = {"fairseq": "fairseq", "seqeval": "fairseq", "sklearn": "fairseq", "transformers": "hf", "accelerate": "hf"}
EXTRAS |= dict.fromkeys(
    ["numpy", "sacrebleu", "sentencepiece", "datasets", "rich", "matplotlib", "omegaconf", "optuna", "scipy"],
    "experiments",
)


def user_dir() -> Path:
    """The folder to give to fairseq's `--user-dir`."""
    return Path(__file__).resolve().parent


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser, with the arguments of `command` (of no other: their modules stay unimported)."""
    parser = argparse.ArgumentParser(prog="attn-reg", description="Attention regularizers for Transformers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("user-dir", help="print the folder to give to fairseq's --user-dir")
    for name, (module, description) in COMMANDS.items():
        subparser = commands.add_parser(name, help=description, description=description)
        if name == command:
            loaded = importlib.import_module(module)
            loaded.add_arguments(subparser)
            subparser.set_defaults(run=loaded.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `attn-reg`; bad input ends in one sentence and exit status 2, without a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not logging.root.handlers and logging.lastResort is not None:
        # one of fairseq's models asks for everybody's debug messages at its import, unless logging is set up
        logging.root.addHandler(logging.lastResort)
    try:
        return _run(argv)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:  # a part of a package, or another's
            raise
        print(
            f"attn-reg {argv[0]}: {error.name} is not installed; in the checkout of this package, "
            f"pip install '.[{EXTRAS[error.name]}]' brings it",
            file=sys.stderr,
        )
        return 2


def _run(argv: Sequence[str]) -> int:
    """As `main`, but for a package that is not installed."""
    parser = build_parser(argv[0] if argv else None)
    if zero := _with_zero_byte(argv):
        parser.error(f"{zero} holds a NUL byte, which no path and no flag can hold")
    arguments = parser.parse_args(argv)
    if arguments.command == "user-dir":
        print(user_dir())
        return 0
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # whoever read standard output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        out = getattr(arguments, "out", None)
        print(f"attn-reg {arguments.command}: {explain(error, out)}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"attn-reg {arguments.command}: {error}", file=sys.stderr)
        return 2


def _with_zero_byte(argv: Sequence[str]) -> str:
    """The flag whose value holds a NUL byte, or what stands there in its place; empty where none does."""
    for place, word in enumerate(argv):
        if "\0" in word:
            name, before = word.partition("=")[0], argv[place - 1] if place else ""
            if name.startswith("--") and "\0" not in name:
                return name
            return before if before.startswith("--") else repr(word)
    return ""


if __name__ == "__main__":
    sys.exit(main())
