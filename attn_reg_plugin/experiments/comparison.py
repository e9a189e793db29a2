"""What comparisons of methods share: their settings, carrying out their runs, and saying what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

from rich.console import Console

from attn_reg_plugin.configuration import refusing, setting
from attn_reg_plugin.experiments.executing_before import RunError
from attn_reg_plugin.experiments.jobs import Slots, at_a_time, visible_gpus
from attn_reg_plugin.experiments.methods import Method, known_methods, select_methods, split_flags
from attn_reg_plugin.experiments.progress import Reporter
from attn_reg_plugin.experiments.runs_before import Run, RunInUse
from attn_reg_plugin.experiments.table import markdown, terminal_table
from attn_reg_plugin.experiments.training_part import DECIDED
from attn_reg_plugin.files import alone_in, write_json, write_text
from attn_reg_plugin.terminal import say, show

#: seconds between two looks at what another process has
WAIT = 1.0
#: who has this file writes the table of a comparison, see `alone_in`
RESULTS_LOCK = "results.lock"


def methods_setting(without: Sequence[str] = ()) -> Any:
    """The setting that says which of the known methods are compared; its help lists them."""
    return setting(
        lambda: (
            f"which, with commas: {', '.join(known_methods(without))}; several that act together as "
            "`ad_drop+r_drop`; in a file also a mapping of each to its "
            "settings, `name: {p: 0.2, ...}`, the same method several times as `own_name: {like: ad_drop, ...}`, more "
            "flags of fairseq-train as `flags`"
        ),
        "plain,ad_drop",
        metavar="NAMES",
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The settings that every comparison has; a subclass says what its runs are and what its table shows.

    Raises:
        Refused: a seed is negative or comes twice; an unknown method, or settings that it hasn't.
    """

    out: Path = setting("folder of the runs", metavar="FOLDER")
    methods: Any = methods_setting()
    seeds: tuple[int, ...] = setting("seeds, with commas", (1,))
    method_flags: tuple[str, ...] = setting(
        "flags of fairseq-train for one method, winning over its own: ad_drop='--ad-drop-p 0.2'",
        (),
        metavar="NAME=FLAGS",
        repeated=True,
    )
    train_flags: str = setting("more flags of every fairseq-train, in one text; or behind --", "", rest=True)
    jobs: int = setting(
        "trainings at a time; above 1 each of them has one thread, and a GPU of its own as long as there are enough",
        1,
        within="[1, inf)",
        metavar="N",
    )
    cpu: bool = setting("use the CPU even if there is a GPU", False)

    def __post_init__(self) -> None:
        """Check the seeds and the methods."""
        with refusing("seeds"):
            if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) != len(self.seeds):
                given = ",".join(map(str, self.seeds))
                raise ValueError(f"--seeds wants distinct whole numbers with commas, given {given!r}")
        with refusing("methods"):
            select_methods(self.methods, (), known_methods(self.without))
        with refusing("method_flags"):
            for method in self.selected():
                self._refuse_decided(f"{method.name}", method.flags)
        with refusing("train_flags"):
            self._refuse_decided("--train-flags", self.own_flags)

    def _refuse_decided(self, where: str, words: Sequence[str]) -> None:
        for flag in (word.partition("=")[0] for word in words):
            if flag in self.decided:
                name = self.decided[flag]
                decides = f"the setting {name} decides; give that" if name else "the command decides; leave it out"
                raise ValueError(f"{where} has {flag}, which {decides}")

    # -- what a subclass implements ---------------------------------------------------------------------------------

    #: the methods that it does not know
    without = ()
    #: the flags of fairseq-train that aren't taken, and which setting decides each; empty: the command itself
    decided: ClassVar[Mapping[str, str]] = DECIDED

    def plan(self, methods: Sequence[Method]) -> Sequence[Run]:
        """The runs, see `each`."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """Epochs of a run, at most."""
        raise NotImplementedError

    def summary(self, one: Any) -> str:
        """What is said of a finished run."""
        raise NotImplementedError

    def report(self, console: Console, methods: Sequence[Method], runs: Sequence[Any]) -> None:
        """Publish the table of the finished runs, and what else there is to show."""
        raise NotImplementedError

    # -- what it gets -----------------------------------------------------------------------------------------------

    def carry_out(self) -> int:
        """Do all runs, write the table into `out` and print it: 0, or 130 when interrupted from the keyboard.

        Raises:
            ValueError: bad input or a failed run, in one sentence.
            FileNotFoundError: data that is missing.
        """
        methods = self.selected()
        runs = self.plan(methods)
        console = Console()
        gpus = [] if self.cpu or self.jobs == 1 or not has_gpu() else visible_gpus()
        if not carry_out(runs, console, self.longest, self.summary, self.jobs, gpus):
            return 130
        with alone_in(self.out, RESULTS_LOCK):
            self.report(console, methods, runs)
        return 0

    def selected(self) -> list[Method]:
        """The methods, with their settings and flags.

        Raises:
            ValueError: see `select_methods`.
        """
        return select_methods(self.methods, self.method_flags, known_methods(self.without))

    def each(self, methods: Sequence[Method], make: Callable[..., Any]) -> list[Any]:
        """The runs, seed by seed, so that the first seed of all methods is done first.

        Args:
            make: a run from method, seed, folder and threads.
        """
        threads = 1 if self.jobs > 1 else None
        return [
            make(method=method, seed=seed, folder=self.out / f"{method.name}-seed{seed}", threads=threads)
            for seed in self.seeds
            for method in methods
        ]

    @property
    def own_flags(self) -> list[str]:
        """The words of `train_flags`."""
        return split_flags("--train-flags", self.train_flags)

    @property
    def device_flags(self) -> list[str]:
        """The flags that keep fairseq off the GPU, where it should stay off or doesn't exist."""
        return ["--cpu", "--num-workers", "0"] if self.cpu or not has_gpu() else []

    def _one_gpu(self) -> list[str]:
        """The flags that keep fairseq-train, which takes every GPU there is, to one where there are several jobs.

        They are settings of a run, so that one begun on all GPUs isn't continued on one with other batches.
        """
        several = self.jobs > 1 and not self.device_flags and len(visible_gpus()) > 1
        return ["--distributed-world-size", "1"] if several else []

    def publish(
        self, console: Console, table: tuple[list[str], list[list[str]]], notes: Sequence[str], content: dict[str, Any]
    ) -> None:
        """Write results.json and results.md into `out`, and print the table; see `publish`."""
        publish(self.out, console, table, notes, content)


def publish(
    out: Path,
    console: Console,
    table: tuple[list[str], list[list[str]]],
    notes: Sequence[str],
    content: dict[str, Any],
) -> None:
    """Write results.json and results.md, and print the table.

    Args:
        out: the folder.
        table: header and rows as texts.
        content: of results.json, without the runs' own, which come with it.
    """
    write_json(out / "results.json", content)
    write_text(out / "results.md", markdown(*table, notes))
    show(console, terminal_table(*table), notes)


def recorded(runs: Sequence[Run]) -> dict[str, Any]:
    """Settings and results of every run, by method and seed."""
    return {f"{one.method.name}-seed{one.seed}": one.settings() | one.result() for one in runs}


def seeds_of(runs: Sequence[Run]) -> str:
    """The seeds, for notes."""
    return ", ".join(map(str, sorted({one.seed for one in runs})))


def has_gpu() -> bool:
    """Whether there is a GPU to train on."""
    import torch

    return torch.cuda.is_available()


def carry_out(
    runs: Sequence[Run],
    console: Console,
    epochs: int,
    summary: Callable[[Any], str],
    jobs: int = 1,
    gpus: Sequence[str] = (),
) -> bool:
    """Do of the runs what is not done yet; False when interrupted from the keyboard.

    Runs that another process works on are left to it; if it ends before they are done, they are taken over.

    Args:
        runs: of `attn-reg compare` or `finetune`; the commands of all are tried and the folders of all claimed first,
            so that what cannot work is refused before anything is written, and other settings before anything is
            trained.
        console: where progress is shown.
        epochs: of a run, at most.
        summary: what is said of a finished run.
        jobs: runs at a time, at least 1.
        gpus: with several jobs each run has one of these.

    Raises:
        ValueError: a command cannot work, or a folder holds a run with other settings.
        RunError: a run failed; the end of its log is shown.
    """
    from attn_reg_plugin.experiments.checks import check_runs  # imports fairseq

    check_runs(runs)
    for one in runs:
        one.claim()
    slots, left = Slots(gpus, jobs), list(runs)
    try:
        with Reporter(console, len(runs)) as reporter:
            while left:
                elsewhere: list[Run] = []
                at_a_time([_task(one, reporter, epochs, summary, slots, elsewhere) for one in left], jobs)
                left = [one for one in left if one in elsewhere]
                while left and all(one.in_use() for one in left):
                    time.sleep(WAIT)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from the last checkpoint", highlight=False)
        return False
    return True


def _task(
    one: Run, reporter: Reporter, epochs: int, summary: Callable[[Any], str], slots: Slots, elsewhere: list[Run]
) -> Callable[[Event], None]:
    """What does a run, or adds it to `elsewhere`."""

    def work(stop: Event) -> None:
        known = one.finished()
        progress = reporter.start(one.title, epochs)
        try:
            with slots.lent() as gpu:
                (one if gpu is None else replace(one, device=gpu)).carry_out(progress.watch, stop)
        except RunInUse as error:
            progress.set_aside(f"{str(error).partition(';')[0]}; left for the end")
            elsewhere.append(one)
            return
        except RunError as error:
            if error.tail:
                say(reporter.console, error.tail)
            raise
        progress.finish(summary(one) + (" (was done)" if known else ""))

    return work
