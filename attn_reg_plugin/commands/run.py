"""`attn-reg run`: the steps that a configuration file describes, such as preparing a corpus and comparing methods."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_reg_plugin.experiments.steps import STEPS, plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg run`."""
    parser.usage = "attn-reg run FILE [--SETTING VALUE ...] [-- flags of fairseq-train]"
    parser.add_argument("file", type=Path, metavar="FILE", help=f"YAML with a section per step: {', '.join(STEPS)}")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SETTING",
        help="flags that win over the file: of values above its sections, and of any step; `FILE -h` lists them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry out the steps in the file's order: 0, or what the first one that ended otherwise gave."""
    for step in plan(arguments.file, arguments.words):
        if code := step():
            return code
    return 0
