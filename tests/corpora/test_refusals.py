"""`attn-reg prepare`: options, files, vocabularies and folders that are refused, each in one sentence."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_reg_plugin.cli import main
from tests.corpora.small_corpus import corpus, write_corpus, write_split

#: of `prepare wmt16 --pair en-ro --source corpus`: options -> the sentence
OPTIONS = {
    "--pair en": "--pair en: it must be two different languages with a hyphen, source first, such as en-fr",
    "--pair en-zh-Hans": "--pair en-zh-Hans: it must be two different languages",
    "--set-aside 400": "--set-aside 400 leaves none of the 160 pairs",
    "--spm-model a --vocab-size 9": "--vocab-size 9: it must be left out with --spm-model",
    "--vocab-size 8000": "--vocab-size 8000: Vocabulary size too high (8000)",
    "--max-pieces 1 --vocab-size 70": "no training pair is left: --max-pieces 1 and sides 9 times as long",
    "--source-prefix >>ron<<": "--source-prefix >>ron<<: it must be left out without --opus-mt",
    "--opus-mt nowhere": "nowhere: no such folder",
    "--opus-mt corpus --vocab-size 9": "--vocab-size 9: it must be left out with --opus-mt",
    "--opus-mt corpus --spm-model a": "--spm-model a: it must be left out with --opus-mt",
    "--source hub --origin a": "--origin a: it must be left out with --source hub",
    "--source nowhere": "--source nowhere: no such folder",
    "--spm-model gone.model": "gone.model: there is no such file",
    "--spm-model corpus/train.en": "corpus/train.en is not a sentencepiece model",
    "--origin a": "--origin needs corpus/train.origin, which is not there",
    "--out corpus/train.en": "train.en exists already: give a folder that does not",
}
PHRASEBOOK = {
    "--pair en-de": "--pair en-de: it must be two of en, ro, tr, such as en-ro",
    "--train 20000": "The phrasebook has 10458 pairs for train",
    "--noise 0.01 --train 100": "--noise 0.01 exchanges 1 of the 100 targets of phrasebook train (ro)",
}


def row(split: str, number: int, pair: tuple[str, str]) -> Callable[[Path], None]:
    """Put a pair into a split of ten."""
    pairs = corpus(10, 5)
    pairs[number] = pair
    return lambda folder: write_split(folder, split, pairs)


def change(name: str, content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the content of a file."""
    return lambda folder: void((folder / name).write_bytes(content((folder / name).read_bytes())))


def void(*_: object) -> None:
    """Give nothing back."""


#: what is done to the corpus, options, the sentence
FILES = {
    "no source": (row("newsdev2016", 2, ("  ", "ceva")), "", "newsdev2016.en, line 3: empty"),
    "no target": (row("newstest2017", 4, ("some", "\u2028")), "", "newstest2017.ro, line 5: empty"),
    "no piece": (row("newsdev2016", 1, ("\u200b", "ceva")), "", "newsdev2016.en, line 2: sentencepiece leaves nothing"),
    "a line more": (
        change("newstest2016.en", lambda text: text + b"one more\n"),
        "",
        "newstest2016.ro, line 10 is missing: corpus/newstest2016.en has a line 10",
    ),
    "not UTF-8": (change("train.ro", lambda text: text + b"caf\xe9\n"), "", "train.ro, line 161: not UTF-8 (byte 0xe9"),
    "a NUL byte": (change("train.ro", lambda text: b"abcd\0\n" + text), "", "train.ro, line 1: not text (a NUL byte"),
    "no pair": (lambda folder: void(write_corpus(folder, [])), "", "give no pair at all for train"),
    "a single pair": (
        lambda folder: write_split(folder, "newsdev2016", corpus(1, 2)),
        "--split-valid",
        "newsdev2016.en has 1 lines, too few to be split into valid and test",
    ),
    "no file": (
        lambda folder: (folder / "train.en").unlink(),
        "",
        "corpus has no train.en (plain or .gz); it has: newsdev2016.en, newsdev2016.ro, newstest2016.en",
    ),
    "half a test set": (lambda folder: (folder / "newstest2017.en").unlink(), "", "has no newstest2017.en"),
    "two forms": (
        lambda folder: void((folder / "train.en.gz").write_bytes(gzip.compress(b"a\n"))),
        "",
        "has both train.en and train.en.gz: remove one of them",
    ),
    "an unknown origin": (
        lambda folder: void((folder / "train.origin").write_text("x\ny\n")),
        "--origin y,w",
        "--origin 'w': corpus/train.origin has only x, y",
    ),
    "a foreign folder": (
        lambda folder: (folder.parent / "out" / "raw").mkdir(parents=True),
        "",
        "out exists already: give a folder that does not, or an empty one",
    ),
}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence of a refused command: one line, exit status 2."""
    assert main(["prepare", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attn-reg prepare ") and error.count("\n") == 1
    return error


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_corpus(Path("corpus"))


@pytest.mark.parametrize("options", OPTIONS)
def test_options(capsys: pytest.CaptureFixture[str], options: str) -> None:
    base = ["wmt16", "--pair", "en-ro", "--source", "corpus", "--out", "out"]
    assert OPTIONS[options] in refusal(capsys, *base, *options.split())
    assert not Path("out").exists(), "nothing is left"


@pytest.mark.parametrize("options", PHRASEBOOK)
def test_options_of_the_phrasebook(capsys: pytest.CaptureFixture[str], options: str) -> None:
    assert PHRASEBOOK[options] in refusal(capsys, "phrasebook", "--pair", "en-ro", "--out", "out", *options.split())
    assert not Path("out").exists()


@pytest.mark.parametrize("case", FILES)
def test_files(capsys: pytest.CaptureFixture[str], here: Path, case: str) -> None:
    spoil, options, message = FILES[case]
    spoil(here)
    before = sorted(Path().rglob("*"))
    base = ["text", "--pair", "en-ro", "--source", "corpus", "--out", "out", "--vocab-size", "60"]
    assert message in refusal(capsys, *base, *options.split())
    assert sorted(Path().rglob("*")) == before, "nothing is left"
