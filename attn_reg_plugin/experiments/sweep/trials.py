"""The trials of a sweep: studies of Optuna's that any number of processes fill, each trial once.

An arm of a sweep, the method or plain training, is a study. All its trials are enqueued with a number, a seed and, of a
grid, their values; Optuna gives each of them to one process. A trial whose process is gone has no heartbeat for `GRACE`
seconds. It is failed then, and enqueued again with the values that it had, so that its run goes on where it was. Of two
trials with the same number, enqueued by two machines at once, the earlier one counts.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event, Timer
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import IntegrityError

from attn_reg_plugin.experiments.sweep.settings import Arm
from attn_reg_plugin.files import alone_in

#: seconds between two heartbeats, without one until a trial's process is taken for dead, and between two looks for work
BEAT, GRACE, WAIT = 10, 60, 2.0
#: after so many failures and no success the settings are wrong, not the trial
HOPELESS = 3
#: lock of the folder while trials are enqueued
LOCK = "sweep.lock"
#: carries out a trial with these values until the event is set; a ValueError is the trial's failure
Train = Callable[[Arm, Trial, dict[str, Any], Event], float]

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class Unfinished(Exception):
    """A trial that failed, was stopped, or is another process's."""


def open_storage(url: str) -> RDBStorage:
    """Open a storage of Optuna's; make the tables that are missing.

    Raises:
        ValueError: there is no such storage, or it is none.
    """
    if url.rstrip("/") == "sqlite:" or ":memory:" in url:
        raise ValueError("--storage is in memory, which no other thread sees and no later sweep; give a file")
    options = {"connect_args": {"timeout": 120}} if url.startswith("sqlite") else {}
    try:
        return RDBStorage(url, options, heartbeat_interval=BEAT, grace_period=GRACE)
    except Exception as error:  # of SQLAlchemy, of a driver, of Optuna
        if isinstance(error, IntegrityError) or "already exists" in str(error):  # another process makes the tables
            time.sleep(0.1)
            return open_storage(url)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--storage cannot be opened: {reason}") from None


def attempts(study: optuna.Study) -> dict[int, list[FrozenTrial]]:
    """Optuna's trials of each number; first the one that counts: the earliest that has not failed, else the latest."""
    found: dict[int, list[FrozenTrial]] = {}
    for trial in study.get_trials(deepcopy=False):
        if "trial" in trial.user_attrs:
            found.setdefault(trial.user_attrs["trial"], []).append(trial)
    for tried in found.values():
        tried.sort(key=lambda one: (1, -one.number) if one.state == TrialState.FAIL else (0, one.number))
    return dict(sorted(found.items()))


def enqueue(study: optuna.Study, arm: Arm, again: bool = False) -> int:
    """Enqueue the trials that are neither done nor under way, with the values that were drawn for them; their number.

    Args:
        again: those whose training failed, too.
    """
    late = datetime.now() - timedelta(seconds=GRACE)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if "begun" not in trial.user_attrs and trial.datetime_start < late:  # killed before its first heartbeat
            with contextlib.suppress(ValueError, UpdateFinishedTrialError):
                study.tell(trial.number, state=TrialState.FAIL)
    optuna.storages.fail_stale_trials(study)
    known, count = attempts(study), 0
    for number, (seed, values) in enumerate(arm.trials):
        tried = known.get(number, [])
        if not tried or (tried[0].state == TrialState.FAIL and (again or "error" not in tried[0].user_attrs)):
            drawn = next((one.params for one in tried if one.params.keys() == arm.space.keys()), values)
            study.enqueue_trial(drawn, user_attrs={"trial": number, "seed": seed})
            count += 1
    return count


class _Shared(optuna.Study):
    """A study that processes of a folder ask in turn: SQLite would give a waiting trial to two that ask at once."""

    folder: Path

    @classmethod
    def of(cls, study: optuna.Study, folder: Path) -> optuna.Study:
        """Return a copy of the study."""
        shared = copy.copy(study)
        shared.__class__, shared.folder = cls, folder
        return shared

    def ask(self, *args: Any, **kwargs: Any) -> Trial:
        """Ask as `optuna.Study` does."""
        with alone_in(self.folder, LOCK):
            return super().ask(*args, **kwargs)


def fill(studies: Sequence[optuna.Study], arms: Sequence[Arm], folder: Path, train: Train, stop: Event) -> None:
    """Carry out trials until all are done, here or elsewhere; several threads and processes may do so.

    Args:
        folder: where processes wait for each other while they enqueue trials.
        stop: ends it.

    Raises:
        ValueError: the first trials all failed.
    """
    studies = [_Shared.of(study, folder) for study in studies]
    while not stop.is_set():
        known = [[tried[0] for tried in attempts(study).values()] for study in studies]
        counts = [Counter(trial.state for trial in trials) for trials in known]
        failed = [trial.user_attrs for trials in known for trial in trials if trial.state == TrialState.FAIL]
        errors = [attributes["error"] for attributes in failed if "error" in attributes]
        if len(errors) >= HOPELESS and not any(count[TrialState.COMPLETE] for count in counts):
            raise ValueError(errors[-1])
        waiting = [count[TrialState.WAITING] for count in counts]
        if any(waiting):
            place = waiting.index(max(waiting))  # budgets stay equal
            objective = partial(_objective, arm=arms[place], train=train, stop=stop)
            with contextlib.suppress(ValueError, UpdateFinishedTrialError):  # another process took this one for dead
                studies[place].optimize(objective, n_trials=1, catch=(Unfinished,))
            continue
        with alone_in(folder, LOCK):
            more = sum(enqueue(study, arm) for study, arm in zip(studies, arms, strict=True))
        if not more and not any(count[TrialState.RUNNING] for count in counts):
            return
        stop.wait(0 if more else WAIT)


def _objective(trial: Trial, arm: Arm, train: Train, stop: Event) -> float:
    """Carry out a trial, unless another process has it."""
    number = trial.user_attrs.get("trial")
    # Optuna makes a trial of its own, without a number, where another process was faster
    if number is None or attempts(trial.study)[number][0].number != trial.number:
        raise Unfinished
    # draws depend on the trial and those before it, not on the process
    trial.study.sampler = optuna.samplers.TPESampler(seed=number, multivariate=False, constant_liar=True)
    values = {key: getattr(trial, f"suggest_{kind}")(key, **how) for key, (kind, how) in arm.space.items()}
    # from then on heartbeats tell whether its process is there: the first of them has been written
    begun = Timer(BEAT, trial.set_user_attr, ("begun", True))
    begun.start()
    try:
        return train(arm, trial, values, stop)
    except ValueError as error:
        if not stop.is_set():
            trial.set_user_attr("error", str(error))
        raise Unfinished from error
    finally:
        begun.cancel()
