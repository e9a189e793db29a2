"""`attn-reg prepare --opus-mt`: the corpus in the model's own pieces and dictionaries."""

import json
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.data_folder import DataFolder
from attn_reg_plugin.opus_mt.conversion import to_fairseq
from attn_reg_plugin.opus_mt.marian_folder import MarianFolder
from attn_reg_plugin.opus_mt.tokenization import OpusMTTokenizer
from tests.opus_mt.folders import load_tokenizer


@pytest.fixture(scope="module")
def source(phrases: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parallel files as WMT16's, with letters of the older Romanian spelling."""
    folder = tmp_path_factory.mktemp("source")
    for name, split in (("train", "train"), ("newsdev2016", "valid"), ("newstest2016", "test")):
        for language in ("en", "ro"):
            lines = [getattr(triple, language).replace("ș", "ş") for triple in phrases[split][:60]]
            (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def prepare(source: Path, out: Path, converted: Path, *words: str) -> int:
    common = ["prepare", "text", "--pair", "en-ro", "--source", str(source), "--out", str(out)]
    return main([*common, "--opus-mt", str(converted), *words])


@pytest.mark.parametrize("prefix", ["", ">>ron<<"])
def test_binaries_hold_the_numbers_of_the_tokenizer(
    prefix: str, marian: tuple, converted: Path, source: Path, tmp_path: Path
) -> None:
    out, theirs, ours = tmp_path / "data", marian[2], OpusMTTokenizer(converted)
    assert prepare(source, out, converted, *(["--source-prefix", prefix] if prefix else [])) == 0
    for split, name in (("train", "train"), ("valid", "newsdev2016"), ("test", "newstest2016")):
        for language, side in (("en", ours.source), ("ro", ours.target)):
            found = data_utils.load_indexed_dataset(str(out / "bin" / f"{split}.en-ro.{language}"), None, "mmap")
            lines = (source / f"{name}.{language}").read_text(encoding="utf-8").splitlines()
            assert len(found) == len(lines) == 60
            for row, line in zip(found, lines, strict=True):
                text = f"{prefix} {line}" if prefix and language == "en" else line
                expected = theirs(text)["input_ids"] if language == "en" else theirs(text_target=line)["input_ids"]
                assert [side.vocabulary.order[number - 1] for number in row.tolist()] == expected
    data = DataFolder.open(out)
    assert data.joint and data.references("test")[0] in (source / "newstest2016.ro").read_text(encoding="utf-8")
    dictionary = Dictionary.load(str(out / "bin" / "dict.ro.txt"))
    assert dictionary.symbols[4:] == ours.target.vocabulary.symbols
    assert load_tokenizer(out / "opus_mt").get_vocab() == theirs.get_vocab()
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["request"]["source_prefix"] == prefix and next(iter(manifest["models"])) == "opus_mt/source.spm"
    assert str(converted) not in json.dumps(manifest)


def test_separate_vocabularies(separate: tuple, source: Path, tmp_path: Path) -> None:
    to_fairseq(MarianFolder.open(separate[1]), tmp_path / "converted")
    assert prepare(source, tmp_path / "data", tmp_path / "converted") == 0
    data = DataFolder.open(tmp_path / "data")
    assert not data.joint and OpusMTTokenizer(tmp_path / "data" / "opus_mt").separate


def test_the_other_direction_is_refused(
    converted: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(source, tmp_path / "data", converted, "--pair", "ro-en") == 2
    assert "translates from en to ro, not ro-en" in capsys.readouterr().err and not (tmp_path / "data").exists()
