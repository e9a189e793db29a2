"""One run of `attn-reg finetune`: a method and a seed on a labelled task, in a folder of its own.

As in `runs.py`, `run.json` says what shaped it and `result.json` what is done; an interrupted training goes on.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import numpy as np

from attn_reg_plugin.checkpoints import WEIGHTS
from attn_reg_plugin.corpora.manifest import sha256
from attn_reg_plugin.experiments.example_scores import Examples, of_predictions
from attn_reg_plugin.experiments.executing_before import RunError, execute, tail_of
from attn_reg_plugin.experiments.predicted import MODULE, file_of, read_predictions
from attn_reg_plugin.experiments.run_settings import in_files, values_of
from attn_reg_plugin.experiments.runs_before import USER_DIR, Run, hold
from attn_reg_plugin.experiments.training_log import TrainingLog, read_log, seconds_per_epoch
from attn_reg_plugin.files import write_json
from attn_reg_plugin.labelled import REGRESSION, TAGGING, LabelledTask, find_split, is_hub
from attn_reg_plugin.labelled.metrics import SCORES
from attn_reg_plugin.labelled.reading import HUB
from attn_reg_plugin.tasks.labelled_task import TASKS_OF_KINDS
from attn_reg_plugin.tasks.sidecar import Sidecar

#: what checkpoints can be chosen by beside metrics; lower is better
LOSSES = ("loss",)
#: the name of the examples that are held out of training, to choose by, beside `valid`
HELD_OUT = "held_out"
#: the weights of a pretrained model, whatever they are called
_MODEL_FILES = ("config.json", "tokenizer.json", *WEIGHTS)
#: what else of it shapes a run
_TOKENIZER_FILES = ("tokenizer_config.json", "vocab.*", "merges.txt", "*.model")


@dataclass(frozen=True)
class LabelledData:
    """Where the examples are, and what they are.

    Attributes:
        source: folder or hub, as fairseq's task takes it.
        task: the row of the table.
    """

    source: str
    task: LabelledTask

    def digest(self) -> str:
        """A digest of what is trained and validated on; of the hub, its name."""
        if is_hub(self.source):
            return self.source
        return digest_of([find_split(self.task, Path(self.source), split) for split in ("train", "valid")])

    def digest_of_further(self) -> str:
        """A digest of the further validation sets, by which nothing is chosen; empty without any."""
        further = () if is_hub(self.source) else self.validations()[1:]
        return digest_of([find_split(self.task, Path(self.source), split) for split in further]) if further else ""

    def validations(self) -> tuple[str, ...]:
        """The validation sets that are there: `valid`, and with MNLI's mismatched data `valid1`."""
        if is_hub(self.source):
            return ("valid", *(self.task.more_valid if self.source == HUB else ()))
        return ("valid", *(split for split in self.task.more_valid if self._has(split)))

    def _has(self, split: str) -> bool:
        try:
            find_split(self.task, Path(self.source), split)
        except ValueError:
            return False
        return True


def digest_of(paths: list[Path]) -> str:
    """A digest of the files' contents, and of what they are called inside a folder, whose name can be a label."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.txt*")) if path.is_dir() else [path]:
            digest.update(b"" if file == path else file.relative_to(path).as_posix().encode())
            digest.update(bytes.fromhex(sha256(file)))
    return digest.hexdigest()[:16]


def digest_of_model(model: str) -> str:
    """A digest of a pretrained model's folder; of the hub, its name."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    return digest_of(sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}))


def digest_of_tokenizer(model: str) -> str:
    """A digest of a pretrained model's vocabulary; empty where its folder has no files of one, and of the hub."""
    paths = sorted({path for pattern in _TOKENIZER_FILES for path in Path(model).glob(pattern)})
    return digest_of(paths) if paths else ""


@dataclass(frozen=True)
class LabelledRun(Run):
    """A method and a seed; `data` is a `LabelledData`, and nothing is generated.

    Attributes:
        model: folder or hub name of the pretrained encoder.
        model_digest: see `digest_of_model`.
        metric: checkpoints are chosen by it; empty: by the first official one.
        measured: with examples held out, whether the validation sets are measured at the end.
    """

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "training": ("epochs", "best_epoch", "scores", "seconds_per_epoch"),
        "reported": ("scores",),
    }

    model: str = ""
    model_digest: str = ""
    metric: str = ""
    measured: bool = True

    @property
    def metrics(self) -> tuple[str, ...]:
        """The one that checkpoints are chosen by, and the official metrics."""
        official = self.data.task.metrics
        return tuple(dict.fromkeys([self.metric or official[0], *official]))

    @property
    def held_out(self) -> bool:
        """Whether checkpoints are chosen on examples held out of training, and not on the validation set."""
        return "--held-out" in self.train_flags

    @property
    def subsets(self) -> tuple[str, ...]:
        """None: nothing is translated."""
        return ()

    def train_command(self) -> list[str]:
        """The command of fairseq-train."""
        kind = self.data.task.kind
        criterion = "attn_reg_tagging" if kind == TAGGING else "attn_reg_classification"
        chief = self.metrics[0]
        maximize = [] if chief in LOSSES else ["--maximize-best-checkpoint-metric"]
        extra = [name for name in self.metrics if name not in LOSSES]
        if tuple(extra) != self.data.task.metrics:
            maximize += ["--validation-metrics", ",".join(extra)]
        return [
            *(sys.executable, "-m", "fairseq_cli.train", self.data.source, "--user-dir", str(USER_DIR)),
            *("--task", TASKS_OF_KINDS[kind], "--labelled", self.data.task.name),
            *("--arch", "hf_encoder", "--hf-model", self.model, "--criterion", criterion),
            *("--best-checkpoint-metric", chief, *maximize),
            *("--save-dir", str(self.folder / "checkpoints"), "--no-epoch-checkpoints"),
            *("--log-format", "json", "--seed", str(self.seed), *self.train_flags),
        ]

    def settings(self) -> dict[str, Any]:
        """What shapes the training; of the paths in its flags, `differing` says which make no difference."""
        flags = in_files(self.train_flags) | {"flags": shlex.join(self.train_flags)}
        task = {"data": self.data.digest(), "task": self.data.task.name, "model": self.model_digest}
        chosen = {} if self.metrics[0] == self.data.task.metrics[0] else {"metric": self.metrics[0]}
        later = {"further": self.data.digest_of_further(), "tokenizer": digest_of_tokenizer(self.model)}
        known = {name: digest for name, digest in later.items() if digest}
        attributed = {"attributed": "prediction"} if self._attributes_prediction() else {}
        return {**task, **chosen, **known, **attributed, "seed": self.seed, **flags}

    def _attributes_prediction(self) -> bool:
        """Whether it attributes the predicted value of a regression, where earlier versions took minus the error."""
        values = values_of(self.train_flags)
        by_labels = values.get("--ad-drop-probe", "fresh") == "fresh" and values.get("--ad-drop-labels") != "gold"
        ours = by_labels and "ad_drop" in values.get("--attn-reg", "").split("+")
        return ours and self.data.task.kind == REGRESSION and values.get("--ad-drop-attribution") != "random"

    def figures(self) -> dict[str, dict[str, float]]:
        """The metrics of a finished run by validation set; in percent, but for a loss."""
        result = self.result()
        chosen_by = dict(result["training"]["scores"])
        if self.held_out:
            return {**result["reported"]["scores"], HELD_OUT: {self.metrics[0]: chosen_by[self.metrics[0]]}}
        further = {subset: both for subset, both in self._predictions().items() if subset != "valid"}
        return {"valid": chosen_by, **self._scored(further)}

    def _scored(self, predictions: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, dict[str, float]]:
        """The metrics of predictions, by validation set."""
        scores = SCORES[self.data.task.kind]
        names = [name for name in self.metrics if name in scores]
        return {subset: {name: float(scores[name](*both)) for name in names} for subset, both in predictions.items()}

    def examples(self) -> dict[str, dict[str, Examples]]:
        """The metrics as functions of the examples, by validation set; without those whose predictions are gone."""
        kind = self.data.task.kind
        return {subset: of_predictions(kind, self.metrics, *both) for subset, both in self._predictions().items()}

    def _predictions(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        paths = {subset: file_of(self.folder, subset) for subset in self.data.validations()}
        return {subset: read_predictions(path, self.data.task) for subset, path in paths.items() if path.is_file()}

    def finished(self) -> bool:
        """Whether the run is trained, and with held-out examples measured on the validation sets.

        `carry_out` predicts what isn't predicted yet, as of runs of earlier versions.
        """
        return {"training", *(["reported"] if self.held_out and self.measured else [])} <= self.result().keys()

    def for_search(self) -> LabelledRun:
        """The run without a look at the validation sets, where it chooses on held-out examples."""
        return replace(self, measured=not self.held_out)

    def _to_predict(self) -> list[str]:
        """The validation sets without predictions; none where they aren't measured or the checkpoint is gone."""
        if (self.held_out and not self.measured) or not (self.folder / "checkpoints" / "checkpoint_best.pt").is_file():
            return []
        return [subset for subset in self.data.validations() if not file_of(self.folder, subset).is_file()]

    def carry_out(self, watch: Callable[[TrainingLog], None], stop: Event | None = None) -> None:
        """Train and predict, unless that is done; the last checkpoint and its state are deleted.

        The best one stays, and so do those of `--save-interval-updates`.

        Raises:
            RunError: a command fails, or another process works in the folder.
        """
        with hold(self.folder) as lock:
            if "training" not in self.result():
                write_json(self.folder / "result.json", {"training": self._train(watch, lock, stop)})
            Sidecar(str(self.folder / "checkpoints")).delete_last()
            if subsets := self._to_predict():
                cpu = ["--cpu"] if "--cpu" in self.train_flags else []
                command = [sys.executable, "-m", MODULE, str(self.folder), self.data.source, *subsets, *cpu]
                what = f"prediction of the validation set with {self.title}"
                execute(command, self.folder / "predict.log", what, lock, stop=stop, **self._placed())
            if not self.finished():
                self._report()

    def _report(self) -> None:
        """Measure the validation sets, which nothing was chosen by, with what is predicted for them."""
        predictions = self._predictions()
        if "valid" not in predictions:
            path = file_of(self.folder, "valid")
            raise RunError(f"{path} is gone, and so is the checkpoint that predicted it; delete {self.folder}")
        write_json(self.folder / "result.json", {**self.result(), "reported": {"scores": self._scored(predictions)}})

    def _trained(self, log: Path) -> bool:
        """Whether the training ended before an interruption; started again, one that patience ended would go on."""
        checkpoints = [self.folder / "checkpoints" / f"checkpoint_{name}.pt" for name in ("last", "best")]
        return all(path.is_file() for path in (log, *checkpoints)) and read_log(log).ended

    def _train(self, watch: Callable[[TrainingLog], None], lock: int, stop: Event | None = None) -> dict[str, Any]:
        path, checkpoints = self.folder / "train.log", self.folder / "checkpoints"
        if not self._trained(path):
            execute(self.train_command(), path, f"training of {self.title}", lock, watch, stop, **self._placed())
        log = read_log(path)
        try:
            epoch, figures = best_figures(log, self.metrics, checkpoints / "checkpoint_best.pt")
        except ValueError as error:
            raise RunError(f"{error} ({path})", tail_of(path)) from None
        return {
            "epochs": len(log.train_wall),
            "best_epoch": epoch,
            "scores": figures,
            "seconds_per_epoch": seconds_per_epoch(log, checkpoints / "checkpoint_last.pt"),
        }


def best_figures(log: TrainingLog, metrics: tuple[str, ...], best: Path | None = None) -> tuple[int, dict[str, float]]:
    """The epoch of the best validation by the first of the metrics (the later of equals, as fairseq has it), and all.

    The highest is the best, of a loss the lowest; of those that were saved, if the `best` checkpoint is given.

    Raises:
        ValueError: no validation has the metric.
    """
    epoch, figures = log.chosen(metrics[0], metrics[0] not in LOSSES, best)
    return epoch, {name: figures[name] for name in metrics}
