"""Comparisons of methods: the settings that all of them have, and what becomes of them, a list of runs and a table."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.experiments.data_folder import sha256_of
from attn_reg_plugin.experiments.running.executor import carry_out, visible_gpus
from attn_reg_plugin.experiments.running.flags import START, Flags, named, parsed, words_of
from attn_reg_plugin.experiments.running.run import Run
from attn_reg_plugin.files import lock_folder

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.methods import Method
    from attn_reg_plugin.labelled import Sampling

#: headings of settings in the help
DATA, METHODS, TRAINING, RUNNING = "data", "methods", "training", "running"
#: settings about the training examples, which become flags of fairseq-train of the same name -> their defaults
_NAMED: dict[str, Any] = {"train_examples": 0, "train_fraction": 1.0, "train_per_class": 0, "train_sample_seed": 1}
_NAMED |= {"held_out": 0.0, "label_noise": 0.0, "shortcut": 0.0, "shortcut_words": (), "shortcut_at_evaluation": None}
#: flags of fairseq-train that settings decide -> which setting: given beside them, a run would not be what these say
DECIDED = {name.replace("_", "-"): name for name in _NAMED}
DECIDED |= {"train-sample-seed": "seeds", "seed": "seeds", "save-dir": "out"}
DECIDED |= {"restore-file": START}  # a killed run would begin anew with it
#: what a run reads and keeps is the command's
DECIDED |= dict.fromkeys(("log-format", "disable-validation", "no-save", "valid-subset"), "")
#: flags by which a metric chooses checkpoints
CHOOSING = {"best-checkpoint-metric": "metric", "maximize-best-checkpoint-metric": "metric"}
#: flags that name a file, whose content makes a run another one
_FILES = (START, "scheduled-dropout-schedule")
#: course of the learning rate -> the scheduler of fairseq, and its flag that takes the number of updates, if it ends
#: with the last
SCHEDULERS = {
    "linear": ("polynomial_decay", "total-num-update"),
    "fixed": ("fixed", ""),
    "cosine": ("cosine", "lr-period-updates"),
    "inverse_sqrt": ("inverse_sqrt", ""),
}
#: courses that end with the last update
TO_THE_END = tuple(name for name, (_, end) in SCHEDULERS.items() if end)


def schedule_flags(course: str, warmup: int, updates: int | None) -> dict[str, Any]:
    """The flags of a learning rate's course; a training that would end in the warm-up is refused.

    Args:
        course: of `SCHEDULERS`.
        warmup: updates with a rising rate.
        updates: of the whole training; None where they are not counted yet.
    """
    scheduler, end = SCHEDULERS[course]
    if updates is not None and end and warmup >= updates:
        raise ValueError(
            f"warmup is {warmup}, but must be below the {updates} updates of the training, with which lr_scheduler "
            f"{course} ends"
        )
    flags = {"lr-scheduler": scheduler, "warmup-updates": max(warmup, 1 if course == "inverse_sqrt" else 0)}
    if end:
        total = updates or 0
        flags[end] = total if end == "total-num-update" else max(1, total - warmup)
    return flags


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The settings that every comparison has; a subclass says what its runs are."""

    GROUP: ClassVar[str] = RUNNING

    out: Path = setting("folder of the runs; the same command goes on where an interrupted one ended", metavar="FOLDER")
    methods: Any = setting(
        "which, with commas, see --list-methods; several that act together as `ad_drop+r_drop`; in a file also a "
        "mapping, `name: {p: 0.2}`, `own_name: {like: ad_drop, flags: --lr 1e-4}`",
        "plain,ad_drop",
        metavar="NAMES",
        group=METHODS,
    )
    seeds: tuple[int, ...] = setting("seeds, with commas", (1,), group=METHODS)
    method_flags: tuple[str, ...] = setting(
        "flags of fairseq-train for a method, winning over its own: ad_drop='--ad-drop-p 0.2'",
        (),
        metavar="NAME=FLAGS",
        repeated=True,
        group=METHODS,
    )
    train_flags: str = setting("more flags of every fairseq-train; or behind --", "", rest=True, group=TRAINING)
    train_examples: int = setting(
        "train on so many only, the same for every seed; 0: on all", 0, within="[0, inf)", group=DATA
    )
    train_fraction: float = setting(
        "train on this share only, drawn anew for every seed", 1.0, within="(0, 1]", group=DATA
    )
    jobs: int = setting(
        "trainings at a time; above 1 each of them has one thread, and its own GPU if there are enough",
        1,
        within="[1, inf)",
    )
    cpu: bool = setting("use the CPU even if there is a GPU", False)

    #: the methods that it does not know
    without: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check the seeds and the methods."""
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) != len(self.seeds):
            given = ",".join(map(str, self.seeds))
            raise ValueError(f"--seeds wants distinct whole numbers with commas, given {given!r}")
        for method in self.selected():
            refuse_decided(f"--method-flags: {method.name}", set(method.flags) & method.asked, self.decided)
        refuse_decided("--train-flags", self.own_flags, {**self.decided, "attn-reg": "methods"})
        self._check_user_dir("--train-flags", self.own_flags)
        self.sampling(1)

    def _check_user_dir(self, where: str, flags: Mapping[str, Any]) -> None:
        if (user_dir := flags.get("user-dir")) is not None and not os.path.isdir(str(user_dir)):
            raise ValueError(f"{where}: --user-dir is {user_dir}, but there is no such folder")

    def check_part(self, there: int) -> None:
        """Refuse a part of so many training examples that is more than all of them, or none; 0: they are not known."""
        if self.train_examples > there > 0:
            raise ValueError(f"--train-examples is {self.train_examples}, but there are {there} training examples")
        if there and not round(self.train_fraction * there):
            raise ValueError(f"--train-fraction {self.train_fraction:g} of {there} training examples is none")

    @property
    def decided(self) -> Mapping[str, str]:
        """The flags of fairseq-train that are not taken, and which setting decides each; empty: the command itself."""
        return DECIDED

    def plan(self, methods: Sequence[Method]) -> list[Run]:
        """The runs, see `each`."""
        raise NotImplementedError

    def notes(self, runs: Sequence[Run]) -> list[str]:
        """The lines below the table of the finished runs, which say how they were made."""
        raise NotImplementedError

    def sampling(self, seed: int) -> Sampling:
        """The part of the training set that a run has; more than one part asked for is refused."""
        from attn_reg_plugin.labelled import Sampling

        per_class, held_out = (getattr(self, name, 0) for name in ("train_per_class", "held_out"))
        return Sampling(self.train_examples, self.train_fraction, per_class, self.drawing_seed(seed), held_out)

    def drawing_seed(self, seed: int) -> int:
        """The seed of what is drawn of the training examples: the run's where every seed has examples of its own."""
        return seed if self.train_fraction < 1 or getattr(self, "train_per_class", 0) else 1

    def example_flags(self, seed: int) -> dict[str, Any]:
        """The flags of fairseq-train about the training examples; none for what is left at its default."""
        values = {**vars(self), "train_sample_seed": self.drawing_seed(seed)}
        if not values.get("shortcut"):
            values |= {"shortcut_words": (), "shortcut_at_evaluation": None}
        given = {name: values[name] for name, default in _NAMED.items() if values.get(name, default) != default}
        return named(**{name: ",".join(one) if isinstance(one, tuple) else one for name, one in given.items()})

    def carry_out(self) -> int:
        """Do all runs, write the table into `out` and print it: 0, or 130 when interrupted from the keyboard."""
        from rich.console import Console

        from attn_reg_plugin.experiments.running.checks import check_runs  # fairseq

        runs, console = self.plan(self.selected()), Console()
        check_runs(runs)  # nothing is written before all commands can work
        for one in runs:
            one.claim()
        if not carry_out(runs, console, self.epochs, _summary, self.jobs, self.gpus):
            return 130
        from attn_reg_plugin.experiments.report.table import publish  # pandas

        with lock_folder(self.out, wait=True):
            publish(self.out, runs, self.notes(runs), console)
        return 0

    def selected(self) -> list[Method]:
        """The methods, with their settings and flags; see `select_methods` for what is refused."""
        from attn_reg_plugin.experiments.methods import known_methods, select_methods

        return select_methods(self.methods, self.method_flags, known_methods(self.without))

    def each(self, methods: Sequence[Method], settings: Callable[[Method, int], Mapping[str, Any]], kind: type) -> list:
        """The runs, seed by seed, so that the first seed of all methods is done first.

        Args:
            settings: of a method and a seed, without what names them.
            kind: of runs, a subclass of `Run`.
        """
        runs = []
        for seed in self.seeds:
            for one in methods:
                about = {"method": one.name, "title": one.title, "seed": seed, **settings(one, seed)}
                about["files"] = {**about.get("files", {}), **digests_of_files(about["flags"])}
                folder = self.out / f"{one.name}-seed{seed}"
                runs.append(kind(folder, about, threads=1 if self.jobs > 1 else None))
        return runs

    @property
    def own_flags(self) -> dict[str, Any]:
        """The flags of `train_flags`."""
        return parsed("--train-flags", self.train_flags)

    @property
    def gpus(self) -> list[str]:
        """The GPUs that it may use, as CUDA_VISIBLE_DEVICES names them."""
        return [] if self.cpu else visible_gpus()

    def device_flags(self, alone: bool = False) -> dict[str, Any]:
        """The flags that keep fairseq off the GPU, where it should stay off or there is none; or `alone`, on one.

        They are settings of a run, so that a run begun on all GPUs isn't continued on one with other batches.
        """
        flags = {} if self.gpus else {"cpu": True, "num-workers": 0}
        return {**flags, "distributed-world-size": 1} if alone and len(self.gpus) > 1 else flags

    def part_notes(self, one: Run) -> list[str]:
        """The line about the training examples below a table; none where all are trained on, as they are."""
        part = {name: value for name, value in one.flags.items() if name in DECIDED and name != "train-sample-seed"}
        return [f"training examples: {shlex.join(words_of(part))}"] if part else []


def refuse_decided(where: str, flags: Iterable[str], decided: Mapping[str, str]) -> None:
    """Refuse flags that something else decides: a setting, by its name, or the command itself, which has none."""
    for flag in flags:
        if flag in decided:
            name, dashed = decided[flag], flag if flag.startswith("-") else f"--{flag}"
            decides = f"the setting {name} decides; give that" if name else "the command decides; leave it out"
            raise ValueError(f"{where} has {dashed}, which {decides}")


def _summary(one: Run) -> str:
    """The line about a finished run: its scores, and what tells nothing."""
    said = [
        f"{metric} {value:.2f}" + ("" if subset in ("valid", "test") else f" {subset}")
        for subset, scores in one.scores.items()
        for metric, value in scores.items()
    ]
    same = [f"the same output for every example of {subset}" for subset in one.result().get("constant", ())]
    return ", ".join([*said, *same])


def digests_of_files(flags: Flags) -> dict[str, str]:
    """Digests of the files that flags name, by the flag."""
    files = {name: str(flags[name]) for name in _FILES if os.path.isfile(str(flags.get(name, "")))}
    return {name: sha256_of(Path(file))[:16] for name, file in files.items()}
