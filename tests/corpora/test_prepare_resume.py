"""A preparation that was killed, repeated, or asked for with other options."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from attn_reg_plugin.corpora import binarize, stages
from attn_reg_plugin.corpora.preparation import prepare
from attn_reg_plugin.corpora.preparation_options import Wmt16Options
from tests.processes import PATIENCE, start

NAMES = ["raw", "spm", "encode", "binarize"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    draw = random.Random(5)
    words = [a + b for a in ("ri", "ho", "wa", "blu", "gre", "ci", "old") for b in ("ver", "use", "lks", "nty")]
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, count in {"train": 120, "newsdev2016": 8, "newstest2016": 6}.items():
        for language in ("en", "tr"):
            text = "".join(" ".join(draw.choices(words, k=draw.randint(3, 8))) + "\n" for _ in range(count))
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that ran, in order; fairseq's own work is replaced by a file."""
    done: list[str] = []

    def preprocess(folder: Path, destination: Path, *rest: Any) -> None:
        destination.mkdir()
        (destination / "train.bin").write_bytes((folder / "pieces" / "train.en").read_bytes())

    def noted(name: str, function: Any) -> Any:
        def stage(work: stages.Work) -> dict[str, Any]:
            done.append(name)
            return function(work)

        return stage

    monkeypatch.setattr(binarize, "preprocess", preprocess)
    monkeypatch.setattr(binarize, "check_counts", lambda *arguments: None)
    monkeypatch.setattr(stages, "STAGES", tuple((name, noted(name, stage)) for name, stage in stages.STAGES))
    return done


def wanted(source: Path, out: Path, **options: Any) -> Wmt16Options:
    return Wmt16Options(**{"pair": "en-tr", "source": str(source), "out": out, "vocab_size": 45, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def break_stage(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A stage that writes half of something, and fails."""

    def stage(work: stages.Work) -> dict[str, Any]:
        (work.temporary / "raw").mkdir()
        (work.temporary / "raw" / "train.en").write_text("half")
        raise KeyboardInterrupt

    changed = ((name, stage if name == broken else function) for name, function in stages.STAGES)
    monkeypatch.setattr(stages, "STAGES", tuple(changed))


def test_a_second_run_does_nothing(source: Path, tmp_path: Path, ran: list[str], capsys: Any) -> None:
    first = prepare(wanted(source, tmp_path / "out"))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert ran == NAMES
    assert prepare(wanted(source, tmp_path / "out", workers=2, overwrite=True)) == first
    assert ran == NAMES
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()} == {
        path: time for path, time in times.items() if path.is_file()
    }
    assert "already prepared" in capsys.readouterr().out


@pytest.mark.parametrize("broken", NAMES)
def test_a_run_stopped_in_a_stage_continues_there(
    source: Path, tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    prepare(wanted(source, tmp_path / "whole"))
    ran.clear()
    with monkeypatch.context() as patch:
        break_stage(patch, broken)
        with pytest.raises(KeyboardInterrupt):
            prepare(wanted(source, tmp_path / "out"))
    assert not (tmp_path / "out" / "raw").exists() or broken != "raw"
    assert not json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))["complete"]
    ran.clear()
    prepare(wanted(source, tmp_path / "out"))
    assert ran == NAMES[NAMES.index(broken) :]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def prepare_until(module: str, function: str, source: Path, out: Path) -> None:
    """In a process of its own: prepare, and be killed where the function is called."""
    holder = importlib.import_module(f"attn_reg_plugin.corpora.{module}")
    setattr(holder, function, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
    prepare(wanted(source, out))


@pytest.mark.parametrize(
    ("module", "function", "left"),
    [
        ("stages", "normalize", NAMES),  # in the middle of writing raw text
        ("preparation", "_move_into", NAMES),  # the first stage is written, and not yet in place
        ("pieces", "check_fit", NAMES[1:]),  # model and dictionary are written
        ("binarize", "preprocess", NAMES[3:]),
    ],
)
def test_a_killed_process_is_continued(
    source: Path, tmp_path: Path, ran: list[str], module: str, function: str, left: list[str]
) -> None:
    prepare(wanted(source, tmp_path / "whole"))
    ran.clear()
    killed = start(prepare_until, module, function, source, tmp_path / "out")
    killed.join(PATIENCE)
    assert killed.exitcode == -signal.SIGKILL
    assert list((tmp_path / "out").glob(".tmp-*"))
    prepare(wanted(source, tmp_path / "out"))
    assert ran == left
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_repair_that_is_stopped_leaves_no_manifest_that_says_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(wanted(source, tmp_path / "out"))
    (tmp_path / "out" / "raw" / "train.en").unlink()
    break_stage(monkeypatch, "raw")
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted(source, tmp_path / "out"))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert not manifest["complete"] and not manifest["stages"]


def test_a_kill_between_the_move_and_the_record_is_repaired(source: Path, tmp_path: Path, ran: list[str]) -> None:
    prepare(wanted(source, tmp_path / "out"))
    whole = contents(tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["stages"]["encode"], data["stages"]["binarize"], data["versions"]
    path.write_text(json.dumps({**data, "complete": False}), encoding="utf-8")
    (tmp_path / "out/pieces/train.en").unlink()  # as if only half of it had been moved
    (tmp_path / "out/.tmp-encode-1/pieces").mkdir(parents=True)
    ran.clear()
    prepare(wanted(source, tmp_path / "out"))
    assert ran == NAMES[2:]
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("damaged", "first"), [("raw/test.en", 0), ("dict.txt", 1), ("pieces/valid.tr", 2), ("bin/train.bin", 3)]
)
@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_file_that_is_gone_or_changed_is_made_again(
    source: Path, tmp_path: Path, ran: list[str], damaged: str, first: int, how: str
) -> None:
    prepare(wanted(source, tmp_path / "out"))
    whole = contents(tmp_path / "out")
    if how == "missing":
        (tmp_path / "out" / damaged).unlink()
    else:
        (tmp_path / "out" / damaged).write_text("cut")
    ran.clear()
    prepare(wanted(source, tmp_path / "out"))
    assert ran == NAMES[first:]
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 46}, r"\(vocab_size was 45 and is now 46\)"),
        ({"limit": 100, "strict": True}, r"\(limit was null and is now 100; strict was false and is now true\)"),
        ({"pair": "tr-en"}, r'pair was "en-tr" and is now "tr-en"'),
    ],
)
def test_other_options_are_refused(
    source: Path, tmp_path: Path, ran: list[str], options: dict[str, Any], message: str
) -> None:
    prepare(wanted(source, tmp_path / "out"))
    whole = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"{message}.*: give --out another folder, or --overwrite"):
        prepare(wanted(source, tmp_path / "out", **options))
    assert contents(tmp_path / "out") == whole
    assert ran == NAMES


def test_other_files_are_refused(source: Path, tmp_path: Path) -> None:
    prepare(wanted(source, tmp_path / "out"))
    with (source / "train.en").open("a", encoding="utf-8") as file:
        file.write("more\n")
    with pytest.raises(ValueError, match=r"from other files \(source has changed\)"):
        prepare(wanted(source, tmp_path / "out"))


def test_overwrite_replaces_what_was_written_and_nothing_else(source: Path, tmp_path: Path) -> None:
    prepare(wanted(source, tmp_path / "out"))
    (tmp_path / "out" / "checkpoints").mkdir()
    (tmp_path / "out" / "checkpoints" / "best.pt").write_text("mine")
    prepare(wanted(source, tmp_path / "out", spm="separate", vocab_size=40, overwrite=True))
    prepare(wanted(source, tmp_path / "fresh", spm="separate", vocab_size=40))
    after = contents(tmp_path / "out")
    assert after.pop("checkpoints/best.pt") == b"mine"
    assert after == contents(tmp_path / "fresh")


@pytest.mark.parametrize("text", ["not json", "[]", '{"stages": {}}'])
def test_a_manifest_of_something_else_is_refused(source: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest of attn-reg prepare"):
        prepare(wanted(source, tmp_path / "out"))
    assert (tmp_path / "out" / "manifest.json").read_text() == text
    assert prepare(wanted(source, tmp_path / "out", overwrite=True))["complete"]
