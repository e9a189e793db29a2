"""Files with a method's state: written whole or not at all, and refused by name where they are damaged or another's."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_reg_plugin import checkpoints
from tests.payload import Payload

STATE = {"epoch": 1, "updates": 4, "model": {"w": torch.arange(4000.0)}}


def truncated(path: Path) -> None:
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:900])


def flipped(path: Path) -> None:
    """Change a byte: the archive opens, and torch reads it."""
    torch.save(STATE, path)
    content = bytearray(path.read_bytes())
    content[content.index(STATE["model"]["w"].numpy().tobytes())] ^= 1
    path.write_bytes(content)


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncated, "cannot be read: it is damaged"),
    "flipped": (flipped, "cannot be read.*checksum of .* is wrong"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read: it is damaged"),
    "a folder": (lambda path: path.mkdir(), "damaged"),
    "a list": (lambda path: torch.save([1], path), "holds a list"),
    "missing keys": (lambda path: torch.save({"epoch": 1}, path), "lacks updates"),
    "a payload": (lambda path: torch.save({**STATE, "x": Payload(path.parent / "ran")}, path), "holds other types"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_state_is_named_and_never_run(how: str, tmp_path: Path) -> None:
    damage, told = DAMAGED[how]
    path = tmp_path / "state.pt"
    damage(path)
    said = rf"(?s)^{re.escape(str(path))}.*{told}.*; move it away, and the method starts"
    with pytest.raises(ValueError, match=said):
        checkpoints.load_state(path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match=r"^there is no file .*absent\.pt$"):
        checkpoints.load_state(tmp_path / "absent.pt")


@pytest.mark.parametrize("when", ["save", "replace", None])
def test_nothing_half_written_is_left(when: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.pt"

    def full(state: Any, unfinished: Path) -> None:
        unfinished.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if when is None:
        checkpoints.save_state(path, STATE)
        assert torch.equal(checkpoints.load_state(str(path))["model"]["w"], STATE["model"]["w"])
        return
    monkeypatch.setattr(torch, "save", full) if when == "save" else monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError) as told:
        checkpoints.save_state(path, STATE)
    assert told.value.filename == str(path) and not list(tmp_path.iterdir())
