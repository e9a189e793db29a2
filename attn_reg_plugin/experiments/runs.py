"""Runs: folders with their settings as data, a command that trains, and results. An experiment is a list of runs.

    run.json         the settings that shaped it, see `Run`
    result.json      what came out, see `Run.result`; a part at a time, so a run that was killed goes on where it ended
    train.log        what fairseq-train said, see `Run.log` and `Run.history`
    checkpoints/     the best one, and while it is trained the last one
    predictions/     of labelled text: SUBSET.tsv, a line `prediction<TAB>gold` per example
    translations/    SUBSET.LANGUAGE and SUBSET.references.LANGUAGE, a line per sentence

To read what is there, from any folder:

    runs = read_runs([Path("runs/demo")])
    table = frame(runs)                 # pandas: a row per run
    curves = runs[0].history()          # pandas: a row per epoch
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from attn_reg_plugin.experiments.executing import POLL, RunError, RunInUse, execute, tail_of
from attn_reg_plugin.experiments.flags import UNTUNED, differing, words_of
from attn_reg_plugin.experiments.training_log import TrainingLog, read_log, seconds_per_epoch
from attn_reg_plugin.files import FolderInUse, lock_folder, read_json, write_json

if TYPE_CHECKING:
    import pandas

USER_DIR = Path(__file__).resolve().parents[1]
#: part of result.json -> what must be in it
PARTS = {"training": ("epochs", "best_epoch", "seconds_per_epoch", "figures"), "scores": ()}
#: kinds of runs
TRANSLATION, LABELLED = "translation", "labelled"
#: how often a folder is tried again that another process has just begun to claim
_CLAIMS = 20
_ADVICE = "give another --out, or delete that folder"


@dataclass(frozen=True)
class Run:
    """A method and a seed, trained in a folder of its own.

    `settings` are plain data, as `run.json` has them:

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
        threads: of each command; None leaves that to the environment.
        device: the GPU of each command, as CUDA_VISIBLE_DEVICES has it; None leaves that to the environment.
    """

    folder: Path
    settings: Mapping[str, Any]
    measured: bool = True
    threads: int | None = None
    device: str | None = None

    # -- the settings -------------------------------------------------------------------------------------------------

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

    # -- the results --------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """The results so far, as `result.json` has them; empty for a new run.

            training    epochs, best_epoch, seconds_per_epoch (elapsed, in updates alone; None where unknown) and
                        `figures`, those of the best epoch by name, `metric` first
            scores      {subset: {metric: value}}: the test sets of a translation, the validation sets of a labelled
                        task; `valid` also of what checkpoints are chosen by, with held-out examples `held_out`
            constant    the subsets of which all predictions or translations are the same
            signatures  of sacrebleu's metrics

        Raises:
            RunError: the file is not one that a run leaves there.
        """
        path = self.folder / "result.json"
        result = _read(path)
        for part, keys in PARTS.items():
            missing = set(keys) - set(result[part] if isinstance(result.get(part), dict) else ())
            if part in result and missing:
                raise RunError(f"{path} lacks {min(missing)!r} in {part!r}, so no run wrote it; {_ADVICE}")
        return result

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """The scores of a finished run, by subset and metric; empty before."""
        return self.result().get("scores", {})

    def finished(self) -> bool:
        """Whether everything is done."""
        result = self.result()
        return "training" in result and (not self.measured or ("scores" in result and self._as_measured(result)))

    def log(self) -> TrainingLog:
        """The log of the training so far; empty without one, which a finished run does not need any more."""
        path = self.folder / "train.log"
        return read_log(path) if path.is_file() else TrainingLog()

    def history(self) -> pandas.DataFrame:
        """The log as a table, a row per epoch: columns `train_NAME` and `valid_NAME`, index `epoch`."""
        return self.log().history()

    # -- what a kind of runs implements -------------------------------------------------------------------------------

    def measure(self, lock: int, stop: Event | None = None) -> dict[str, Any]:
        """Measure the test sets with the best checkpoint; the parts of the result beside `training`."""
        raise NotImplementedError

    def further_commands(self) -> list[tuple[list[str], str]]:
        """The commands of `measure` that are tried beforehand, each with its kind, see `checks.py`."""
        return []

    def _as_measured(self, result: Mapping[str, Any]) -> bool:
        """Whether the scores are those that the present settings give."""
        return True

    # -- carrying it out ----------------------------------------------------------------------------------------------

    def train_command(self) -> list[str]:
        """The command of fairseq-train."""
        return [
            *(sys.executable, "-m", "fairseq_cli.train", self.settings["paths"]["data"], "--user-dir", str(USER_DIR)),
            *("--save-dir", str(self.folder / "checkpoints"), "--no-epoch-checkpoints", "--log-format", "json"),
            *("--seed", str(self.seed), *words_of(self.flags)),
        ]

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
        path = self.folder / "run.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        for last in (*[False] * _CLAIMS, True):
            recorded = _read(path)
            if recorded and not differing(recorded, self.settings):
                return
            try:
                with hold(self.folder):
                    self._take(path)
                return
            except RunInUse:
                if recorded or last:
                    raise
                time.sleep(POLL)  # the other process has begun, and not yet said with what settings

    def _take(self, path: Path) -> None:
        recorded = _read(path)
        if recorded and (found := differing(recorded, self.settings)):
            if (self.folder / "result.json").exists() or any((self.folder / "checkpoints").glob("*.pt")):
                known = {name: ["absent" if value is None else value for value in both] for name, both in found.items()}
                said = [f"{name}: {there} there, {asked} asked for" for name, (there, asked) in known.items()]
                raise RunError(f"{self.folder} holds a run with other settings ({'; '.join(said[:3])}); {_ADVICE}")
            log = self.folder / "train.log"
            if log.is_file():
                log.replace(self.folder / "train.failed.log")
        write_json(path, self.settings)

    def carry_out(self, watch: Callable[[TrainingLog], None], stop: Event | None = None) -> None:
        """Do what is not done yet.

        Args:
            watch: gets the log whenever it has grown.
            stop: ends the command that runs, once it is set.

        Raises:
            RunError: a command fails or is stopped, or another process works in the folder.
        """
        if self.finished():
            return
        with hold(self.folder) as lock:
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
        watch: Callable[[TrainingLog], None] | None = None,
    ) -> None:
        """Run a command with its output in a file of the folder, see `execute`."""
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
            "epochs": 0 if untuned else len(log.train_wall),
            "best_epoch": epoch,
            "seconds_per_epoch": None if untuned else seconds_per_epoch(log, checkpoints / "checkpoint_last.pt"),
            "figures": {self.metric[0]: figures[self.metric[0]], **figures},
        }


@contextmanager
def hold(folder: Path) -> Iterator[int]:
    """Hold a run's folder. Commands inherit the lock, so a command that outlives a killed comparison keeps it.

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


# -- reading ----------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> Run:
    """The run of a folder, for its settings and results.

    Raises:
        RunError: the folder has no `run.json`, or that is none of a run.
    """
    settings = _read(folder / "run.json")
    missing = {"kind", "task", "method", "seed", "flags"} - set(settings)
    if missing:
        raise RunError(f"{folder} holds no run: its run.json has no {min(missing)!r}")
    return Run(folder, settings)


def read_runs(folders: Iterable[Path], depth: int = 3) -> list[Run]:
    """The runs in folders, by name, those of a comparison in the order of its table.

    Args:
        folders: of runs, or folders that hold them.
        depth: how deep they are looked for.

    Raises:
        RunError: a run whose files cannot be read.
    """
    found = []
    for folder in folders:
        if (folder / "run.json").is_file():
            found.append(read_run(folder))
        elif depth and folder.is_dir():
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
            found += read_runs(inner, depth - 1)
    return found


def frame(runs: Iterable[Run]) -> pandas.DataFrame:
    """The runs as a table of pandas, a row per run.

    Columns are `folder`, the settings and the results, with dots inside: `method`, `seed`, `flags.lr`,
    `training.seconds_per_epoch`, `scores.valid.accuracy`, ...; a run without a value has NaN there.
    """
    import pandas

    rows = [{"folder": str(one.folder), "title": one.title, **one.settings, **one.result()} for one in runs]
    return pandas.json_normalize(rows)
