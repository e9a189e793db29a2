"""Trials that processes share: each is filled exactly once, whoever is killed, slow or in a hurry."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna

from attn_reg_plugin.experiments import checks, sweep_study, sweep_work
from attn_reg_plugin.experiments.executing_before import RunError
from attn_reg_plugin.experiments.runs_before import RunInUse
from attn_reg_plugin.experiments.sweep_report import Report
from attn_reg_plugin.experiments.sweep_space import Arm, Dimension, Slot, slots_of
from attn_reg_plugin.experiments.sweep_storage import open_storage, without_password
from attn_reg_plugin.experiments.sweep_study import COMPLETE, FAILED, OPEN, PRUNED, RUNNING
from attn_reg_plugin.experiments.training_log import TrainingLog
from tests import processes
from tests.experiments.sweep_trials import ACCURACY, DIMENSIONS, METHOD, PLAIN, SLOTS, FakeRun, fill, trials, worker

NEVER = threading.Event()


def test_two_processes_of_which_one_is_killed_fill_every_trial_once(tmp_path: Path) -> None:
    """Twelve trials and twelve plain ones on an SQLite file; the killed process was in the middle of its third."""
    trials(tmp_path), trials(tmp_path, PLAIN)  # the tables
    victim = processes.start(fill, tmp_path, 3, 0.1, 2.0)
    other = processes.start(fill, tmp_path, None, 0.1, 2.0)

    def began() -> list[Path]:
        pid = f"{victim.pid}\n"
        return [path.parent for path in tmp_path.glob("*/started") if pid in path.read_text()]

    until = time.monotonic() + processes.PATIENCE
    while len(began()) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    victim.kill()
    victim.join(processes.PATIENCE)
    other.join(processes.PATIENCE)
    assert other.exitcode == 0 and len(began()) == 3
    taken_over = 0
    for arm in (METHOD, PLAIN):
        entries = trials(tmp_path, arm).entries()
        assert [entry.state for entry in entries] == [COMPLETE] * 12
        assert [entry.value for entry in entries] == [float(number) for number in range(12)]
        taken_over += sum(entry.attempts == 2 for entry in entries)
        (storage,) = {f"sqlite:///{tmp_path / 'sweep.db'}"}
        study = optuna.load_study(storage=storage, study_name=arm.name)
        complete = [one for one in study.trials if one.state == optuna.trial.TrialState.COMPLETE]
        assert sorted(one.user_attrs["slot"] for one in complete) == list(range(12))
    assert taken_over == 1, "the third of the killed process, and nothing else, was run again"
    report = Report([(arm, trials(tmp_path, arm).entries()) for arm in (METHOD, PLAIN)], ACCURACY)
    assert sorted(one.number for one in report.trials["plain"]) == list(range(12)) and not report.failed


def test_claims_at_the_same_time_are_of_different_slots(tmp_path: Path) -> None:
    """Five claimants with connections of their own, more often than there are slots."""
    found: list[int] = []

    def claim_all(shared: Any) -> None:
        while (claim := shared.claim(set())) is not None:
            with claim:
                found.append(claim.slot.number)
                claim.finish(0.0, {})

    threads = [threading.Thread(target=claim_all, args=(trials(tmp_path),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(found)) == list(range(12))
    entries = trials(tmp_path).entries()
    assert [entry.state for entry in entries] == [COMPLETE] * 12


def test_of_two_trials_for_a_slot_the_lower_number_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process adds its trial between this one's look and this one's own."""
    first, second = trials(tmp_path), trials(tmp_path)
    look = type(first)._free

    def slow(self: Any, attempts: Any) -> bool:
        free = look(self, attempts)
        if self is second:
            monkeypatch.setattr(type(first), "_free", look)
            self.rival = first.claim(set())
        return free

    monkeypatch.setattr(type(first), "_free", slow)
    mine = second.claim(set())
    assert second.rival.slot.number == 0 and mine.slot.number == 1, "it gave way and took the next"
    assert [entry.attempts for entry in first.entries()[:3]] == [1, 1, 0]


def test_a_process_that_was_only_slow_stops_and_its_result_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_study, "GRACE", 0.0)
    monkeypatch.setattr(sweep_study, "BEAT", 0.5)
    slow, other = trials(tmp_path), trials(tmp_path)
    with slow.claim(set()) as claim:
        rest = set(range(1, 12))
        assert other.claim(rest) is None, "it has been watched for no time yet"
        taken, until = None, time.monotonic() + processes.PATIENCE
        while taken is None and time.monotonic() < until:  # a beat may come between two looks
            taken = other.claim(rest)
        with taken:
            assert claim.stop.wait(20) and not claim.finish(7.0, {"folder": "x"})
            assert taken.finish(8.0, {})
    entry = trials(tmp_path).entries()[0]
    assert (entry.state, entry.value, entry.attempts) == (COMPLETE, 8.0, 2)


def test_what_is_interrupted_is_free_at_once(tmp_path: Path) -> None:
    shared = trials(tmp_path)
    with pytest.raises(KeyboardInterrupt), shared.claim(set()):
        assert shared.entries()[0].state == RUNNING
        raise KeyboardInterrupt
    assert shared.entries()[0].state == OPEN and shared.claim(set()).slot.number == 0


def test_what_was_drawn_for_a_slot_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that is taken over goes on in its folder, so its values are those of before."""
    ranges = (Dimension("p", kind="uniform", low=0.0, high=1.0), Dimension("lr", True, kind="log", low=1e-5, high=1e-2))
    ranges += (Dimension("steps", kind="int", low=1, high=9), Dimension("sites", values=("*", "encoder.self")))
    arm = Arm("ad_drop", "AD-DROP", ranges, slots_of(ranges, (5, 6), 3))
    with trials(tmp_path, arm).claim(set()) as claim:
        drawn = claim.values
    assert 1e-5 <= drawn["lr"] <= 1e-2 and drawn["steps"] in range(1, 10) and 0 <= drawn["p"] <= 1
    monkeypatch.setattr(optuna.samplers, "TPESampler", lambda seed=0: optuna.samplers.RandomSampler(seed + 99))
    with trials(tmp_path, arm).claim(set()) as claim:
        assert claim.values == drawn and claim.slot.seed == 5
        claim.finish(1.0, {})
    with trials(tmp_path, arm).claim(set()) as claim:
        assert claim.values != drawn and claim.slot.seed == 6
    assert trials(tmp_path, arm).entries()[0].values == drawn


def test_hopeless_trials_are_pruned(tmp_path: Path) -> None:
    """Slots 5 and 11 start below the median of the others; 11 is ended after its second epoch, since six are complete
    before it, and 5 isn't."""
    pytest.importorskip("fairseq")
    from attn_reg_plugin.experiments.sweep_settings import Sweep

    curves: dict[int, list[float]] = {}

    def make(arm: Arm, slot: Slot, values: dict[str, Any]) -> FakeRun:
        curves[slot.number] = [3.0, 2.0, 99.0] if slot.number in (5, 11) else [5.0 + slot.number, 6.0, 7.0]
        return FakeRun(tmp_path, arm, slot, curves[slot.number])

    space = {dimension.key: list(dimension.values) for dimension in DIMENSIONS}
    base, few = {"task": "rte", "data": "data", "model": "encoder"}, {"pruner_trials": 6, "pruner_epochs": 1}
    shared, _ = Sweep(out=tmp_path, finetune=base, space=space, pruner="median", **few).studies(maximize=True)
    worker(tmp_path, make, shared).work(NEVER)
    entries = shared.entries()
    assert [entry.state for entry in entries] == [COMPLETE] * 11 + [PRUNED]
    assert entries[11].by_epoch == {1: 3.0, 2: 2.0} and (entries[3].value, entries[5].value) == (8.0, 99.0)
    report = Report([(METHOD, entries)], ACCURACY)
    assert report.trials["ad_drop"][11].value == 3.0 and report.summaries[0].pruned == 1


def test_a_trial_that_goes_on_is_judged_by_its_epochs_before_too(tmp_path: Path) -> None:
    """Its best epoch was before the interruption: later ones alone are below the median of the others."""

    class Resumed(FakeRun):
        def has_log(self) -> bool:
            return True

        def log(self, epochs: int | None = None) -> TrainingLog:
            found = super().log(epochs)
            if epochs is not None:  # of what `carry_out` watches
                found.validations = {key: figures for key, figures in found.validations.items() if key[0] > 2}
            return found

    def make(arm: Arm, slot: Slot, values: dict[str, Any]) -> FakeRun:
        if slot.number == 0:
            return FakeRun(tmp_path, arm, slot, [80.0, 80.0, 80.0, 81.0])
        return Resumed(tmp_path, arm, slot, [79.0, 90.0, 70.0, 71.0])

    arm = Arm("ad_drop", "AD-DROP", DIMENSIONS, SLOTS[:2])
    shared = trials(tmp_path, arm, optuna.pruners.MedianPruner(1, 2))
    worker(tmp_path, make, shared).work(NEVER)
    last = shared.entries()[1]
    assert (last.state, last.value) == (COMPLETE, 90.0) and last.by_epoch == {1: 79.0, 2: 90.0, 3: 70.0, 4: 71.0}


def log_of(epochs: list[int], *validations: tuple[int, int, float]) -> TrainingLog:
    """The log of a training that has ended these epochs, of validations by epoch and update."""
    found = {(epoch, update): {"accuracy": value} for epoch, update, value in validations}
    return TrainingLog(train_wall=dict.fromkeys(epochs, 1.0), validations=found)


def test_an_epoch_counts_with_its_best_validation_once_it_has_ended(tmp_path: Path) -> None:
    """Of a training that validates within its epochs, and was interrupted in the second one."""
    before, later = ((1, 50, 60.0), (1, 99, 80.0), (2, 150, 90.0)), ((2, 199, 70.0), (3, 250, 60.0), (3, 299, 85.0))

    class Often(FakeRun):
        found = log_of([1], *before)

        def has_log(self) -> bool:
            return True

        def log(self, epochs: int | None = None) -> TrainingLog:
            return self.found

        def carry_out(self, watch: Any, stop: Any) -> None:
            for count, epochs in ((1, []), (1, [2]), (2, [2]), (3, [2]), (3, [2, 3])):
                watch(log_of(epochs, *later[:count]))
            self.found = log_of([1, 2, 3], *before, *later)

    shared = trials(tmp_path, Arm("ad_drop", "AD-DROP", DIMENSIONS, SLOTS[:1]))
    worker(tmp_path, lambda arm, slot, values: Often(tmp_path, arm, slot), shared).work(NEVER)
    (entry,) = shared.entries()
    assert (entry.state, entry.value, entry.by_epoch) == (COMPLETE, 90.0, {1: 80.0, 2: 90.0, 3: 85.0})


def test_what_is_said_while_another_thread_tries_a_command_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fairseq")
    from attn_reg_plugin.experiments import sweep_settings

    def talk(works: Any, jobs: int) -> None:
        with checks._silence(io.StringIO()):
            works[0].__self__.console.print("a trial is done")
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_settings, "at_a_time", talk)
    monkeypatch.setattr(sweep_settings.Sweep, "try_all", lambda self: SimpleNamespace(settings=dict))
    base = {"task": "rte", "data": "data", "model": "encoder"}
    assert sweep_settings.Sweep(out=tmp_path, finetune=base, space={"p": [0.1]}).carry_out() == 130
    assert capsys.readouterr().out.splitlines()[0] == "a trial is done"


def test_a_failed_trial_is_kept_as_such_and_another_process_tries_it_once_more(tmp_path: Path) -> None:
    class Broken(FakeRun):
        def carry_out(self, watch: Any, stop: Any) -> None:
            raise RunError("the training ended with exit status 1")

    def make(arm: Arm, slot: Slot, values: dict[str, Any]) -> FakeRun:
        return (Broken if slot.number == 4 else FakeRun)(tmp_path, arm, slot)

    for attempts in (1, 2):
        shared = trials(tmp_path)
        worker(tmp_path, make, shared).work(NEVER)
        assert [entry.state for entry in shared.entries()] == [*[COMPLETE] * 4, FAILED, *[COMPLETE] * 7]
        assert shared.entries()[4].attempts == attempts
    report = Report([(METHOD, shared.entries())], ACCURACY)
    assert report.failed[0].error == "the training ended with exit status 1" and report.summaries[0].failed == 1


def test_where_everything_fails_it_ends(tmp_path: Path) -> None:
    class Broken(FakeRun):
        def carry_out(self, watch: Any, stop: Any) -> None:
            raise RunError("no space left")

    shared = trials(tmp_path)
    with pytest.raises(RunError, match="no space left"):
        worker(tmp_path, lambda arm, slot, values: Broken(tmp_path, arm, slot), shared).work(NEVER)
    assert [entry.state for entry in shared.entries()].count(FAILED) == sweep_work.HOPELESS


def test_a_folder_that_is_in_use_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a training has outlived the process that started it."""
    monkeypatch.setattr(sweep_work, "BUSY", 0.5)
    monkeypatch.setattr(sweep_work, "WAIT", 0.1)
    refused: list[int] = []

    class Held(FakeRun):
        def claim(self) -> None:
            super().claim()
            if len(refused) < 2:
                refused.append(1)
                raise RunInUse("another process is still working there")

    def make(arm: Arm, slot: Slot, values: dict[str, Any]) -> FakeRun:
        return (Held if slot.number == 0 else FakeRun)(tmp_path, arm, slot)

    shared = trials(tmp_path)
    worker(tmp_path, make, shared).work(NEVER)
    assert [entry.state for entry in shared.entries()] == [COMPLETE] * 12 and shared.entries()[0].attempts == 3


def test_another_sweep_in_the_same_study_is_refused(tmp_path: Path) -> None:
    same = {"finetune.lr": "0.1", "seeds": [1], "method": {"p": 1, "q": 0.5}}
    trials(tmp_path).agree(same)
    trials(tmp_path).agree({**same, "method": {"q": 0.5, "p": 1.0}})
    trials(tmp_path).agree({**same, "tokenizer": "abc"})  # earlier versions didn't say it
    with pytest.raises(ValueError, match=r"other settings \(finetune.lr: 0.1 there, 0.2 asked for\); give another --o"):
        trials(tmp_path).agree({**same, "finetune.lr": "0.2"})


def test_a_sweep_goes_on_with_a_model_that_was_moved(tmp_path: Path) -> None:
    def agree(folder: str, digest: str, path: str = "a.pt") -> None:
        flags = f"--lr 0.1 --restore-file {path}"
        trials(tmp_path).agree({"compare.opus_mt": folder, "compare.train_flags": flags, "start": digest})

    agree("old/model", "abc")
    agree("new/model", "abc", "new/a.pt")
    for wrong, said in (
        (("new/model", "xyz"), "start: abc there, xyz asked for"),
        (("None", "abc"), "compare.opus_mt: old/model there, absent asked for"),
        (("new/model", "abc", "a.pt --lr 0.2"), "--lr: 0.1 there, 0.2 asked for"),
    ):
        with pytest.raises(ValueError, match=said):
            agree(*wrong)


@pytest.mark.parametrize("url", ["nonsense", "nonsense://x", "postgresql://me:secret@localhost:1/x", "sqlite:////no/x"])
def test_a_storage_that_cannot_be_opened(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"storage .* cannot be opened: ") as error:
        open_storage(url, tmp_path)
    assert "secret" not in str(error.value) and without_password(url) in str(error.value)
