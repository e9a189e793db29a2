"""The trials of a sweep, which any number of processes share, each trial carried out once.

An arm of a sweep, the method or plain training, is a study of Optuna's. A trial has a number, a seed and, of a grid,
its values. Whoever holds the lock of its number carries it out, so a process that is killed frees it; it then begins
again with the values that were drawn for it, and its run goes on where it was. The studies are in a journal there.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import optuna
from optuna.samplers import PartialFixedSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from attn_reg_plugin.experiments.sweep.settings import Arm
from attn_reg_plugin.files import FolderInUse, lock_folder

#: seconds between two looks for work
WAIT = 2.0
#: after so many failures and no success the settings are wrong, not the trial
HOPELESS = 3
#: carries out a trial with these values until the event is set; a ValueError is the trial's failure
Train = Callable[[Arm, Trial, dict[str, Any], Event], float]

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class Unfinished(Exception):
    """A trial that failed or was stopped."""


def open_study(folder: Path, name: str, **how: Any) -> optuna.Study:
    """Open the study of an arm in a folder, or begin it; `how` is for `optuna.create_study`."""
    storage = JournalStorage(JournalFileBackend(str(folder / "sweep.journal")))
    return optuna.create_study(study_name=name, storage=storage, load_if_exists=True, **how)


def latest(study: optuna.Study) -> dict[int, FrozenTrial]:
    """Optuna's last trial of each number."""
    trials = (one for one in study.get_trials(deepcopy=False) if "trial" in one.user_attrs)
    return dict(sorted((one.user_attrs["trial"], one) for one in trials))


def over(trial: FrozenTrial | None, begun: int) -> bool:
    """Whether nothing is left to do: it has a value, or failed since the study had `begun` of Optuna's trials."""
    if trial is None or trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
        return trial is not None
    return "error" in trial.user_attrs and trial.number >= begun


def left(studies: Sequence[optuna.Study], arms: Sequence[Arm], begun: Sequence[int]) -> list[tuple[int, int]]:
    """Number and place of the arm of each trial that is not over, in an order that keeps budgets equal."""
    found = [
        (number, place)
        for place, (study, arm) in enumerate(zip(studies, arms, strict=True))
        for known in [latest(study)]
        for number in range(len(arm.trials))
        if not over(known.get(number), begun[place])
    ]
    return sorted(found)


def fill(
    studies: Sequence[optuna.Study], arms: Sequence[Arm], folder: Path, begun: Sequence[int], train: Train, stop: Event
) -> None:
    """Carry out trials until all are done, here or elsewhere; several threads and processes may do so.

    Args:
        folder: where the locks of the trials are.
        begun: how many of Optuna's trials each study had at the start; those that had failed are tried again.
        stop: ends it.

    Raises:
        ValueError: the first trials all failed.
    """
    while not stop.is_set():
        known = [latest(study) for study in studies]
        trials = [(trial, since) for own, since in zip(known, begun, strict=True) for trial in own.values()]
        errors = [one.user_attrs["error"] for one, since in trials if "error" in one.user_attrs and over(one, since)]
        if len(errors) >= HOPELESS and not any(one.state == TrialState.COMPLETE for one, _ in trials):
            raise ValueError(errors[-1])
        open_ones = left(studies, arms, begun)
        if not open_ones:
            return
        for number, place in open_ones:
            with contextlib.suppress(FolderInUse), lock_folder(folder, f"{place}-{number}.lock"):
                before = latest(studies[place]).get(number)
                if not over(before, begun[place]):
                    _carry_out(studies[place], arms[place], number, before, train, stop)
                break
        else:
            stop.wait(WAIT)


def _carry_out(
    study: optuna.Study, arm: Arm, number: int, before: FrozenTrial | None, train: Train, stop: Event
) -> None:
    """Carry out a trial, with the values of the one `before` it that was lost or failed."""
    seed, values = arm.trials[number]
    if before is not None:
        if not before.state.is_finished():
            study.tell(before.number, state=TrialState.FAIL)
        values = before.params if before.params.keys() == arm.space.keys() else values
    own = copy.copy(study)  # another thread's has a sampler of its own
    # draws depend on the trial and those before it, not on the process
    own.sampler = PartialFixedSampler(values, TPESampler(seed=number, multivariate=False, constant_liar=True))

    def objective(trial: Trial) -> float:
        trial.set_user_attr("trial", number)
        trial.set_user_attr("seed", seed)
        drawn = {key: getattr(trial, f"suggest_{kind}")(key, **how) for key, (kind, how) in arm.space.items()}
        try:
            return train(arm, trial, drawn, stop)
        except ValueError as error:
            if not stop.is_set():
                trial.set_user_attr("error", str(error))
            raise Unfinished from error

    own.optimize(objective, n_trials=1, catch=(Unfinished,))
