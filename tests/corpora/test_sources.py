"""Readers of parallel text, sources of splits and the Romanian rules."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest

from attn_reg_plugin.corpora.parallel import RULES, Pair, normalize, read_pairs
from attn_reg_plugin.corpora.preparation import _progress
from attn_reg_plugin.corpora.sources import FolderSource, HubSource, Split
from attn_reg_plugin.files import read_lines

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


def texts(split: Split) -> list[str]:
    return [pair.source for pair in split.pairs()]


def test_lines_are_the_same_plain_and_gzipped(tmp_path: Path) -> None:
    content = b"unu\ndoi\n\ntrei"
    (tmp_path / "a").write_bytes(content)
    with gzip.open(tmp_path / "b.gz", "wb") as file:
        file.write(content)
    assert list(read_lines(tmp_path / "a")) == ["unu", "doi", "", "trei"]
    assert list(read_lines(tmp_path / "b.gz")) == ["unu", "doi", "", "trei"]


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffa\u2028b\rc\r\nd\x85e\x0bf\n".encode())
    lines = list(read_lines(tmp_path / "a"))
    assert lines == ["a b c", "d e f"]
    assert all(len(line.splitlines()) == 1 for line in lines)


def test_pairs_are_numbered_from_one(tmp_path: Path) -> None:
    left, right = write(tmp_path / "l", "a", "b"), write(tmp_path / "r", "c", "d")
    assert list(read_pairs(left, right)) == [Pair(1, "a", "c"), Pair(2, "b", "d")]


def test_cedilla_becomes_comma_below() -> None:
    assert normalize("şi ţară Şi Ţară s\u0327i t\u0327ară", "cedilla") == "și țară Și Țară și țară"
    assert normalize("Çeşme façade", "cedilla") == "Çeșme façade"
    assert normalize("şi", "none") == "şi"


def test_no_diacritics_strips_the_romanian_letters_only() -> None:
    assert normalize("Şcoală în țară, pâine, Ă Â Î Ș Ț", "no-diacritics") == "Scoala in tara, paine, A A I S T"
    assert normalize("a\u0306 a\u0302 i\u0302 s\u0326 t\u0326", "no-diacritics") == "a a i s t"
    assert normalize("café über naïve", "no-diacritics") == "café über naïve"


@pytest.mark.parametrize("rule", RULES)
def test_a_romanian_rule_applied_twice_is_applied_once(rule: str) -> None:
    once = normalize("Ţară şi s\u0327coală, a\u0306sta în", rule)
    assert normalize(once, rule) == once


def test_test_sets_are_named_in_order(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "c", train=3, newsdev2016=2, newstest2018=1, newstest2016=1)
    splits, notes = FolderSource(folder, LANGUAGES).splits()
    assert [(split.name, split.title) for split in splits] == [
        ("train", "train"),
        ("valid", "newsdev2016"),
        ("test", "newstest2016"),
        ("test1", "newstest2018"),
    ]
    assert texts(splits[3]) == ["newstest2018 en 1"]
    assert notes == []


@pytest.mark.parametrize("valid", ["valid", "dev"])
def test_other_names_of_valid_and_test(tmp_path: Path, valid: str) -> None:
    folder = write_folder(tmp_path / "c", train=3, test=1, **{valid: 2})
    splits, _ = FolderSource(folder, LANGUAGES).splits()
    assert [split.title for split in splits] == ["train", valid, "test"]


def test_without_a_test_set_newsdev_is_split_in_halves(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "c", train=1, newsdev2016=5)
    splits, notes = FolderSource(folder, LANGUAGES).splits()
    assert [split.title for split in splits[1:]] == ["newsdev2016a", "newsdev2016b"]
    assert texts(splits[1]) == ["newsdev2016 en 1", "newsdev2016 en 2"]
    assert [pair.line for pair in splits[2].pairs()] == [3, 4, 5]
    assert "lines 1 to 2 are valid (newsdev2016a), lines 3 to 5 are test (newsdev2016b)" in notes[0]


def test_the_other_direction_reads_the_same_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "c", train=1, newsdev2016=2)
    splits, _ = FolderSource(folder, ("ro", "en")).splits()
    assert list(splits[0].pairs()) == [Pair(1, "train ro 1", "train en 1")]


def test_limit_reads_the_first_training_pairs_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "c", train=5, newsdev2016=4)
    splits, _ = FolderSource(folder, LANGUAGES, limit=2).splits()
    assert texts(splits[0]) == ["train en 1", "train en 2"]
    assert len(texts(splits[1])) == 2


def test_origin_keeps_the_lines_of_some_corpora(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "c", train=5, newsdev2016=2)
    write(folder / "train.origin", "x", "y", "x", "z", "x")
    splits, _ = FolderSource(folder, LANGUAGES, limit=3, origins=["x", "z"]).splits()
    assert [pair.line for pair in splits[0].pairs()] == [1, 3, 4]
    with pytest.raises(ValueError, match=r"--origin 'w': .*train\.origin has only x, y, z"):
        FolderSource(folder, LANGUAGES, origins=["w", "x"])


def test_a_folder_describes_its_files_without_their_place(tmp_path: Path) -> None:
    first = FolderSource(write_folder(tmp_path / "a", train=2, newsdev2016=2), LANGUAGES)
    second = FolderSource(write_folder(tmp_path / "b", train=2, newsdev2016=2), LANGUAGES)
    assert first.describe() == second.describe()
    write(tmp_path / "b" / "train.ro", "changed", "too")
    assert first.describe() != second.describe()
    assert str(tmp_path) not in str(first.describe())


def hub_rows(count: int) -> list[dict[str, dict[str, str]]]:
    return [{"translation": {"en": f"en {n}", "ro": f"ro\n{n}"}} for n in range(count)]


def fake_hub(**splits: int) -> tuple[list[tuple], object]:
    calls: list[tuple] = []

    def load_dataset(*arguments: object, **options: object) -> datasets.IterableDatasetDict:
        calls.append((arguments, options))
        made = {name: datasets.Dataset.from_list(hub_rows(count)) for name, count in splits.items()}
        return datasets.IterableDatasetDict({name: dataset.to_iterable_dataset() for name, dataset in made.items()})

    return calls, load_dataset


def test_the_hub_is_streamed_and_asked_for_the_right_configuration(tmp_path: Path) -> None:
    calls, load_dataset = fake_hub(train=5, validation=2, test=3)
    splits, notes = HubSource(("ro", "en"), 4, load_dataset).splits()
    assert calls == [(("wmt/wmt16", "ro-en"), {"streaming": True})]
    assert [(s.name, s.title, len(texts(s))) for s in splits] == [
        ("train", "train", 4),
        ("valid", "newsdev2016", 2),
        ("test", "newstest2016", 3),
    ]
    assert next(splits[0].pairs()) == Pair(1, "ro 0", "en 0")
    assert notes == []
    assert HubSource(("en", "tr")).configuration == "tr-en"


def broken_rows() -> Iterator[dict]:
    yield from hub_rows(1)
    raise OSError("cut off")


def offline() -> None:
    raise ConnectionError("no network\nlong trace")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (offline, r"\(ConnectionError: no network\): give --source a folder"),
        (lambda: {"train": broken_rows(), "validation": [], "test": []}, "OSError: cut off"),
        (
            lambda: {"train": [*hub_rows(1), {"translation": {"en": "a"}}], "validation": [], "test": []},
            r"ro-en train, row 2: no 'translation' with 'en' and 'ro'",
        ),
        (lambda: {"train": []}, "has no split 'validation'; it has: train"),
    ],
)
def test_a_hub_that_fails_is_one_sentence(data: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(HubSource(LANGUAGES, None, lambda *_, **__: data()).splits()[0][0].pairs())


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_is_for_terminals_and_never_changes_the_items(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    assert list(_progress(iter(range(3)), "counting")) == [0, 1, 2]
    assert ("counting" in capsys.readouterr().err) == terminal
