"""What the commands that compare methods share: their arguments, and carrying out their runs one after the other."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence
from threading import Event
from typing import Any

from rich.console import Console

from attn_reg_plugin.experiments.jobs import at_a_time
from attn_reg_plugin.experiments.progress import Reporter
from attn_reg_plugin.experiments.runs import RunError


def add_method_arguments(parser: argparse.ArgumentParser, methods: Iterable[str]) -> None:
    """Which of `methods`, with which seeds and flags of their own."""
    parser.add_argument(
        "--methods",
        default="plain,ad_drop",
        help=f"which, with commas: {', '.join(methods)} (default: %(default)s)",
    )
    parser.add_argument("--seeds", default="1", help="seeds, with commas (default: %(default)s)")
    parser.add_argument(
        "--method-flags",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="flags of fairseq-train for one method, winning over its own: ad_drop='--ad-drop-p 0.2'",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="trainings at a time; above 1 each of them has one thread"
    )


def method_names(arguments: argparse.Namespace) -> list[str]:
    """The methods asked for."""
    return [name.strip() for name in arguments.methods.split(",") if name.strip()]


def take_the_rest(parser: argparse.ArgumentParser) -> None:
    """Let `extra` be whatever follows `--`."""
    parser.set_defaults(extra=[])
    parser.parse_known_args = functools.partial(split_extra, parser.parse_known_args)  # type: ignore[method-assign]


def parse_seeds(text: str) -> list[int]:
    """The seeds in `1,2,3`; raises ValueError unless they are distinct whole numbers, none negative."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len({int(word) for word in words}) != len(words):
        raise ValueError(f"--seeds wants distinct whole numbers with commas, given {text!r}")
    return [int(word) for word in words]


def split_extra(
    parse: Any, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Parse what stands before `--` by `parse`; the rest becomes `extra`."""
    # argparse cannot take positionals after `--` when options stand between them and the first one
    words = list(args or [])
    place = words.index("--") if "--" in words else len(words)
    namespace, unknown = parse(words[:place], namespace)
    namespace.extra = words[place + 1 :]
    return namespace, unknown


def has_gpu() -> bool:
    """Whether there is a GPU to train on."""
    import torch

    return torch.cuda.is_available()


def threads(jobs: int) -> int | None:
    """The threads of each of `jobs` trainings at a time; None leaves that to the environment."""
    return 1 if jobs > 1 else None


def carry_out(runs: Sequence[Any], console: Console, epochs: int, summary: Callable[[Any], str], jobs: int = 1) -> bool:
    """Do of the runs what is not done yet; False when interrupted from the keyboard.

    Args:
        runs: of `attn-reg compare` or `finetune`; the commands of all are tried and the folders of all claimed first,
            so that what cannot work is refused before anything is written, and other settings before anything is
            trained.
        console: where progress is shown.
        epochs: of a run, at most.
        summary: what is said of a finished run.
        jobs: runs at a time, at least 1.

    Raises:
        ValueError: a command cannot work, or a folder holds a run with other settings.
        RunError: a run failed; the end of its log is shown.
        ValueError: `jobs` is below 1.
    """
    from attn_reg_plugin.experiments.checks import check_runs  # imports fairseq

    check_runs(runs)
    for one in runs:
        one.claim()
    try:
        with Reporter(console) as reporter:
            tasks = [functools.partial(_carry_out, one, reporter, epochs, summary) for one in runs]
            at_a_time(tasks, jobs)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from the last checkpoint", highlight=False)
        return False
    return True


def _carry_out(one: Any, reporter: Reporter, epochs: int, summary: Callable[[Any], str], stop: Event) -> None:
    progress = reporter.start(one.title, epochs)
    known = one.finished()
    try:
        one.carry_out(progress.watch, stop)
    except RunError as error:
        if error.tail:
            reporter.console.print(error.tail, highlight=False, markup=False, soft_wrap=True)
        raise
    progress.finish(summary(one) + (" (was done)" if known else ""))
