"""A preparation that was killed, stopped or repeated, done by two processes, or asked for with other options."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from attn_reg_plugin.cli import main
from attn_reg_plugin.corpora import preparation
from attn_reg_plugin.corpora.preparation import prepare
from attn_reg_plugin.files import FolderInUse, lock_folder
from tests.corpora.small_corpus import contents, wanted
from tests.processes import PATIENCE, start

pytestmark = pytest.mark.usefixtures("quick")
#: functions in the middle of each step
STEPS = ["_raw", "_pieces", "preprocess", "write_json"]


def test_a_second_run_does_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, out = prepare(wanted(source, tmp_path / "out")), tmp_path / "out"
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert prepare(wanted(source, out, workers=2, overwrite=True)) == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == times
    assert "already prepared" in capsys.readouterr().out


def prepare_until(function: str, place: int, source: Path, out: Path) -> None:
    """In a process of its own: prepare, and be killed where the function is called for this time."""
    calls = []

    def kill(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == place else original(*args, **options)

    module = os if function == "replace" else preparation
    original = getattr(module, function)
    setattr(module, function, kill)
    prepare(wanted(source, out))


@pytest.mark.parametrize(("function", "place"), [*((step, 1) for step in STEPS), ("replace", 4)])
@pytest.mark.parametrize("before", [False, True])
def test_after_a_kill_the_same_command_makes_the_whole(
    source: Path, tmp_path: Path, function: str, place: int, before: bool
) -> None:
    """Also where it has begun to replace what an earlier preparation wrote."""
    out = tmp_path / "out"
    if before:
        prepare(wanted(source, out))
        (out / "raw" / "test.en").unlink()
    killed = start(prepare_until, function, place, source, out)
    killed.join(PATIENCE)
    assert killed.exitcode == -signal.SIGKILL
    prepare(wanted(source, out))
    prepare(wanted(source, tmp_path / "whole"))
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("deep", ["out", "new/out"])
def test_what_is_stopped_leaves_nothing(
    source: Path, tmp_path: Path, step: str, deep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation, step, stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted(source, tmp_path / deep))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize("damaged", ["raw/test.en", "dict.txt", "pieces/valid.ro", "bin/train.bin"])
@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_file_that_is_gone_or_changed_is_made_again(source: Path, tmp_path: Path, damaged: str, how: str) -> None:
    prepare(wanted(source, tmp_path / "out"))
    whole, path = contents(tmp_path / "out"), tmp_path / "out" / damaged
    path.unlink() if how == "missing" else path.write_text("cut")
    prepare(wanted(source, tmp_path / "out"))
    assert contents(tmp_path / "out") == whole


def test_a_second_process_is_told_who_works_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that would overwrite, and one with other options; the first one's work is not disturbed."""

    def meddle(*arguments: Any) -> dict[str, Any]:
        for options in ({}, {"overwrite": True}, {"vocab_size": 66}):
            with pytest.raises(
                FolderInUse, match=r"still working in .*out \(process \d+ on .*\); wait for it or end it"
            ):
                prepare(wanted(source, tmp_path / "out", **options))
        return fill(*arguments)

    fill = preparation._fill
    monkeypatch.setattr(preparation, "_fill", meddle)
    prepare(wanted(source, tmp_path / "out"))
    assert not [name for name in contents(tmp_path / "out") if "lock" in name]
    with lock_folder(tmp_path / "out"):  # the folder of a run
        prepare(wanted(source, tmp_path / "out"))


@pytest.mark.parametrize("size", [300, 2500])
def test_a_full_disk(size: int, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["prepare", "wmt16", "--pair", "en-ro", "--source", str(source), "--out", str(tmp_path / "out")]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        assert main([*line, "--vocab-size", "70"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert error.startswith(f"attn-reg prepare wmt16: {tmp_path / 'out'}") and "larger than the system allows" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 100, "seed": 2}, r"\(limit was null and is now 100; seed was 1 and is now 2\)"),
        ({"more": True}, r"from other files \(source has changed\)"),
    ],
)
def test_other_options_and_other_files_are_refused(
    source: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    prepare(wanted(source, tmp_path / "out"))
    whole = contents(tmp_path / "out")
    if options.pop("more", False):
        (source / "train.en").write_bytes((source / "train.en").read_bytes() + b"more\n")
    with pytest.raises(ValueError, match=rf"{message}.*: give --out another folder, or --overwrite"):
        prepare(wanted(source, tmp_path / "out", **options))
    assert contents(tmp_path / "out") == whole


def test_overwrite_replaces_what_was_written_and_nothing_else(source: Path, tmp_path: Path) -> None:
    """A link in the place of a folder is replaced and not followed; what is read may lie there."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    prepare(wanted(source, out))
    for folder in (out / "checkpoints", mine):
        folder.mkdir()
        (folder / "best.pt").write_text("mine")
    (out / "pieces").rename(tmp_path / "elsewhere")
    (out / "pieces").symlink_to(mine)
    model = (out / "spm.model").read_bytes()
    prepare(wanted(source, out, spm_model=out / "spm.model", overwrite=True))
    assert (out / "spm.model").read_bytes() == model
    prepare(wanted(source, out, vocab_size=40, overwrite=True))
    prepare(wanted(source, tmp_path / "fresh", vocab_size=40))
    after = contents(out)
    assert after.pop("checkpoints/best.pt") == b"mine" and after == contents(tmp_path / "fresh")
    assert list(contents(mine)) == ["best.pt"]


@pytest.mark.parametrize("text", ["not json", "[]", '{"files": {}}', '{"files": 1, "request": {}}'])
def test_a_manifest_of_something_else_is_refused(source: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest of attn-reg prepare"):
        prepare(wanted(source, tmp_path / "out"))
    assert (tmp_path / "out" / "manifest.json").read_text() == text
    prepare(wanted(source, tmp_path / "out", overwrite=True))
