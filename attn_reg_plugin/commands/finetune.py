"""`attn-reg finetune`: fine-tune a pretrained encoder on labelled text with several methods."""

from __future__ import annotations

import argparse

from attn_reg_plugin.commands.comparing import Listing, arguments_of, carry_out
from attn_reg_plugin.experiments.fine_tuning import FineTuning

EXAMPLES = FineTuning.EXAMPLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg finetune`; whatever follows `--` goes to every fairseq-train."""
    parser.usage = "attn-reg finetune [CONFIG | TASK DATA] --out FOLDER [options] [-- flags of fairseq-train]"
    arguments_of(parser, FineTuning)
    parser.add_argument("--list-tasks", action=Listing, lines=_tasks, help="list the labelled tasks and stop")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the comparison: 0, or 130 when interrupted from the keyboard."""
    return carry_out(arguments, FineTuning)


def _tasks() -> list[str]:
    from attn_reg_plugin.labelled import TASKS

    return [f"{name:14}{task.kind.replace('_', ' ')}, {', '.join(task.metrics)}" for name, task in TASKS.items()]
