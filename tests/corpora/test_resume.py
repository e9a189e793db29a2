"""A preparation that was killed, repeated, done by two processes, or asked for with other options."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from attn_reg_plugin.cli import main
from attn_reg_plugin.corpora import pieces, preparation
from attn_reg_plugin.corpora.preparation import prepare
from attn_reg_plugin.files import FolderInUse, lock_folder
from tests.corpora.small_corpus import contents, wanted
from tests.processes import PATIENCE, start

NAMES = ["raw", "spm", "encode", "binarize"]
pytestmark = pytest.mark.usefixtures("ran")


def manifest_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text(encoding="utf-8"))


def test_a_second_run_does_nothing(source: Path, tmp_path: Path, ran: list[str], capsys: Any) -> None:
    first, out = prepare(wanted(source, tmp_path / "out")), tmp_path / "out"
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert ran == NAMES
    assert prepare(wanted(source, out, workers=2, overwrite=True)) == first and ran == NAMES
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == times
    assert "already prepared" in capsys.readouterr().out


def prepare_until(module: str, function: str, source: Path, out: Path) -> None:
    """In a process of its own: prepare, and be killed where the function is called."""
    setattr(importlib.import_module(module), function, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
    prepare(wanted(source, out))


@pytest.mark.parametrize(
    ("module", "function", "left"),
    [
        (preparation, "normalize", NAMES),  # in the middle of writing raw text
        (pieces, "check_fit", NAMES[1:]),  # model and dictionary are written
        (preparation, "_reason", NAMES[2:]),
        (preparation, "preprocess", NAMES[3:]),
    ],
)
def test_a_killed_process_is_continued(
    source: Path, tmp_path: Path, ran: list[str], module: Any, function: str, left: list[str]
) -> None:
    prepare(wanted(source, tmp_path / "whole"))
    ran.clear()
    killed = start(prepare_until, module.__name__, function, source, tmp_path / "out")
    killed.join(PATIENCE)
    assert killed.exitcode == -signal.SIGKILL and not manifest_of(tmp_path / "out")["complete"]
    prepare(wanted(source, tmp_path / "out"))
    assert ran == left and contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_repair_that_is_stopped_leaves_no_manifest_that_says_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(work: preparation.Work) -> dict[str, Any]:
        (work.out / "raw").mkdir()
        raise KeyboardInterrupt

    prepare(wanted(source, tmp_path / "out"))
    (tmp_path / "out" / "raw" / "train.en").unlink()
    monkeypatch.setattr(preparation, "STAGES", (("raw", stop, ("raw",)), *preparation.STAGES[1:]))
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted(source, tmp_path / "out"))
    assert not manifest_of(tmp_path / "out")["complete"] and not manifest_of(tmp_path / "out")["stages"]


@pytest.mark.parametrize(
    ("damaged", "first"), [("raw/test.en", 0), ("dict.txt", 1), ("pieces/valid.ro", 2), ("bin/train.bin", 3)]
)
@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_file_that_is_gone_or_changed_is_made_again(
    source: Path, tmp_path: Path, ran: list[str], damaged: str, first: int, how: str
) -> None:
    prepare(wanted(source, tmp_path / "out"))
    whole, path = contents(tmp_path / "out"), tmp_path / "out" / damaged
    path.unlink() if how == "missing" else path.write_text("cut")
    ran.clear()
    prepare(wanted(source, tmp_path / "out"))
    assert ran == NAMES[first:] and contents(tmp_path / "out") == whole


def test_a_second_process_is_told_who_works_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    """Also one that would overwrite, and one with other options; the first one's work is not disturbed."""

    def meddle(work: preparation.Work) -> dict[str, Any]:
        for options in ({}, {"overwrite": True}, {"vocab_size": 66}):
            with pytest.raises(
                FolderInUse, match=r"still working in .*out \(process \d+ on .*\); wait for it or end it"
            ):
                prepare(wanted(source, tmp_path / "out", **options))
        return raw(work)

    raw = preparation.STAGES[0][1]
    monkeypatch.setattr(preparation, "STAGES", (("raw", meddle, ("raw",)), *preparation.STAGES[1:]))
    prepare(wanted(source, tmp_path / "out"))
    assert ran == NAMES and not [name for name in contents(tmp_path / "out") if "lock" in name]
    with lock_folder(tmp_path / "out"):  # the folder of a run
        assert prepare(wanted(source, tmp_path / "out"))["complete"]


def test_a_failed_start_gives_way_to_the_corrected_command(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="--vocab-size 4000 is too large"):
        prepare(wanted(source, tmp_path / "out", vocab_size=4000))
    assert prepare(wanted(source, tmp_path / "out"))["complete"]
    assert "starting anew" in capsys.readouterr().out
    prepare(wanted(source, tmp_path / "fresh"))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("size", [300, 2500])
def test_after_a_full_disk_the_same_command_goes_on(
    size: int, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["prepare", "wmt16", "--pair", "en-ro", "--source", str(source), "--out", str(tmp_path / "out")]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        assert main([*line, "--vocab-size", "70"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert error.startswith(f"attn-reg prepare: {tmp_path / 'out'}") and "larger than the system allows" in error
    assert main([*line, "--vocab-size", "70"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 71}, r"\(vocab_size was 70 and is now 71\)"),
        ({"limit": 100, "strict": True}, r"\(limit was null and is now 100; strict was false and is now true\)"),
        ({"pair": "ro-en"}, r'pair was "en-ro" and is now "ro-en"'),
        ({"split_valid": True}, r"\(source has changed\)"),
    ],
)
def test_other_options_are_refused(
    source: Path, tmp_path: Path, ran: list[str], options: dict[str, Any], message: str
) -> None:
    prepare(wanted(source, tmp_path / "out"))
    whole = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"{message}.*: give --out another folder, or --overwrite"):
        prepare(wanted(source, tmp_path / "out", **options))
    assert contents(tmp_path / "out") == whole and ran == NAMES


def test_other_files_are_refused(source: Path, tmp_path: Path) -> None:
    prepare(wanted(source, tmp_path / "out"))
    with (source / "train.en").open("a", encoding="utf-8") as file:
        file.write("more\n")
    with pytest.raises(ValueError, match=r"from other files \(source has changed\)"):
        prepare(wanted(source, tmp_path / "out"))


def test_overwrite_replaces_what_was_written_and_nothing_else(source: Path, tmp_path: Path) -> None:
    """A link in the place of a folder is replaced and not followed."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    prepare(wanted(source, out))
    for folder in (out / "checkpoints", mine):
        folder.mkdir()
        (folder / "best.pt").write_text("mine")
    (out / "pieces").rename(tmp_path / "elsewhere")
    (out / "pieces").symlink_to(mine)
    prepare(wanted(source, out, spm="separate", vocab_size=40, overwrite=True))
    prepare(wanted(source, tmp_path / "fresh", spm="separate", vocab_size=40))
    after = contents(out)
    assert after.pop("checkpoints/best.pt") == b"mine" and after == contents(tmp_path / "fresh")
    assert list(contents(mine)) == ["best.pt"]


@pytest.mark.parametrize("text", ["not json", "[]", '{"stages": {}}', '{"complete": 1, "request": {}, "stages": {}}'])
def test_a_manifest_of_something_else_is_refused(source: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest of attn-reg prepare"):
        prepare(wanted(source, tmp_path / "out"))
    assert (tmp_path / "out" / "manifest.json").read_text() == text
    assert prepare(wanted(source, tmp_path / "out", overwrite=True))["complete"]
