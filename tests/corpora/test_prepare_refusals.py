"""`attn-reg prepare`: two processes, failed starts, full disks, manifests and dictionaries that others wrote."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from attn_reg_plugin.cli import main
from attn_reg_plugin.corpora import stages
from attn_reg_plugin.corpora.pieces import read_dictionary
from attn_reg_plugin.corpora.preparation import prepare
from attn_reg_plugin.files import FolderInUse, lock_folder, read_lines
from tests.corpora.test_prepare_resume import contents, ran, source, wanted  # noqa: F401  fixtures


def test_a_second_process_is_told_who_works_there(
    source: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ran: list[str],  # noqa: F811
) -> None:
    """Also one that would overwrite, and one with other options; the first one's work is not disturbed."""

    def meddle(work: stages.Work) -> dict[str, Any]:
        for options in ({}, {"overwrite": True}, {"vocab_size": 46}):
            with pytest.raises(
                FolderInUse, match=r"still working in .*out \(process \d+ on .*\); wait for it or end it"
            ):
                prepare(wanted(source, tmp_path / "out", **options))
        return raw(work)

    raw = stages.STAGES[0][1]
    monkeypatch.setattr(stages, "STAGES", (("raw", meddle), *stages.STAGES[1:]))
    prepare(wanted(source, tmp_path / "out"))
    assert ran == ["raw", "spm", "encode", "binarize"]
    assert not [name for name in contents(tmp_path / "out") if "lock" in name or ".tmp" in name]
    with lock_folder(tmp_path / "out"):  # the folder of a run
        assert prepare(wanted(source, tmp_path / "out"))["complete"]


def test_a_failed_start_gives_way_to_the_corrected_command(
    source: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="--vocab-size 4000 is too large"):
        prepare(wanted(source, tmp_path / "out", vocab_size=4000))
    assert prepare(wanted(source, tmp_path / "out"))["complete"]
    assert "starting anew" in capsys.readouterr().out
    prepare(wanted(source, tmp_path / "fresh"))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("size", [300, 2500])
def test_a_full_disk_leaves_nothing_half_written(
    size: int,
    source: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["prepare", "wmt16", "--pair", "en-tr", "--source", str(source), "--out", str(tmp_path / "out")]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        assert main([*line, "--vocab-size", "45"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert error.startswith(f"attn-reg prepare: {tmp_path / 'out'}") and "larger than the system allows" in error
    assert set(contents(tmp_path / "out")) <= {"manifest.json"}
    assert main([*line, "--vocab-size", "45"]) == 0


@pytest.mark.parametrize("name", ["../corpus/train.en", "/etc/hostname", "raw/../../corpus/train.en", "", "raw/\0"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, source: Path, tmp_path: Path) -> None:  # noqa: F811
    prepare(wanted(source, tmp_path / "out"))
    path = tmp_path / "out" / "manifest.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["stages"]["raw"][name] = "0" * 64
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest of attn-reg prepare: give --overwrite"):
        prepare(wanted(source, tmp_path / "out"))


@pytest.mark.parametrize(
    "change",
    [
        {"splits": {"../x": {"title": "t"}}},
        {"splits": {"train": 3}},
        {"splits": None},
        {"stages": []},
        {"stages": {"raw": {"raw/train.en": 3}}},
        {"complete": 1},
        {"spm": []},
        {"request": 1},
    ],
)
def test_a_manifest_of_another_shape_is_refused(change: dict[str, Any], source: Path, tmp_path: Path) -> None:  # noqa: F811
    prepare(wanted(source, tmp_path / "out"))
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest of attn-reg prepare"):
        prepare(wanted(source, tmp_path / "out"))


def test_a_link_in_the_place_of_a_folder_is_replaced_and_not_followed(source: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.en").write_text("mine")
    prepare(wanted(source, tmp_path / "out"))
    for path in (tmp_path / "out" / "raw").iterdir():
        path.unlink()
    (tmp_path / "out" / "raw").rmdir()
    (tmp_path / "out" / "raw").symlink_to(tmp_path / "mine")
    prepare(wanted(source, tmp_path / "out"))
    assert (tmp_path / "mine" / "train.en").read_text() == "mine" and not (tmp_path / "out" / "raw").is_symlink()


def test_a_nul_byte_in_a_corpus_is_said_with_file_and_line(
    source: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (source / "train.tr").read_text(encoding="utf-8").split("\n")
    text[6] = text[6][:4] + "\0" + text[6][4:]
    (source / "train.tr").write_text("\n".join(text), encoding="utf-8")
    line = ["prepare", "wmt16", "--pair", "en-tr", "--source", str(source), "--out", str(tmp_path / "out")]
    assert main(line) == 2
    assert f"{source / 'train.tr'}, line 7: not text (a NUL byte at position 5)" in capsys.readouterr().err
    with pytest.raises(ValueError, match="line 7: not text"):
        list(read_lines(source / "train.tr"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a 1\nb\n", "line 2: 'b' is not '<symbol> <count>'"),
        (b"a 1\n\nb 1\n", "line 2: '' is not '<symbol> <count>'"),
        (b"a 1\n b 1\n 1\n", "line 3: ' 1' is not '<symbol> <count>'"),
        (b"a x\n", "line 1: 'a x' is not"),
        (b"a -1\n", "line 1: 'a -1' is not"),
        (b"a 1\nb 1\na 2\n", "line 3: 'a' is in an earlier line too"),
        (b"<pad> 1\n", "line 1: '<pad>' is one of fairseq's own"),
        (b"\xff 1\n", "it is not UTF-8 text"),
        (b"a 1\n\xef\xbb", "it is not UTF-8 text"),
    ],
)
def test_dictionaries_that_fairseq_would_not_read(content: bytes, said: str, tmp_path: Path) -> None:
    from fairseq.data import Dictionary

    path = tmp_path / "dict.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_dictionary(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
    if b"-1" not in content and b"\n 1" not in content:  # fairseq takes these two
        with pytest.raises(Exception):  # noqa: B017  it has several of its own
            Dictionary.load(str(path))


def test_dictionaries_that_fairseq_reads(tmp_path: Path) -> None:
    from fairseq.data import Dictionary

    path = tmp_path / "dict.txt"
    path.write_text("a 1\nb c 2\nd 3 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\na 2 #fairseq:overwrite\n\ufeffx 1")
    assert len(Dictionary.load(str(path))) - 4 >= len(set(read_dictionary(path)) - {"<unk>"}) == 4
    path.write_text("")
    assert read_dictionary(path) == [] and len(Dictionary.load(str(path))) == 4
    with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such file"):
        read_dictionary(tmp_path / "gone.txt")
    with pytest.raises(IsADirectoryError):
        read_dictionary(tmp_path)
