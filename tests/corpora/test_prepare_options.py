"""`attn-reg prepare`: options, files, vocabularies and folders that are refused, each in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_reg_plugin.cli import main
from tests.corpora.small_corpus import corpus, write_corpus, write_split

#: options -> what is said of them
REFUSED = {
    "--pair de-en": "--pair de-en: it must be one of en-ro, ro-en, en-tr, tr-en",
    "--limit 0": "--limit 0: it must be at least 1",
    "--noise 1.5": "--noise 1.5: it must be in [0, 1]",
    "--set-aside -1": "--set-aside -1: it must be at least 0",
    "--spm both": "--spm both: it must be one of joint, separate",
    "--spm-model a,b,c": "--spm-model a,b,c: it must be one file, or two",
    "--spm-model a,b --spm joint": "--spm-model a,b: it must be 1 with --spm joint",
    "--spm-model a --vocab-size 9": "--vocab-size 9: it must be left out with --spm-model",
    "--dictionary d": "--dictionary d: it must be given together with --spm-model",
    "--dictionary d,e --spm-model m": "--dictionary d,e: it must be 1 with --spm joint",
    "--vocab-size 4": "--vocab-size 4: it must be above 4",
    "--character-coverage 0": "--character-coverage 0.0: it must be above 0 and at most 1",
    "--max-pieces 0": "--max-pieces 0: it must be at least 1",
    "--long-pairs cut": "--long-pairs is 'cut', but must be one of drop, truncate",
    "--max-ratio 0.5": "--max-ratio 0.5: it must be at least 1",
    "--workers 0": "--workers 0: it must be at least 1",
    "--romanian all": "--romanian all: it must be one of cedilla, no-diacritics, none",
    "--pair en-tr --romanian cedilla": "--romanian cedilla: it must be 'none' for --pair en-tr",
    "--source hub --origin a": "--origin a: it must be left out with --source hub",
    "--source nowhere": "--source nowhere: no such folder",
    "--spm-model gone.model": "gone.model: no such file",
    "--origin a": "--origin needs ",
}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says when it refuses: one line, exit status 2."""
    assert main(["prepare", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attn-reg prepare: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("options", REFUSED)
def test_options_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str) -> None:
    source = write_corpus(tmp_path / "c")
    base = ["wmt16", "--pair", "en-ro", "--source", source, "--out", tmp_path / "out"]
    assert REFUSED[options] in refusal(capsys, *base, *options.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--test", 0], "--test 0: it must be at least 1"),
        (["--train", 20_000], "The phrasebook has 10458 pairs for train"),
        (["--noise", 1.5], "--noise 1.5: it must be in [0, 1]"),
        (["--noise", 0.01, "--train", 100], "--noise 0.01: it exchanges 1 of 100 targets, and it takes at least 2"),
    ],
)
def test_phrasebook_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[object], message: str
) -> None:
    assert message in refusal(capsys, "phrasebook", "--pair", "en-ro", "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("split", "row", "pair", "options", "message"),
    [
        ("newsdev2016", 2, ("  ", "ceva"), [], "newsdev2016.en, line 3: empty"),
        ("newstest2017", 0, ("some", ""), [], "newstest2017.ro, line 1: empty"),
        ("train", 4, ("some", "\u2028"), ["--strict"], "train.ro, line 5: empty"),
        ("newsdev2016", 1, ("\u200b", "ceva"), [], "valid.en, line 2: sentencepiece leaves nothing"),
    ],
)
def test_empty_lines_are_refused_with_file_and_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    split: str,
    row: int,
    pair: tuple[str, str],
    options: list[str],
    message: str,
) -> None:
    source = write_corpus(tmp_path / "c")
    pairs = corpus(10, 5)
    pairs[row] = pair
    write_split(source, split, pairs)
    base = ["wmt16", "--pair", "en-ro", "--source", source, "--out", tmp_path / "out", "--vocab-size", 60]
    assert message in refusal(capsys, *base, *options)


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_corpus(tmp_path / "c")
    base = ["wmt16", "--pair", "en-ro", "--source", source, "--vocab-size", 70, "--out"]
    with (source / "newstest2016.en").open("ab") as file:
        file.write(b"one more\n")
    assert "newstest2016.ro, line 10 is missing: " in refusal(capsys, *base, tmp_path / "a")
    (source / "newstest2016.en").write_bytes(b"caf\xe9\n" * 9)
    assert "newstest2016.en, line 1: not UTF-8" in refusal(capsys, *base, tmp_path / "b")
    write_corpus(source, [])
    assert "give no pair at all for train" in refusal(capsys, *base, tmp_path / "d")
    (source / "train.en").unlink()
    assert "has no train.en (plain or .gz); it has: newsdev2016.en" in refusal(capsys, *base, tmp_path / "e")


def test_vocabularies_and_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_corpus(tmp_path / "c")
    base = ["wmt16", "--pair", "en-ro", "--source", source, "--out"]
    assert "--vocab-size 8000 is too large" in refusal(capsys, *base, tmp_path / "a")
    (tmp_path / "text.model").write_text("the 1\n")
    error = refusal(capsys, *base, tmp_path / "b", "--spm-model", tmp_path / "text.model")
    assert "text.model is not a sentencepiece model" in error
    short = [*base, tmp_path / "e", "--vocab-size", 70, "--max-pieces", 1]
    assert "no training pair is left: --max-pieces 1 and --max-ratio 9.0 drop all 160" in refusal(capsys, *short)


def test_output_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_corpus(tmp_path / "c")
    base = ["wmt16", "--pair", "en-ro", "--source", source, "--vocab-size", 70]
    (tmp_path / "file").write_text("mine")
    assert "file is a file: it must be a folder" in refusal(capsys, *base, "--out", tmp_path / "file")
    assert "must be a folder; " in refusal(capsys, *base, "--out", tmp_path / "file" / "below")
    (tmp_path / "mine" / "raw").mkdir(parents=True)
    error = refusal(capsys, *base, "--out", tmp_path / "mine")
    assert "mine holds raw but no manifest.json" in error
    assert (tmp_path / "mine" / "raw").is_dir()
    (source / "raw").mkdir()
    inside = ["wmt16", "--pair", "en-ro", "--source", write_corpus(source / "raw"), "--out", source, "--overwrite"]
    assert "lies in what --out" in refusal(capsys, *inside)
    assert (source / "raw" / "train.en").exists()
