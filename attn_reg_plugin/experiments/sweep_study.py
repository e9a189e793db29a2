"""The trials of a sweep, shared by processes and machines through a storage of Optuna's.

Each arm of a sweep is a study. It has a fixed number of slots, and a slot is filled by exactly one trial:

- A process claims a slot by adding a running trial with the slot's number. Optuna numbers trials in the order in which
  they were added, so of two processes that claim the same slot at once, the lower number has it, and the other ends its
  own trial.
- While a trial runs, its process counts up its `beat`. A process that has watched a trial for `GRACE` seconds without a
  new beat ends it and claims the slot again. Clocks of different machines aren't compared.
- A process that was only slow finds its trial ended: it stops the training, and its result is not accepted.

Optuna's own way (heartbeats and `RetryHeartbeatStaleTrialCallback`) loses a trial when a process is killed between
ending an old trial and adding the new one, and its grids may try a combination twice.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from attn_reg_plugin.experiments.run_settings import differing
from attn_reg_plugin.experiments.sweep_space import Arm, Dimension, Slot
from attn_reg_plugin.experiments.sweep_storage import load_optuna

#: seconds between two beats of a running trial
BEAT = 10.0
#: seconds without a beat after which a trial is taken for dead
GRACE = 60.0

OPEN, RUNNING, PRUNED, COMPLETE, FAILED = "open", "running", "pruned", "complete", "failed"


@dataclass(frozen=True)
class Entry:
    """A slot, as it stands.

    Attributes:
        state: `OPEN`, `RUNNING`, `PRUNED`, `COMPLETE` or `FAILED`.
        values: of its keys; empty while they aren't known.
        value: of the objective: of a pruned trial the last one.
        told: what the process that ran it left there.
        by_epoch: the metric after each epoch.
        attempts: how many trials the slot has had.
    """

    slot: Slot
    state: str
    values: dict[str, Any]
    value: float | None
    told: dict[str, Any]
    by_epoch: dict[int, float]
    attempts: int


class SharedTrials:
    """The trials of an arm; several threads may use it."""

    def __init__(self, storage: Any, name: str, arm: Arm, maximize: bool, pruner: Any = None) -> None:
        """Join the study of that name, or make it.

        Args:
            pruner: Optuna's; None prunes nothing.
        """
        self.optuna, self.storage, self.name, self.arm = load_optuna(), storage, name, arm
        self._pruner = pruner or self.optuna.pruners.NopPruner()
        direction = "maximize" if maximize else "minimize"
        self._study = self.optuna.create_study(
            storage=storage, study_name=name, direction=direction, pruner=self._pruner, load_if_exists=True
        )
        self._claiming = threading.Lock()
        #: trial's number -> its beat when it was seen last, and when that was new
        self._seen: dict[int, tuple[int, float]] = {}

    def agree(self, settings: dict[str, Any]) -> None:
        """Hold the study to the sweep's settings, which are those of the process that came first.

        Raises:
            ValueError: they differ.
        """
        there = self._study.user_attrs.get("settings")
        if there is None:
            self._study.set_user_attr("settings", settings)
            return
        for key, (before, now) in differing(_of_sweep(there), _of_sweep(settings)).items():
            if key not in there or there[key] != settings.get(key):  # equal as json has them, such as 1 and 1.0
                raise ValueError(
                    f"the study {self.name!r} is of a sweep with other settings ({key}: {before or 'absent'} there, "
                    f"{now or 'absent'} asked for); give another --out, and in a storage of several sweeps another "
                    "--name"
                )

    def entries(self) -> list[Entry]:
        """Every slot, in order."""
        by_slot = self._by_slot(self._study.get_trials(deepcopy=False))
        return [self._entry(slot, by_slot.get(slot.number, [])) for slot in self.arm.slots]

    def _by_slot(self, trials: Sequence[Any]) -> dict[int, list[Any]]:
        """Trials in the order in which they were added."""
        found: dict[int, list[Any]] = {}
        for trial in sorted(trials, key=lambda trial: trial.number):
            if "slot" in trial.user_attrs:
                found.setdefault(trial.user_attrs["slot"], []).append(trial)
        return found

    def _entry(self, slot: Slot, attempts: Sequence[Any]) -> Entry:
        state = self.optuna.trial.TrialState
        standing = [trial for trial in attempts if trial.state != state.FAIL]
        failed = [trial for trial in attempts if "error" in trial.user_attrs]
        one = (standing or failed or [None])[0]
        count = len([trial for trial in attempts if not trial.user_attrs.get("yielded")])
        if one is None:
            return Entry(slot, OPEN, slot.values or {}, None, {}, {}, count)
        kinds = {state.COMPLETE: COMPLETE, state.PRUNED: PRUNED, state.FAIL: FAILED}
        return Entry(
            slot,
            kinds.get(one.state, RUNNING),
            slot.values if slot.values is not None else dict(one.params),
            one.value if one.state in (state.COMPLETE, state.PRUNED) else None,
            dict(one.user_attrs),
            dict(one.intermediate_values),
            count,
        )

    def claim(self, without: set[int]) -> Claim | None:
        """The first slot that no other process works on and that isn't done; None where there is none.

        Args:
            without: numbers of slots that are left out.
        """
        with self._claiming:
            by_slot = self._by_slot(self._study.get_trials(deepcopy=False))
            for slot in self.arm.slots:
                attempts = by_slot.get(slot.number, [])
                if slot.number not in without and self._free(attempts):
                    claim = self._claimed(slot, attempts)
                    if claim is not None:
                        return claim
        return None

    def _free(self, attempts: Sequence[Any]) -> bool:
        """Whether a slot with these trials can be claimed; those that are dead are ended."""
        state, free = self.optuna.trial.TrialState, True
        for trial in attempts:
            if trial.state == state.RUNNING and self._dead(trial):
                self.end(trial.number, "lost")
            elif trial.state != state.FAIL:
                free = False
        return free

    def _dead(self, trial: Any) -> bool:
        """Whether a trial has had no beat for `GRACE` seconds of watching it."""
        beat, now = trial.user_attrs.get("beat", 0), time.monotonic()
        before, since = self._seen.get(trial.number, (None, now))
        if before != beat:
            self._seen[trial.number] = (beat, now)
            return False
        return now - since > GRACE

    def _claimed(self, slot: Slot, attempts: Sequence[Any]) -> Claim | None:
        """Add a trial for a slot; None where another process was first."""
        state, owner = self.optuna.trial.TrialState, uuid.uuid4().hex
        attrs = {"slot": slot.number, "seed": slot.seed, "owner": owner, "beat": 0}
        known = [trial for trial in attempts if len(trial.params) == len(self.arm.dimensions)]
        kept: dict[str, Any] = {}
        if slot.values:
            choices = self.optuna.distributions.CategoricalDistribution
            kept = {"params": slot.values}
            kept["distributions"] = {key: choices(self._dimension(key).values) for key in slot.values}
        elif known:  # what was drawn for the slot stays, so that its run goes on where it was
            kept = {"params": known[0].params, "distributions": known[0].distributions}
        self._study.add_trial(self.optuna.trial.create_trial(state=state.RUNNING, user_attrs=attrs, **kept))
        rivals = self._by_slot(self._study.get_trials(deepcopy=False))[slot.number]
        mine = next(trial for trial in rivals if trial.user_attrs.get("owner") == owner)
        standing = [trial.number for trial in rivals if trial.state != state.FAIL]
        if min(standing, default=None) != mine.number:
            self.end(mine.number, "yielded")
            return None
        return Claim(self, slot, self._trial(mine, slot))

    def _dimension(self, key: str) -> Dimension:
        return next(dimension for dimension in self.arm.dimensions if dimension.key == key)

    def _trial(self, frozen: Any, slot: Slot) -> Any:
        """The trial, with a sampler whose first draws depend on the slot alone."""
        samplers = self.optuna.samplers
        sampler = samplers.RandomSampler(seed=slot.number)
        if slot.values is None:
            sampler = samplers.TPESampler(seed=slot.number)
        study = self.optuna.load_study(storage=self.storage, study_name=self.name, sampler=sampler, pruner=self._pruner)
        return self.optuna.trial.Trial(study, frozen._trial_id)

    def end(self, number: int, why: str) -> None:
        """End a trial that runs no longer; another process may have done so."""
        study_id = self.storage.get_study_id_from_name(self.name)
        trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
        with self.others_may_be_first():
            self.storage.set_trial_user_attr(trial_id, why, True)
            self.storage.set_trial_state_values(trial_id, self.optuna.trial.TrialState.FAIL)

    @contextlib.contextmanager
    def others_may_be_first(self) -> Iterator[None]:
        """Around what cannot be done with a trial that has ended."""
        with contextlib.suppress(self.optuna.exceptions.UpdateFinishedTrialError):
            yield


def _of_sweep(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a sweep as `differing` takes those of a run: flags by themselves, and what is None left out."""
    flags = " ".join(str(value) for name, value in settings.items() if name.endswith(".train_flags"))
    others = {name: value for name, value in settings.items() if not name.endswith(".train_flags")}
    return {name: value for name, value in others.items() if value != "None"} | {"flags": flags}


class Claim:
    """A slot that this process fills. Use it as a context manager: it beats inside, and ends there in some way.

    Attributes:
        slot: with its number and seed.
        values: of the slot's keys.
        stop: is set when the training should end: it was pruned, or another process has taken over.
        pruned: whether it was pruned.
    """

    def __init__(self, trials: SharedTrials, slot: Slot, trial: Any) -> None:
        self._trials, self.slot, self._trial = trials, slot, trial
        self._states = trials.optuna.trial.TrialState
        self._finished_elsewhere = trials.optuna.exceptions.UpdateFinishedTrialError
        self.stop, self.pruned, self._ended = Event(), False, Event()
        self._thread = Thread(target=self._beats, daemon=True)
        self.values: dict[str, Any] = {}

    def __enter__(self) -> Claim:
        drawn = {dimension.key: dimension.suggest(self._trial) for dimension in self._trials.arm.dimensions}
        self.values = drawn if self.slot.values is None else self.slot.values
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Give the slot back unless it was finished; a process that is interrupted does so too."""
        self._ended.set()
        self._thread.join()
        self._trials.end(self._trial.number, "released")

    def _beats(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT):
            beat += 1
            try:
                self._trial.set_user_attr("beat", beat)
            except self._finished_elsewhere:
                self.stop.set()  # another process took this one for dead
                return
            except Exception:  # a storage that cannot be reached for a while: `GRACE` decides
                continue

    def report(self, epoch: int, value: float) -> None:
        """The metric after an epoch; sets `stop` where the trial is hopeless."""
        with self._trials.others_may_be_first():
            self._trial.report(value, epoch)
            if self._trial.should_prune():
                self.pruned = True
                self.stop.set()

    def finish(self, value: float, told: dict[str, Any]) -> bool:
        """The trial is complete; False where another process has the slot.

        Args:
            value: finite.
            told: more figures, as json has them.
        """
        return self._tell(self._states.COMPLETE, told, value)

    def prune(self, told: dict[str, Any]) -> bool:
        """The trial was pruned; its value is that of the last epoch."""
        reached = self._trials.storage.get_trial(self._trial._trial_id).intermediate_values
        return self._tell(self._states.PRUNED, told, reached[max(reached)])

    def fail(self, reason: str) -> bool:
        """The training failed."""
        return self._tell(self._states.FAIL, {"error": reason})

    def _tell(self, state: Any, told: dict[str, Any], value: float | None = None) -> bool:
        values = None if value is None or not math.isfinite(value) else [value]
        try:
            for key, content in told.items():
                self._trial.set_user_attr(key, content)
            return self._trials.storage.set_trial_state_values(self._trial._trial_id, state, values)
        except self._finished_elsewhere:
            return False
