"""The method's state in a checkpoint: a damaged one is named, a payload never runs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_reg_plugin import checkpoints as states
from attn_reg_plugin.regularizers import AttendOut
from tests.huggingface.trainers import ad_drop, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two updates of each of two methods."""
    folder = tmp_path_factory.mktemp("trained")
    for regularizer in (ad_drop(), game()):
        options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer_of(folder / regularizer.name, "bert", regularizer, **options).train()
    return folder


def game() -> AttendOut:
    return AttendOut(steps=2, sites="encoder.self[0]")


def saved(trained: Path, folder: Path, method: str = "ad_drop") -> Path:
    """A copy of a checkpoint in `folder`: the file of the method's state."""
    shutil.copytree(trained / method, folder, dirs_exist_ok=True)
    return folder / "checkpoint-2" / f"attn_reg_{method}.pt"


def resume(folder: Path, regularizer: Any) -> None:
    trainer = trainer_of(folder, "bert", regularizer, max_steps=3, save_strategy="no")
    try:
        trainer.train(resume_from_checkpoint=True)
    finally:
        assert not regularizer.attached_sites, "the model is given back"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGED = {
    "truncated": (truncated, "damaged"),
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "a folder": (a_folder, "damaged"),
    "a list": (lambda path: torch.save([1], path), "holds a list"),
    "missing keys": (lambda path: torch.save({"epoch": 1}, path), "lacks updates"),
    "a payload": (lambda path: torch.save({"epoch": Payload(path.parent / "ran")}, path), "other types"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_state_is_named(how: str, trained: Path, tmp_path: Path) -> None:
    damage, told = DAMAGED[how]
    path = saved(trained, tmp_path)
    damage(path)
    with pytest.raises(
        ValueError, match=rf"(?s)^{re.escape(str(path))}.*{told}.*; move it away, and the method starts anew"
    ):
        resume(tmp_path, ad_drop())
    assert not (path.parent / "ran").exists()


@pytest.mark.parametrize("how", ["other sites", "missing keys"])
def test_a_game_of_other_sites_is_named(how: str, trained: Path, tmp_path: Path) -> None:
    """It goes on at the first forward, when there are players."""
    path = saved(trained, tmp_path, "attend_out")
    found = torch.load(path, weights_only=True)
    if how == "missing keys":
        del found["moving_baseline"]
    else:
        found["generator"] = {f"other.{key}": value for key, value in found["generator"].items()}
    torch.save(found, path)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(path))}: the state of the method does not fit attend_out on this model"
    ):
        resume(tmp_path, game())


@pytest.mark.parametrize("when", ["save", "replace"])
def test_nothing_half_written_is_left(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attn_reg_ad_drop.pt"

    def full(state: Any, unfinished: Path) -> None:
        unfinished.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states.torch, "save", full) if when == "save" else monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError) as told:
        states.save_state(path, {"epoch": 1})
    assert told.value.filename == str(path)
    assert not list(tmp_path.iterdir())
