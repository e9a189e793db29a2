"""One run of a comparison: a method and a seed, trained, translated and scored in a folder of its own.

The folder says what it holds: `run.json` the settings that shaped it, `result.json` what is done.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

from attn_reg_plugin.experiments.data_folder import DataFolder, raw_lines
from attn_reg_plugin.experiments.earlier_names import said_difference, take_over
from attn_reg_plugin.experiments.example_scores import Examples, of_translations
from attn_reg_plugin.experiments.executing_before import POLL, RunError, execute, tail_of
from attn_reg_plugin.experiments.methods import TASK, UNTUNED, Method
from attn_reg_plugin.experiments.run_settings import difference_of, in_files, values_of, without_paths
from attn_reg_plugin.experiments.score import read_hypotheses, score
from attn_reg_plugin.experiments.training_log import TrainingLog, read_log, seconds_per_epoch
from attn_reg_plugin.files import FolderInUse, lock_folder, read_json, write_json, write_text

#: how often a folder is tried again that another process has just begun to claim
_CLAIMS = 20
USER_DIR = Path(__file__).resolve().parents[1]
_ADVICE = "give another --out, or delete that folder"


class RunInUse(RunError):
    """Another process works in the run's folder."""


@dataclass(frozen=True)
class Run:
    """A method and a seed, and the flags both commands get beside the paths."""

    method: Method
    seed: int
    folder: Path
    data: DataFolder
    train_flags: tuple[str, ...]
    generate_flags: tuple[str, ...]
    threads: int | None = None
    """Threads of each command; None leaves that to the environment."""
    device: str | None = None
    """The GPU of each command, as CUDA_VISIBLE_DEVICES has it; None leaves that to the environment."""

    #: part of result.json -> what must be in it
    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "training": ("epochs", "best_valid_loss", "loss", "best_epoch", "seconds_per_epoch"),
        "translation": ("flags", "scores"),
    }

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.method.title}, seed {self.seed}"

    @property
    def subsets(self) -> tuple[str, ...]:
        """The test sets to translate."""
        return self.data.subsets

    def train_command(self) -> list[str]:
        """The command of fairseq-train."""
        return [
            *_fairseq("train", self.data, TASK),
            *("--save-dir", str(self.folder / "checkpoints"), "--no-epoch-checkpoints"),
            *("--log-format", "json", "--seed", str(self.seed), *self.train_flags),
        ]

    def generate_command(self, subset: str) -> list[str]:
        """The command of fairseq-generate; stock translation, since the checkpoint is an ordinary one."""
        return [
            *_fairseq("generate", self.data, "translation"),
            *("--path", str(self.folder / "checkpoints" / "checkpoint_best.pt"), "--gen-subset", subset),
            *("--results-path", str(self.folder / "translations"), *self.generate_flags),
        ]

    def settings(self) -> dict[str, Any]:
        """What shapes the training; of the paths in its flags, `differing` says which make no difference."""
        settings = {"data": self.data.digest(), "references": self.data.digest_of_references(), "task": TASK}
        return {**settings, **in_files(self.train_flags), "seed": self.seed, "flags": shlex.join(self.train_flags)}

    def result(self) -> dict[str, Any]:
        """What is done so far: `training`, then `translation`; empty for a new run.

        Raises:
            RunError: `result.json` is not what a run leaves there.
        """
        path = self.folder / "result.json"
        result = _read(path)
        for part, keys in self.PARTS.items():
            missing = set(keys) - set(result[part] if isinstance(result.get(part), dict) else ())
            if part in result and missing:
                raise RunError(f"{path} lacks {min(missing)!r} in {part!r}, so no run wrote it; {_ADVICE}")
        return result

    def figures(self) -> dict[str, dict[str, float]]:
        """The figures of a finished run that are compared with plain training's, by subset and metric."""
        result = self.result()
        training, scores = result["training"], result["translation"]["scores"]
        found = {subset: {name: one[name] for name in ("bleu", "chrf")} for subset, one in scores.items()}
        return found | {"valid": {training["loss"]: training["best_valid_loss"]}}

    def examples(self) -> dict[str, dict[str, Examples]]:
        """The scores as functions of the examples, by subset and metric; without those whose examples are gone."""
        found = {}
        for subset in self.data.subsets:
            path = self._translated_text(subset)
            if path.is_file():
                found[subset] = of_translations(raw_lines(path), self.data.references(subset))
        return found

    def _translated_text(self, subset: str) -> Path:
        """The translations of a test set, a line for each sentence."""
        return self.folder / "translations" / f"{subset}.{self.data.target}"

    def for_search(self) -> Run:
        """The run as a trial of a sweep, which needs the figure that checkpoints are chosen by and no other."""
        return self

    def log(self) -> TrainingLog:
        """The figures of the training so far."""
        return read_log(self.folder / "train.log")

    def has_log(self) -> bool:
        """Whether the training has left its log."""
        return (self.folder / "train.log").is_file()

    def finished(self) -> bool:
        """Whether the run is trained, and translated and scored with the present flags."""
        result = self.result()
        return "training" in result and self._translated(result)

    def in_use(self) -> bool:
        """Whether another process works on it."""
        try:
            with hold(self.folder):
                return False
        except RunInUse:
            return True

    def claim(self) -> None:
        """Make the folder ours; a start that failed before its first checkpoint gives way to other settings.

        Raises:
            RunError: the folder holds a run with other settings, or another process starts one there.
        """
        path, wanted = self.folder / "run.json", self.settings()
        take_over(self, wanted, _read, hold)
        self.folder.mkdir(parents=True, exist_ok=True)
        for last in (*[False] * _CLAIMS, True):
            recorded = _read(path)
            if recorded and not difference_of(recorded, wanted):
                return
            try:
                with hold(self.folder):
                    self._take(path, wanted)
                return
            except RunInUse:
                if recorded or last:
                    raise
                time.sleep(POLL)  # the other process has begun, and not yet said with what settings

    def _take(self, path: Path, wanted: dict[str, Any]) -> None:
        recorded = _read(path)
        if recorded and (difference := said_difference(recorded, wanted, self.method.name)):
            if self._begun():
                raise RunError(f"{self.folder} holds a run with other settings {difference}; {_ADVICE}")
            log = self.folder / "train.log"
            if log.is_file():
                log.replace(self.folder / "train.failed.log")
        write_json(path, wanted)

    def _begun(self) -> bool:
        """Whether there is anything that a start with other settings would spoil."""
        return (self.folder / "result.json").exists() or any((self.folder / "checkpoints").glob("*.pt"))

    def carry_out(self, watch: Callable[[TrainingLog], None], stop: Event | None = None) -> None:
        """Do what is not done yet. `watch` gets the log whenever it has grown; once `stop` is set, commands end.

        Raises RunError when a command fails or is stopped, or another process works in the folder.
        """
        if self.finished():
            return
        with hold(self.folder) as lock:
            result = self.result()
            if "training" not in result:
                result = {"training": self._train(watch, lock, stop)}
                write_json(self.folder / "result.json", result)
            if not self._translated(result):
                result["translation"] = self._translate(lock, stop)
                write_json(self.folder / "result.json", result)

    def _placed(self) -> dict[str, Any]:
        """Where its commands run."""
        return {"threads": self.threads, "device": self.device}

    def _translated(self, result: dict[str, Any]) -> bool:
        flags = str(result.get("translation", {}).get("flags"))
        return without_paths(flags) == without_paths(shlex.join(self.generate_flags))

    def _train(self, watch: Callable[[TrainingLog], None], lock: int, stop: Event | None = None) -> dict[str, Any]:
        path, checkpoints = self.folder / "train.log", self.folder / "checkpoints"
        execute(self.train_command(), path, f"training of {self.title}", lock, watch, stop, **self._placed())
        log = read_log(path)
        try:
            name, value = log.best_validation()
            epoch, _ = log.chosen(*self._chosen_by(), checkpoints / "checkpoint_best.pt")
        except ValueError as error:
            raise RunError(f"{error} ({path})", tail_of(path)) from None
        untuned = self.method.name == UNTUNED
        return {
            "epochs": 0 if untuned else len(log.train_wall),
            "best_valid_loss": value,
            "loss": name,
            "best_epoch": epoch,
            "seconds_per_epoch": None if untuned else seconds_per_epoch(log, checkpoints / "checkpoint_last.pt"),
        }

    def _chosen_by(self) -> tuple[str, bool]:
        """The figure that checkpoints are chosen by, and whether higher is better."""
        values = values_of(self.train_flags)
        return values.get("--best-checkpoint-metric", "loss"), "--maximize-best-checkpoint-metric" in values

    def _translate(self, lock: int, stop: Event | None = None) -> dict[str, Any]:
        scores = {}
        for subset in self.data.subsets:
            what = f"translation of {subset} with {self.title}"
            log = self.folder / f"generate-{subset}.log"
            execute(self.generate_command(subset), log, what, lock, stop=stop, **self._placed())
            references = self.data.references(subset)
            output = self.folder / "translations" / f"generate-{subset}.txt"
            hypotheses = read_hypotheses(output, len(references))
            write_text(self._translated_text(subset), "".join(f"{line}\n" for line in hypotheses))
            scores[subset] = score(hypotheses, references).as_dict()
        return {"flags": shlex.join(self.generate_flags), "scores": scores}


def _fairseq(program: str, data: DataFolder, task: str) -> list[str]:
    # --user-dir also for translating: it lets torch load fairseq's checkpoints
    command = [sys.executable, "-m", f"fairseq_cli.{program}", str(data.bin), "--user-dir", str(USER_DIR)]
    command += ["--task", task, "--source-lang", data.source, "--target-lang", data.target]
    # with its default, 8, fairseq leaves out the last batch unless that has a multiple of 8 sentences
    return [*command, "--required-batch-size-multiple", "1"]


@contextmanager
def hold(folder: Path) -> Iterator[int]:
    """Hold a run's folder. Commands inherit the lock, so one that outlives a killed comparison keeps it.

    Raises:
        RunInUse: another process works there.
    """
    try:
        with lock_folder(folder, kept=True) as lock:
            yield lock
    except FolderInUse as error:
        raise RunInUse(str(error)) from None


def _read(path: Path) -> dict[str, Any]:
    """The object in a file of a run; empty when there is no such file.

    Raises:
        RunError: there is something else.
    """
    if not path.exists():
        return {}
    if not path.is_file():
        raise RunError(f"{path} isn't a file, so no run wrote it; {_ADVICE}")
    try:
        return read_json(path, _ADVICE)
    except ValueError as error:
        raise RunError(str(error)) from None
