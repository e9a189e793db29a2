"""Sources of splits, splits arranged anew, and Romanian letters."""

import gzip
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from attn_reg_plugin.corpora.options import TextOptions, with_commas
from attn_reg_plugin.corpora.sources import Pair, Split, arrange, read_splits
from attn_reg_plugin.files import read_lines
from tests.corpora.small_corpus import wanted

LANGUAGES = ("en", "ro")


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_folder(folder: Path, **splits: int) -> Path:
    """A folder of parallel files with the given numbers of lines."""
    folder.mkdir(exist_ok=True)
    for name, count in splits.items():
        for language in LANGUAGES:
            write(folder / f"{name}.{language}", *(f"{name} {language} {n}" for n in range(1, count + 1)))
    return folder


def found(source: object, **options: Any) -> tuple[dict[str, list[Pair]], list[str]]:
    """The pairs of each split, by its name and title, and the notes."""
    splits, notes = read_splits(wanted(source, Path("out"), **options))
    return {f"{split.name} {split.title}": list(split.pairs) for split in splits}, notes


def test_lines_are_the_same_plain_and_gzipped_and_only_newlines_end_them(tmp_path: Path) -> None:
    content = "\ufeffa\u2028b\rc\r\n\nd\x85e\x0bf".encode()
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b.gz").write_bytes(gzip.compress(content))
    assert list(read_lines(tmp_path / "a")) == list(read_lines(tmp_path / "b.gz")) == ["a b c", "", "d e f"]


@pytest.mark.parametrize(
    ("text", "written"),
    [("şi ţară Şi Ţară s\u0327i t\u0327ară", "și țară Și Țară și țară"), ("Çeşme façade", "Çeșme façade")],
)
def test_cedilla_becomes_comma_below(text: str, written: str) -> None:
    assert with_commas(text) == with_commas(written) == written


@pytest.mark.parametrize(
    ("names", "titles"),
    [
        (
            {"train": 3, "newsdev2016": 2, "newstest2018": 1, "newstest2016": 1},
            ["train train", "valid newsdev2016", "test newstest2016", "test1 newstest2018"],
        ),
        ({"train": 3, "dev": 2, "test": 1}, ["train train", "valid dev", "test test"]),
        ({"train": 3, "valid": 2, "test": 1}, ["train train", "valid valid", "test test"]),
    ],
)
def test_names_of_files(tmp_path: Path, names: dict[str, int], titles: list[str]) -> None:
    splits, notes = found(write_folder(tmp_path / "c", **names))
    assert list(splits) == titles and notes == []
    last = titles[-1].split()[1]
    assert splits[titles[-1]] == [Pair(1, f"{last} en 1", f"{last} ro 1")]


def test_without_a_test_set_newsdev_is_split_in_halves(tmp_path: Path) -> None:
    splits, notes = found(write_folder(tmp_path / "c", train=1, newsdev2016=5), pair="ro-en")
    assert splits["train train"] == [Pair(1, "train ro 1", "train en 1")], "the other direction reads the same files"
    assert [pair.line for pair in splits["valid newsdev2016a"]] == [1, 2]
    assert [pair.line for pair in splits["test newsdev2016b"]] == [3, 4, 5]
    assert "lines 1 to 2 are valid (newsdev2016a), lines 3 to 5 are test (newsdev2016b)" in notes[0]


def test_limit_and_origin_choose_training_pairs(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "c", train=5, newsdev2016=4, test=1)
    write(folder / "train.origin", "x", "y", "x", "z", "x")
    splits, _ = found(folder, limit=3, origin=("x", "z"))
    assert [pair.line for pair in splits["train train"]] == [1, 3, 4] and len(splits["valid newsdev2016"]) == 4
    assert [pair.line for pair in found(folder, limit=2)[0]["train train"]] == [1, 2]


# -- the hub ----------------------------------------------------------------------------------------------------------


def rows(count: int) -> list[dict[str, dict[str, str]]]:
    return [{"translation": {"en": f"en {n}", "ro": f"ro\n{n}"}} for n in range(count)]


def test_the_hub_is_streamed_and_asked_for_the_right_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: object, **options: object) -> datasets.IterableDatasetDict:
        assert (arguments, options) == (("wmt/wmt16", "ro-en"), {"streaming": True})
        made = {name: datasets.Dataset.from_list(rows(n)) for name, n in (("train", 5), ("validation", 2), ("test", 3))}
        return datasets.IterableDatasetDict({name: data.to_iterable_dataset() for name, data in made.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits, notes = found("hub", pair="ro-en", limit=4)
    counts = {"train train": 4, "valid newsdev2016": 2, "test newstest2016": 3}
    assert {name: len(pairs) for name, pairs in splits.items()} == counts and notes == []
    assert splits["train train"][0] == Pair(1, "ro 0", "en 0")


def test_a_folder_of_prepare_text_may_be_called_as_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "hub", train=3, valid=2, test=1)
    monkeypatch.chdir(tmp_path)
    splits, _ = read_splits(TextOptions(pair="en-ro", source="hub", out=Path("out")))
    assert [(split.name, len(list(split.pairs))) for split in splits] == [("train", 3), ("valid", 2), ("test", 1)]


def broken_rows() -> Iterator[dict]:
    yield from rows(1)
    raise OSError("cut off")


def offline() -> None:
    raise ConnectionError("no network\nlong trace")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (offline, r"\(ConnectionError: no network\): give --source a folder"),
        (lambda: {"train": broken_rows(), "validation": [], "test": []}, "OSError: cut off"),
        (lambda: {"train": [{"translation": {"en": "a"}}], "validation": [], "test": []}, "KeyError: 'ro'"),
        (lambda: {"train": []}, "KeyError: 'validation'"),
    ],
)
def test_a_hub_that_fails_is_one_sentence(
    data: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data())
    with pytest.raises(ValueError, match=rf"wmt/wmt16 \(ro-en\) could not be read .*{message}"):
        list(found("hub"))


# -- splits arranged anew ---------------------------------------------------------------------------------------------

TRAIN = [(f"en {n}", f"ro {n}") for n in range(40)]


def arranged(train: list[tuple[str, str]], **how: Any) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The pairs of each split, and the notes."""

    def split(name: str, pairs: list[tuple[str, str]]) -> Split:
        return Split(name, name, (f"{name}.en", f"{name}.ro"), [Pair(line, *two) for line, two in enumerate(pairs, 1)])

    valid, test = (split(name, [(f"{name} {n}", f"{name} {n} ro") for n in range(6)]) for name in ("valid", "test"))
    options = TextOptions(pair="en-ro", source="c", out=Path("out"), **how)
    splits, notes = arrange(options, split("train", train), valid, test)
    return {one.name: [(pair.source, pair.target) for pair in one.pairs] for one in splits}, notes


def test_the_validation_set_is_split_beside_a_test_set() -> None:
    assert list(arranged(TRAIN)[0]) == ["train", "valid", "test"]
    splits, notes = arranged(TRAIN, split_valid=True)
    assert list(splits) == ["train", "valid", "test", "test1"] and splits["train"] == TRAIN
    assert (splits["valid"][0][0], splits["test"][0][0], splits["test1"][0][0]) == ("valid 0", "valid 3", "test 0")
    assert notes == ["valid is split: lines 1 to 3 are valid (valida), lines 4 to 6 are test (validb)"]


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_targets_are_exchanged_among_training_pairs(share: float) -> None:
    train = [*TRAIN, ("", "ro of nothing"), ("en of nothing", " ")]
    splits, notes = arranged(train, noise=share)
    found = splits["train"]
    assert [source for source, _ in found] == [source for source, _ in train]
    assert sorted(target for _, target in found) == sorted(target for _, target in train)
    assert sum(one != other for one, other in zip(train, found, strict=True)) == share * 40
    assert found[40:] == train[40:], "an incomplete pair, which is dropped later, stays what it is"
    assert notes == [f"{share * 40:.0f} of 40 training targets are exchanged among each other"]
    assert splits == arranged(train, noise=share)[0] != arranged(train, noise=share, seed=2)[0]
    assert splits["valid"] == arranged(train)[0]["valid"]


def test_pairs_are_set_aside_and_their_likes_left_out() -> None:
    train = [(f"ș{source}", target) for source, target in TRAIN]
    twins = [(unicodedata.normalize("NFD", source.upper()) + "!", "else " + target) for source, target in train]
    splits, notes = arranged([*train, *twins], set_aside=10)
    aside = splits["test1"]
    assert len(aside) == 10 and len(splits["train"]) < 70
    kept, drawn = ({source.rstrip("!").split()[-1] for source, _ in one} for one in (splits["train"], aside))
    assert not kept & drawn, "their numbers"
    left_out = 80 - 10 - len(splits["train"])
    assert notes == [
        f"10 training pairs are set aside as a test set, and {left_out} left out that share a side with one of them"
    ]
