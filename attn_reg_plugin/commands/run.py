"""`attn-reg run`: the steps that a configuration file describes, such as preparing a corpus and comparing methods."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = (
    "attn-reg run examples/demo/demo.yaml --epochs 24 --out runs/longer",
    "attn-reg run examples/papers/ad_drop_table_1.yaml --task cola -h",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg run`; the others are flags of the file's values and steps."""
    parser.usage = "attn-reg run FILE [--SETTING VALUE ...] [-- flags of fairseq-train]"
    what = "YAML with a section per step: convert opus-mt, prepare ..., compare, finetune, sweep, bench, report"
    parser.add_argument("file", type=Path, metavar="FILE", help=what)
    text = "flags that win over the file: of values above its sections, and of any step; `FILE -h` lists them"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SETTING", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the steps in the file's order: 0, or what the first step that ended otherwise gave."""
    from attn_reg_plugin.experiments.steps import plan

    rest = ["--", *arguments.rest] if arguments.rest else []
    for step in plan(arguments.file, [*arguments.words, *rest]):
        if code := step.carry_out():
            return code
    return 0
