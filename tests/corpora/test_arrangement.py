"""Splits arranged anew: halves, pairs set aside, and noise; and what the manifest says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attn_reg_plugin.corpora.arrangement import Arrangement, Split
from attn_reg_plugin.corpora.parallel import Pair
from attn_reg_plugin.corpora.preparation import prepare
from attn_reg_plugin.corpora.sources import FolderSource
from tests.corpora.small_corpus import lines, wanted


def split(name: str, pairs: list[tuple[str, str]]) -> Split:
    rows = [Pair(line, *pair) for line, pair in enumerate(pairs, start=1)]
    return Split(name, name, (f"{name}.en", f"{name}.ro"), lambda: iter(rows))


def arranged(train: list[tuple[str, str]], **how: Any) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The pairs of each split, and the notes."""
    parts = [split(name, [(f"{name} {n}", f"{name} {n} ro") for n in range(6)]) for name in ("valid", "test")]
    splits, notes = Arrangement(**how).of(split("train", train), parts[0], parts[1:])
    return {one.name: [(pair.source, pair.target) for pair in one.pairs()] for one in splits}, notes


TRAIN = [(f"en {n}", f"ro {n}") for n in range(40)]


def test_by_default_nothing_changes() -> None:
    splits, notes = arranged(TRAIN)
    assert {name: len(pairs) for name, pairs in splits.items()} == {"train": 40, "valid": 6, "test": 6}
    assert notes == [] and splits["train"] == TRAIN and Arrangement().describe() == {}


def test_the_validation_set_is_split_beside_a_test_set() -> None:
    splits, notes = arranged(TRAIN, split_valid=True)
    assert list(splits) == ["train", "valid", "test", "test1"]
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
    twins = [(source.upper() + "!", "else " + target) for source, target in TRAIN]
    splits, notes = arranged([*TRAIN, *twins], set_aside=10)
    aside = splits["test1"]
    assert len(aside) == 10 and len(splits["train"]) < 70
    assert not {source.strip("!").lower() for source, _ in aside} & {s.strip("!").lower() for s, _ in splits["train"]}
    left_out = 80 - 10 - len(splits["train"])
    assert notes == [
        f"10 training pairs are set aside as a test set, and {left_out} left out that share a side with one of them"
    ]


@pytest.mark.usefixtures("ran")
def test_everything_at_once_in_the_manifest_and_in_the_files(source: Path, tmp_path: Path) -> None:
    """Of a folder: set aside first, then exchanged."""
    plain = FolderSource(source, ("en", "ro")).describe()
    assert list(plain) == ["kind", "files"]
    how = {"set_aside": 20, "noise": 0.5, "seed": 3, "split_valid": True}
    manifest = prepare(wanted(source, tmp_path / "out", **how))
    assert manifest["request"]["source"] == {**plain, **how}
    assert manifest["names"] == {
        **{"train": "train", "valid": "newsdev2016a", "test": "newsdev2016b"},
        **{"test1": "newstest2016", "test2": "newstest2017", "test3": "set-aside"},
    }
    pairs = list(zip(*(lines(tmp_path / "out/raw" / f"train.{language}") for language in ("en", "ro")), strict=True))
    original = dict(zip(*(lines(source / f"train.{language}") for language in ("en", "ro")), strict=True))
    wrong = sum(original[english].replace("ş", "ș") != romanian for english, romanian in pairs)
    assert json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))["notes"] == manifest["notes"]
    assert (
        manifest["notes"][2].startswith(f"{round(0.5 * len(pairs))} of {len(pairs)} training targets")
        and 0 < wrong <= len(pairs) / 2
    )
    with pytest.raises(ValueError, match="source"):
        prepare(wanted(source, tmp_path / "out"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"set_aside": 40}, r"--set-aside 40 leaves none of the 40 pairs of train\.en"),
        ({"noise": 0.01}, r"--noise 0\.01 exchanges 0 of the 40 targets of train\.ro, but must exchange at least 2"),
        ({"noise": 0.03}, "exchanges 1 of the 40 targets"),
    ],
)
def test_refusals(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        arranged(TRAIN, **how)
