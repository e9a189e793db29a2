"""What a process does for a sweep: claim a trial, run it, tell what came out, until all are done."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

from rich.console import Console

from attn_reg_plugin.experiments.executing_before import RunError
from attn_reg_plugin.experiments.jobs import Slots
from attn_reg_plugin.experiments.progress import Reporter, RunProgress
from attn_reg_plugin.experiments.runs_before import Run, RunInUse
from attn_reg_plugin.experiments.sweep_objective import Objective
from attn_reg_plugin.experiments.sweep_space import Arm, Slot
from attn_reg_plugin.experiments.sweep_study import COMPLETE, OPEN, PRUNED, Claim, SharedTrials
from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.terminal import say

#: seconds between two looks for work
WAIT = 2.0
#: seconds until a trial is tried again whose folder another process, such as an orphaned training, still holds
BUSY = 20.0
#: after so many failures and no success the settings are wrong, not the trial
HOPELESS = 3


class _Any(Event):
    """Set when any of several events is."""

    def __init__(self, *events: Event) -> None:
        super().__init__()
        self._events = events

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._events)


class Worker:
    """Fills the arms of a sweep; its `work` may run in several threads."""

    def __init__(
        self,
        arms: Sequence[SharedTrials],
        make: Callable[[Arm, Slot, dict[str, Any]], Run],
        objective: Objective,
        reporter: Reporter,
        epochs: int,
        gpus: Slots,
    ) -> None:
        """Prepare for work.

        Args:
            make: the run of a slot with these values.
            epochs: of a run, at most.
            gpus: each run has one of these.
        """
        self._gpus = gpus
        self._arms, self._make, self._objective, self._reporter, self._epochs = arms, make, objective, reporter, epochs
        self._lock = threading.Lock()
        #: (arm, slot) of what failed here, and of what is held elsewhere with the time until which it is left alone
        self._failed: set[tuple[str, int]] = set()
        self._busy: dict[tuple[str, int], float] = {}
        self._successes, self._waiting = 0, False

    @property
    def console(self) -> Console:
        """Where it says what it does."""
        return self._reporter.console

    def work(self, stop: Event) -> None:
        """Run trials until all are done, here or elsewhere.

        Raises:
            RunError: the first trials all failed; the end of the last one's log is shown.
        """
        while not stop.is_set():
            claimed = self._claim()
            if claimed is not None:
                trials, claim = claimed
                with claim:
                    self._carry_out(trials.arm, claim, stop)
            elif self._done():
                return
            else:
                self._say_waiting()
                stop.wait(WAIT)

    def _claim(self) -> tuple[SharedTrials, Claim] | None:
        """A trial of the arm that has the fewest so far, so that budgets are equal at any time."""
        started = {trials.name: sum(entry.state != OPEN for entry in trials.entries()) for trials in self._arms}
        for trials in sorted(self._arms, key=lambda trials: started[trials.name]):
            claim = trials.claim(self._left_alone(trials.arm.name))
            if claim is not None:
                return trials, claim
        return None

    def _left_alone(self, arm: str) -> set[int]:
        with self._lock:
            busy = {key for key, until in self._busy.items() if until > time.monotonic()}
            return {slot for name, slot in self._failed | busy if name == arm}

    def _done(self) -> bool:
        """Whether every trial is finished, or has failed here."""
        with self._lock:
            failed = set(self._failed)
        return all(
            entry.state in (COMPLETE, PRUNED) or (trials.arm.name, entry.slot.number) in failed
            for trials in self._arms
            for entry in trials.entries()
        )

    def _say_waiting(self) -> None:
        if not self._waiting:
            self._waiting = True
            self.console.print("nothing left to start; waiting for the trials that still run", highlight=False)

    def _carry_out(self, arm: Arm, claim: Claim, stop: Event) -> None:
        """Run a trial and tell what came out of it."""
        with self._gpus.lent() as gpu:
            one = self._make(arm, claim.slot, claim.values)
            self._run(arm, claim, one if gpu is None else dataclasses.replace(one, device=gpu), stop)

    def _run(self, arm: Arm, claim: Claim, one: Run, stop: Event) -> None:
        progress = self._reporter.start(one.title, self._epochs)
        reported: set[int] = set()
        earlier: dict[tuple[int, int], dict[str, float]] = {}

        def watch(log: TrainingLog) -> None:
            progress.watch(log)
            whole = dataclasses.replace(log, validations=earlier | log.validations)
            for epoch, value in self._objective.by_epoch(whole).items():
                if epoch not in reported and whole.over(epoch):
                    reported.add(epoch)
                    claim.report(epoch, value)

        try:
            one.claim()
            if one.has_log():  # of before an interruption: a training that goes on logs only later validations
                earlier |= one.log().validations
                watch(one.log())
            one.carry_out(watch, _Any(stop, claim.stop))
        except RunInUse as error:
            with self._lock:
                self._busy[arm.name, claim.slot.number] = time.monotonic() + BUSY
            progress.set_aside(f"later: {error}")
        except RunError as error:
            self._ended(arm, claim, one, error, stop, progress)
        else:
            value = self._objective.of_run(one)
            if value is None:
                reason = RunError(f"{one.folder} has no {self._objective.metric} of any epoch")
                return self._ended(arm, claim, one, reason, stop, progress)
            watch(one.log() if one.has_log() else TrainingLog())
            claim.finish(value, {"folder": one.folder.name, "result": one.result()})
            with self._lock:
                self._successes += 1
            progress.finish(f"{self._objective.metric} {value:.3f}")

    def _ended(self, arm: Arm, claim: Claim, one: Run, error: RunError, stop: Event, progress: RunProgress) -> None:
        """A training has ended early: it was pruned, stopped, or it failed."""
        if claim.pruned:
            claim.prune({"folder": one.folder.name})
            progress.finish("pruned")
        elif stop.is_set():
            raise error
        elif claim.stop.is_set():
            progress.set_aside("another process has taken over")
        else:
            claim.fail(str(error))
            progress.finish(f"failed: {error}")
            with self._lock:
                self._failed.add((arm.name, claim.slot.number))
                hopeless = not self._successes and len(self._failed) >= HOPELESS
            if hopeless:
                if error.tail:
                    say(self.console, error.tail)
                raise error
