"""Damaged files beside a run: what is repaired, what is named, and what is left alone."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_reg_plugin import AttendOut
from attn_reg_plugin import checkpoints as reading
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.tasks.sidecar import Sidecar, continue_from
from tests.backends.fairseq_models import transformer
from tests.tasks.tasks_in_process import Optimizer, attached, criterion, sample, step

STATE = {"epoch": 1, "updates": 4, "model": {"w": torch.arange(4000.0)}}


def written(path: Path, old: bool = False, age: int = 0, **more: Any) -> bytes:
    """A checkpoint, in torch's older format or the present one; what is in it."""
    torch.save({**STATE, **more}, path, _use_new_zipfile_serialization=not old)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path.read_bytes()


class Foreign:
    """What nobody allows in a checkpoint."""


# -- checkpoint_last.pt -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["older format", "zip", "other types", "older format, other types"])
def test_a_whole_checkpoint_is_left_alone(kind: str, tmp_path: Path) -> None:
    written(tmp_path / "checkpoint_best.pt")
    more = {"foreign": Foreign()} if "types" in kind else {}
    last = written(tmp_path / "checkpoint_last.pt", old="older" in kind, age=50, **more)
    Sidecar(str(tmp_path)).repair_last()
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == last
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 5000])
def test_a_torn_copy_is_made_anew_and_kept(
    kept: int, old: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = tmp_path / "checkpoint_last.pt"
    torn = written(last, old=old)[:kept]
    last.write_bytes(torn)
    newest = written(tmp_path / "checkpoint2.pt", old=old, age=5)
    written(tmp_path / "checkpoint1.pt", age=9)
    (tmp_path / "checkpoint_best.pt").write_bytes(torn)  # newer, and no help
    Sidecar(str(tmp_path)).repair_last()
    assert last.read_bytes() == newest
    assert (tmp_path / "checkpoint_last.pt.damaged").read_bytes() == torn
    assert "made anew from checkpoint2.pt; the damaged one is kept as checkpoint_last.pt.damaged" in caplog.text
    last.write_bytes(torn)
    Sidecar(str(tmp_path)).repair_last()
    assert (tmp_path / "checkpoint_last.pt.damaged.1").read_bytes() == torn, "one that was kept is not overwritten"
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize(
    "hindrance",
    [
        PermissionError(13, "Permission denied"),
        OSError(5, "Input/output error"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    ],
    ids=str,
)
def test_what_cannot_be_read_now_is_not_taken_for_damaged(
    hindrance: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = written(tmp_path / "checkpoint_last.pt")
    written(tmp_path / "checkpoint_best.pt", age=9)
    load = torch.load

    def hindered(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "checkpoint_last.pt":
            raise hindrance
        return load(path, *args, **options)

    monkeypatch.setattr(torch, "load", hindered)
    Sidecar(str(tmp_path)).repair_last()
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == last and len(list(tmp_path.iterdir())) == 2


def test_nothing_to_repair_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint_last.pt").write_bytes(b"torn")
    Sidecar(str(tmp_path)).repair_last()
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == b"torn" and "no other checkpoint" in caplog.text


def test_a_disk_that_is_full_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "checkpoint_best.pt")
    (tmp_path / "checkpoint_last.pt").write_bytes(b"torn")

    def full(_: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr("attn_reg_plugin.tasks.sidecar.shutil.copyfile", full)
    with pytest.raises(ValueError, match=r"checkpoint_last\.pt is damaged and cannot be made anew: .*No space left"):
        Sidecar(str(tmp_path)).repair_last()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_best.pt", "checkpoint_last.pt"}


@pytest.mark.parametrize("method", ["none", "ad_drop"])
def test_without_a_method_nothing_is_touched(method: str, tmp_path: Path) -> None:
    written(tmp_path / "checkpoint_best.pt")
    (tmp_path / "checkpoint_last.pt").write_bytes(b"torn")
    attached(transformer(), attn_reg=method, attn_save_dir=str(tmp_path))
    assert ((tmp_path / "checkpoint_last.pt").read_bytes() == b"torn") == (method == "none")


# -- the state of a method --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read"),
        ("truncated", "cannot be read"),
        ([1, 2], "holds a list"),
        ({"epoch": 1}, "lacks updates"),
        ({**STATE, "x": Foreign()}, "holds other types"),
    ],
)
def test_a_damaged_state_is_named(content: Any, told: str, tmp_path: Path) -> None:
    sidecar = Sidecar(str(tmp_path))
    path = sidecar.path(4)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(STATE if content == "truncated" else content, path)
    if content == "truncated":
        path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.* {told}.*; move it away, and the method starts"):
        sidecar.load(4)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    sidecar = Sidecar(str(tmp_path))
    (tmp_path / ".attn_reg_state_3.pt.tmp-7-0").write_bytes(b"of a process that was killed")
    sidecar.save(4, STATE)
    assert torch.equal(sidecar.load(4)["model"]["w"], STATE["model"]["w"])
    assert [path.name for path in tmp_path.iterdir()] == ["attn_reg_state_4.pt"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("file write failed"), KeyboardInterrupt()]
)
def test_nothing_half_written_is_left(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = Sidecar(str(tmp_path))
    sidecar.save(4, STATE)

    def stop(_: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(reading.torch, "save", stop)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OSError
    with pytest.raises(expected) as told:
        sidecar.save(5, STATE)
    assert expected is KeyboardInterrupt or told.value.filename == str(sidecar.path(5))
    assert [path.name for path in tmp_path.iterdir()] == ["attn_reg_state_4.pt"]


GAME = {"rounds": 0, "in_round": 0, "moving_baseline": 0.0, "moving_square": 0.0, "defender": {}}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "lacks generator"),
        ({**GAME, "generator": {"other.weight": torch.ones(2)}, "generator_optimizer": {}, "cache": []}, "Generator"),
        ({**GAME, "generator": [1], "generator_optimizer": {}, "cache": []}, "list"),
        (
            {**GAME, "generator": {}, "generator_optimizer": {}, "cache": [{"masks": {"decoder.self[7]": None}}]},
            r"sites are others: decoder.self\[7\]",
        ),
    ],
)
def test_a_game_of_another_model_is_named(state: dict[str, Any], told: str, tmp_path: Path) -> None:
    task = attached(transformer(), attn_reg="attend_out", attn_save_dir=str(tmp_path))
    regularizer = task.regularizer
    assert isinstance(regularizer, AttendOut)
    regularizer.problem, regularizer.optimizer = object(), torch.optim.SGD(regularizer.model.parameters(), 0.1)
    regularizer._make_defender = lambda *_: None
    torch.save({"epoch": 1, "updates": 4, **state}, task.sidecar.path(4))
    with pytest.raises(
        ValueError, match=rf"attn_reg_state_4\.pt: the state .* does not fit --attn-reg attend_out.*({told})"
    ):
        continue_from(task.sidecar, regularizer, 4)


@pytest.mark.parametrize("state", [[1, 2], {"epoch": 1}, "text"])
@pytest.mark.parametrize("file", ["checkpoint_last.pt", "/elsewhere/checkpoint7.pt"])
def test_a_damaged_state_in_the_checkpoint_is_named(file: str, state: Any, tmp_path: Path) -> None:
    task = attached(transformer(), attn_restore_file=file, attn_save_dir=str(tmp_path))
    place = re.escape(str(tmp_path / file))
    with pytest.raises(ValueError, match=rf"{place}: the state of the method does not fit .*ad_drop"):
        task.load_state_dict({"attn_reg": state})


def test_a_whole_state_in_the_checkpoint_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    task = attached(transformer())
    with caplog.at_level(logging.WARNING):
        task.load_state_dict({"attn_reg": {**task.regularizer.state_dict(), "epoch": 3, "updates": 9}})
    assert (task.regularizer.epoch, task.regularizer.updates, caplog.text) == (3, 9, "")


def test_the_parts_of_a_combination_stay_in_the_epoch_that_was_announced(tmp_path: Path) -> None:
    """Its state is read within an epoch, after that was announced."""
    saved, resumed = build("ad_drop+r_drop"), build("ad_drop+r_drop")
    saved.begin_epoch(3)
    state = {**saved.state_dict(), "updates": 9}
    sidecar = Sidecar(str(tmp_path))
    sidecar.save(9, state)
    resumed.begin_epoch(4)
    continue_from(sidecar, resumed, 9)
    assert [part.epoch for part in (resumed, *resumed.parts)] == [4, 4, 4]


@pytest.mark.parametrize("updates", [7, 8])
@pytest.mark.parametrize("method", ["child_tuning", "child_tuning+head_drop"])
def test_a_small_state_is_taken_from_the_checkpoint(method: str, updates: int, tmp_path: Path) -> None:
    """Child-Tuning (F) masks by the seed of its first update; of another checkpoint nothing is taken."""
    file = tmp_path / "checkpoint_last.pt"
    flags = {"attn_reg": method, "attn_save_dir": str(tmp_path)}
    first, second = attached(transformer(), **flags), attached(transformer(), **flags)
    step(first, first.regularizer.model, sample())
    torch.save({"task_state": first.state_dict(), "optimizer_history": [{"num_updates": 7}]}, file)
    second.begin_epoch(2, second.regularizer.model)
    second.train_step(sample(), second.regularizer.model.train(), criterion(), Optimizer(), updates)
    seeds = [task.regularizer.parts[0].seed for task in (first, second)]
    assert len(set(seeds)) == (1 if updates == 7 else 2)
    assert second.regularizer.epoch == 2 and second.regularizer.updates == updates
