"""Runs: folders with their settings as data, a command that trains, and results. An experiment is a list of runs.

run.json         the settings that shaped it, see `Run`
result.json      what came out, see `Run.result`; a part at a time, so a run that was killed goes on where it ended
train.log        what fairseq-train said, see `Run.log`
checkpoints/     the best one, and the last one, of labelled text while it is trained
predictions/     of labelled text: SUBSET.tsv, a line `prediction<TAB>gold` per example
translations/    SUBSET.LANGUAGE and SUBSET.references.LANGUAGE, a line per sentence
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from attn_reg_plugin.experiments.running.executor import RunError, execute, tail_of
from attn_reg_plugin.experiments.running.flags import UNTUNED, contrast, words_of
from attn_reg_plugin.experiments.running.training_log import TrainingLog, read_log, seconds_per_epoch
from attn_reg_plugin.files import FolderInUse, lock_folder, read_json, write_json

USER_DIR = Path(__file__).resolve().parents[2]
#: what must be in the part `training` of result.json
_TRAINING = {"epochs", "best_epoch", "seconds_per_epoch", "figures"}
#: kinds of runs
TRANSLATION, LABELLED = "translation", "labelled"
#: the subset of examples that are held out of training, to choose by
HELD_OUT = "held_out"
_ADVICE = "give another --out, or delete that folder"


@dataclass(frozen=True)
class Run:
    """A method and a seed, trained in a folder of its own; `settings` are plain data, as `run.json` has them:

        kind            `translation` or `labelled`
        task            name of the experiment: `en-ro` or `rte`
        data            digest of what is trained and validated on; `references` and `further` of what is reported on
        method, title   of the row, such as `ad_drop`; what it does is in the flags
        seed
        flags           of fairseq-train, see `flags.py`: `{"lr": 5e-05, "attn-reg": "ad_drop", "ad-drop-p": 0.3, ...}`
        files           digests of the files that flags name, by the flag: with them a moved file is the same setting
        paths           where `data` is, and what else lies outside of the folder; makes no difference
        task_kind, labels   of labelled text: `classification`, `regression`, ..., and the label set

    Attributes:
        folder: of the run.
        measured: whether the test sets are measured at the end; a trial of a sweep needs no more than its validation.
        threads, device: of each command, as OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES; None leaves the environment's.
    """

    folder: Path
    settings: Mapping[str, Any]
    measured: bool = True
    threads: int | None = None
    device: str | None = None

    @property
    def method(self) -> str:
        """The name of the row, as it was typed."""
        return self.settings["method"]

    @property
    def title(self) -> str:
        """The method's name in tables: as it was typed, unless the configuration has another title."""
        return self.settings.get("title", self.method)

    @property
    def seed(self) -> int:
        """The seed of the training."""
        return self.settings["seed"]

    @property
    def flags(self) -> Mapping[str, Any]:
        """The flags of fairseq-train."""
        return self.settings["flags"]

    @property
    def name(self) -> str:
        """The run in messages."""
        return f"{self.title}, seed {self.seed}"

    @property
    def metric(self) -> tuple[str, bool]:
        """The figure that checkpoints are chosen by, as the log names it, and whether higher is better."""
        maximized = "maximize-best-checkpoint-metric" in self.flags
        return self.flags.get("best-checkpoint-metric", "loss"), maximized

    @property
    def held_out(self) -> bool:
        """Whether checkpoints are chosen on examples held out of training, and not on the validation set."""
        return "held-out" in self.flags

    def result(self) -> dict[str, Any]:
        """The results so far, as `result.json` has them; empty for a new run.

            training    epochs, best_epoch, seconds_per_epoch (elapsed, in updates alone; None where unknown) and
                        `figures`, those of the best epoch by name, `metric` first
            scores      {subset: {metric: value}}: the test sets of a translation, the validation sets of a labelled
                        task; `valid` also of what checkpoints are chosen by, with held-out examples `held_out`
            constant    the subsets of which all predictions or translations are the same
            signatures  of sacrebleu's metrics
        A ValueError says that the file is not one that a run leaves there.
        """
        path = self.folder / "result.json"
        result = _read(path)
        training = result.get("training", _TRAINING)
        if missing := _TRAINING - set(training if isinstance(training, dict | set) else ()):
            raise ValueError(f"{path} lacks {min(missing)!r} in 'training', so no run wrote it; {_ADVICE}")
        return result

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """The scores of a finished run, by subset and metric; empty before."""
        return self.result().get("scores", {})

    def finished(self) -> bool:
        """Whether everything is done."""
        result = self.result()
        return "training" in result and (not self.measured or "scores" in result)

    def log(self) -> TrainingLog:
        """The log of the training so far; empty without one, which a finished run does not need any more."""
        return read_log(self.folder / "train.log")

    def measure(self, lock: int, stop: Event | None = None) -> dict[str, Any]:
        """Measure the test sets with the best checkpoint; the parts of the result beside `training`."""
        raise NotImplementedError

    def further_commands(self) -> list[list[str]]:
        """The commands of `measure` that are tried beforehand, of fairseq-generate."""
        return []

    def train_command(self) -> list[str]:
        """The command of fairseq-train."""
        return [
            *(sys.executable, "-m", "fairseq_cli.train", self.settings["paths"]["data"], "--user-dir", str(USER_DIR)),
            *("--save-dir", str(self.folder / "checkpoints"), "--no-epoch-checkpoints", "--log-format", "json"),
            "--attn-rates-by-site",
            *("--seed", str(self.seed), *words_of(self.flags)),
        ]

    def in_use(self) -> bool:
        """Whether another process works on it."""
        try:
            with lock_folder(self.folder):
                return False
        except FolderInUse:
            return True

    def claim(self) -> None:
        """Make the folder ours; a start that failed before its first checkpoint gives way to other settings.

        A RunError says that the folder holds a run with other settings, a FolderInUse that another process works there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded = _read(self.folder / "run.json")
        if recorded and not contrast(recorded, self.settings):
            if recorded.get("title", self.method) != self.title:
                write_json(self.folder / "run.json", {**recorded, "title": self.title})
            return
        # another process that has begun, and not yet said with what settings, is about to
        with lock_folder(self.folder, wait=not recorded):
            self.record()

    def record(self) -> None:
        """Write the settings into the folder, which is locked; refuse where it holds more than another failed start."""
        if said := self._other():
            if (self.folder / "result.json").exists() or any((self.folder / "checkpoints").glob("*.pt")):
                raise RunError(f"{self.folder} holds a run with other settings ({said}); {_ADVICE}")
            (self.folder / "train.log").unlink(missing_ok=True)
        write_json(self.folder / "run.json", self.settings)

    def _other(self) -> str:
        """In what the settings in the folder are others, see `contrast`; empty without any."""
        recorded = _read(self.folder / "run.json")
        return contrast(recorded, self.settings) if recorded else ""

    def carry_out(self, watch: Callable[[TrainingLog], None], stop: Event | None = None) -> None:
        """Do what is not done yet; commands inherit the folder's lock, and keep it where a comparison is killed.

        Args:
            watch: gets the log whenever it has grown.
            stop: ends the command that runs, once it is set.
        """
        if self.finished() and not self._other():  # another process may have claimed it since
            return
        with lock_folder(self.folder) as lock:
            self.record()
            self.work(lock, watch, stop)

    def work(self, lock: int, watch: Callable[[TrainingLog], None], stop: Event | None = None) -> None:
        """Do what is not done yet in the folder, which is locked."""
        result = self.result()
        if "training" not in result:
            result = {"training": self._train(watch, lock, stop)}
            write_json(self.folder / "result.json", result)
        self.tidy()
        if self.measured:
            write_json(self.folder / "result.json", {**result, **self.measure(lock, stop)})

    def tidy(self) -> None:
        """Delete what a trained run does not need."""

    def execute(
        self,
        command: list[str],
        log: str,
        what: str,
        lock: int,
        stop: Event | None = None,
        watch: Callable[[TrainingLog], None] = lambda log: None,
    ) -> None:
        """Run a command with its output in a file of the folder, see `executor.execute`."""
        text = f"{what} {self.name}"
        execute(command, self.folder / log, text, lock, watch, stop, self.threads, self.device)

    def _train(self, watch: Callable[[TrainingLog], None], lock: int, stop: Event | None) -> dict[str, Any]:
        path, checkpoints = self.folder / "train.log", self.folder / "checkpoints"
        saved = [path, *(checkpoints / f"checkpoint_{name}.pt" for name in ("last", "best"))]
        # of an interruption behind the end; started again, a training that patience ended would go on
        if not (all(one.is_file() for one in saved) and read_log(path).ended):
            self.execute(self.train_command(), "train.log", "training of", lock, stop, watch)
        log = read_log(path)
        try:
            epoch, figures = log.chosen(*self.metric, checkpoints / "checkpoint_best.pt")
        except ValueError as error:
            raise RunError(f"{error} ({path})", tail_of(path)) from None
        untuned = self.method == UNTUNED
        return {
            "epochs": 0 if untuned else len(log.trainings),
            "best_epoch": epoch,
            "seconds_per_epoch": None if untuned else seconds_per_epoch(log, checkpoints / "checkpoint_last.pt"),
            "figures": {self.metric[0]: figures[self.metric[0]], **figures},
        }


def _read(path: Path) -> dict[str, Any]:
    """The object in a file of a run; empty when there is no such file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} isn't a file, so no run wrote it; {_ADVICE}")
    return read_json(path, _ADVICE) if path.exists() else {}


def read_run(folder: Path) -> Run:
    """The run of a folder, for its settings and results; a ValueError where `run.json` is missing or none of a run."""
    settings = _read(folder / "run.json")
    missing = {"kind", "task", "method", "seed", "flags"} - set(settings)
    if missing:
        raise ValueError(f"{folder} holds no run: its run.json has no {min(missing)!r}")
    return Run(folder, settings)


def read_runs(folder: Path) -> list[Run]:
    """The runs in a folder, by name."""
    return [read_run(path.parent) for path in sorted(folder.glob("[!._]*/run.json"))]
