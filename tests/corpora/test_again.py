"""A preparation that was killed, stopped or repeated, or asked for with other options."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from attn_reg_plugin.cli import main
from attn_reg_plugin.corpora import preparation
from attn_reg_plugin.corpora.preparation import prepare
from tests.corpora.small_corpus import contents, wanted
from tests.processes import PATIENCE, start

pytestmark = pytest.mark.usefixtures("quick")
#: functions in the middle of each step
STEPS = ["_raw", "_pieces", "preprocess", "write_json"]


def test_a_second_run_does_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, out = prepare(wanted(source, tmp_path / "out")), tmp_path / "out"
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert prepare(wanted(source, out, workers=2)) == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == times
    assert "already prepared" in capsys.readouterr().out


def prepare_until(function: str, source: Path, out: Path) -> None:
    """In a process of its own: prepare, and be killed where the function is called."""
    setattr(preparation, function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    prepare(wanted(source, out))


@pytest.mark.parametrize("step", STEPS)
def test_after_a_kill_the_same_command_makes_the_whole(source: Path, tmp_path: Path, step: str) -> None:
    killed = start(prepare_until, step, source, tmp_path / "out")
    killed.join(PATIENCE)
    assert killed.exitcode == -signal.SIGKILL and not (tmp_path / "out").exists()
    prepare(wanted(source, tmp_path / "out"))
    prepare(wanted(source, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("step", STEPS)
def test_what_is_stopped_leaves_nothing(
    source: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, step, mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted(source, tmp_path / "new" / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_two_processes_do_not_mix_what_they_write(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(*arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(preparation, "_fill", fill)
        prepare(wanted(source, tmp_path / "out", limit=100))
        return fill(*arguments)

    fill = preparation._fill
    monkeypatch.setattr(preparation, "_fill", meddle)
    with pytest.raises(ValueError, match=r"another process has written to .*out meanwhile"):
        prepare(wanted(source, tmp_path / "out"))
    assert prepare(wanted(source, tmp_path / "out", limit=100))["splits"]["train"]["read"] == 100


def test_a_full_disk(source: Path, tmp_path: Path, limited: Any, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["prepare", "wmt16", "--pair", "en-ro", "--source", str(source), "--out", str(tmp_path / "out")]
    limited(2500)
    assert main([*line, "--vocab-size", "70"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"attn-reg prepare wmt16: {tmp_path / 'out'}") and "larger than the system allows" in error
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 100, "seed": 2}, r"other options .*\(limit was null and is now 100; seed was 1 and is now 2\)"),
        ("corpus/train.en", r"other files \(source has changed\)"),
        ("out/dict.txt", r"is not as it was prepared: dict\.txt is missing or changed"),
    ],
)
def test_another_request_and_other_files_are_refused(
    source: Path, tmp_path: Path, change: dict[str, Any] | str, message: str
) -> None:
    prepare(wanted(source, tmp_path / "out"))
    options = change if isinstance(change, dict) else {}
    if isinstance(change, str):
        (tmp_path / change).write_bytes((tmp_path / change).read_bytes() + b"more\n")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"{message}.*: give --out another folder, or remove this one"):
        prepare(wanted(source, tmp_path / "out", **options))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "is not a manifest of attn-reg prepare"), ('{"files": 1, "request": {}}', "is not a manifest")],
)
def test_a_manifest_of_something_else_is_refused(source: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        prepare(wanted(source, tmp_path / "out"))
