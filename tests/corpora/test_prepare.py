"""`attn-reg prepare` from the command line to fairseq's binaries."""

import gzip
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_reg_plugin.cli import main
from attn_reg_plugin.corpora import preparation
from attn_reg_plugin.corpora.options import PhrasebookOptions
from attn_reg_plugin.corpora.pieces import PieceModel
from attn_reg_plugin.corpora.preparation import prepare
from attn_reg_plugin.files import sha256
from attn_reg_plugin.tasks.attn_reg_translation import AttnRegTranslationConfig, AttnRegTranslationTask
from tests.corpora.small_corpus import corpus, lines, wanted, write_corpus, write_split


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole preparation by the command, with the real fairseq; the folder has a comma in its name."""
    folder = tmp_path_factory.mktemp("whole")
    train = [*corpus(160, 1), ("", "gol"), ("the " * 300, "un " * 300), ("the", "un mic " * 20)]
    source = write_corpus(folder / "corpus", train)
    plain = source / "train.ro"
    (source / "train.ro.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    options = ["--vocab-size", "70", "--workers", "2"]
    arguments = ["prepare", "wmt16", "--pair", "en-ro", "--source", str(source), "--out", str(folder / "o,ut")]
    assert main([*arguments, *options]) == 0
    return folder / "o,ut"


def test_the_binaries_load_and_decode_to_the_raw_text(prepared: Path) -> None:
    from fairseq.data import Dictionary, data_utils

    model = PieceModel(prepared / "spm.model")
    counts = {"train": 160, "valid": 12, "test": 9, "test1": 7}
    dictionaries = [(prepared / name).read_bytes() for name in ("dict.txt", "bin/dict.en.txt", "bin/dict.ro.txt")]
    assert len(set(dictionaries)) == 1
    for language in ("en", "ro"):
        dictionary = Dictionary.load(str(prepared / "bin" / f"dict.{language}.txt"))
        assert len(dictionary) == 70
        for split, count in counts.items():
            data = data_utils.load_indexed_dataset(str(prepared / "bin" / f"{split}.en-ro.{language}"), dictionary)
            assert len(data) == count
            raw = lines(prepared / "raw" / f"{split}.{language}")
            for index in range(count):
                symbols = dictionary.string(data[index]).split()
                assert dictionary.unk() not in data[index]
                expected = raw[index].replace("ş", "ș")
                assert model._processor.decode(symbols) == expected
                assert dictionary.string(data[index], "sentencepiece") == expected


def test_references_stay_as_published_while_the_training_text_is_normalized(prepared: Path) -> None:
    assert [line for line in lines(prepared / "raw" / "test.ro") if "ş" in line]
    assert lines(prepared / "raw" / "test.ro") == [pair[1] for pair in corpus(9, 3)]
    assert not [line for line in lines(prepared / "raw" / "train.ro") if "ş" in line]
    assert "ş" not in (prepared / "pieces" / "test.ro").read_text(encoding="utf-8")


def test_the_manifest_says_what_was_done(prepared: Path) -> None:
    text = (prepared / "manifest.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    train, titles = manifest["splits"]["train"], {name: split["title"] for name, split in manifest["splits"].items()}
    counts = {"read": 163, "kept": 160, "empty": 1, "no_pieces": 0, "too_long": 1, "ratio": 1, "truncated": 0}
    assert train == counts | {"title": "train", "unknown": 0, "letters": []}
    assert titles == {"train": "train", "valid": "newsdev2016", "test": "newstest2016", "test1": "newstest2017"}
    source, outputs = prepared.parent / "corpus", manifest["files"]
    assert manifest["request"]["source"] == {p.name: sha256(p) for p in source.iterdir()}
    there = {p.relative_to(prepared).as_posix() for p in prepared.rglob("*") if p.is_file()}
    assert set(outputs) == there - {"manifest.json"}
    assert all(sha256(prepared / name) == digest for name, digest in outputs.items())
    assert "bin/preprocess.log" not in there  # fairseq's log has times and paths
    assert str(prepared.parent) not in text


@pytest.mark.usefixtures("quick")
def test_long_pairs_are_left_out_or_cut_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the training set changes; a cut side is the beginning of the same pieces."""
    source, found = write_corpus(tmp_path / "c"), {}
    for long_pairs in ("drop", "truncate"):
        out = tmp_path / long_pairs
        data = prepare(wanted(source, out, max_pieces=10, long_pairs=long_pairs))
        whole = prepare(wanted(source, tmp_path / "whole"))["splits"]
        found[long_pairs] = data["splits"]["train"]
        assert data["splits"]["valid"] == whole["valid"] and data["splits"]["test"] == whole["test"]
        assert data["request"]["long_pairs"] == long_pairs
    cut, left = found["truncate"], found["drop"]
    assert (cut["kept"], cut["too_long"]) == (160, 0) and cut["truncated"] == left["too_long"] > 9
    assert f"train (train): 160 pairs, {cut['truncated']} truncated" in capsys.readouterr().out
    for language in ("en", "ro"):
        every = [line.split() for line in lines(tmp_path / "whole" / "pieces" / f"train.{language}")]
        assert [line.split() for line in lines(tmp_path / "truncate" / "pieces" / f"train.{language}")] == [
            pieces[:10] for pieces in every
        ]


@pytest.mark.usefixtures("quick")
def test_any_two_languages_from_files_of_ones_own(tmp_path: Path) -> None:
    """`train`, `valid`, `test` and further test sets."""
    for name, count in {"train": 160, "valid": 9, "test": 8, "test1": 7, "test10": 5, "test2": 6}.items():
        write_split(tmp_path / "mine", name, corpus(count, count), ("pt_BR", "zh"))
    words = ["--source", str(tmp_path / "mine"), "--out", str(tmp_path / "out"), "--vocab-size", "70"]
    assert main(["prepare", "text", "--pair", "pt_BR-zh", *words]) == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))
    titles = {name: split["title"] for name, split in manifest["splits"].items()}
    assert titles == {**{name: name for name in ("train", "valid", "test", "test1", "test2")}, "test3": "test10"}
    for language in ("pt_BR", "zh"):
        assert lines(tmp_path / "out/raw" / f"train.{language}") == lines(tmp_path / "mine" / f"train.{language}")


@pytest.mark.usefixtures("quick")
def test_models_are_reused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Letters that such a model does not know are named, with what comes of them in training."""
    prepare(wanted(source, tmp_path / "one"))
    reused = prepare(wanted(source, tmp_path / "again", spm_model=tmp_path / "one/spm.model"))["request"]["reused"]
    assert reused == [sha256(tmp_path / "one/spm.model")]
    for name in ("spm.model", "dict.txt", "pieces/test1.ro"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    other = write_corpus(tmp_path / "other", [*corpus(160, 1), ("the tree", "l’ om "), ("Ω", "un ’ Ω ’")])
    prepare(wanted(other, tmp_path / "unknown", spm_model=tmp_path / "one/spm.model"))
    assert "162 pairs, 5 unknown pieces (Ω ’; a model learns to write <unk> for them)" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_phrasebook_with_noise(tmp_path: Path) -> None:
    """Only training targets are exchanged."""
    sizes = {"train": 100, "valid": 8, "test": 5, "seed": 7}
    for name, noise in (("clean", 0.0), ("noisy", 0.25)):
        made = prepare(PhrasebookOptions(pair="ro-en", out=tmp_path / name, **sizes, vocab_size=120, noise=noise))
    assert {name: split["kept"] for name, split in made["splits"].items()} == {"train": 100, "valid": 8, "test": 5}
    assert made["notes"] == ["25 of 100 training targets are exchanged among each other"]
    for name in ("train.ro", "valid.en", "valid.ro", "test.en", "test.ro"):
        assert lines(tmp_path / "clean/raw" / name) == lines(tmp_path / "noisy/raw" / name)
    clean, noisy = (lines(tmp_path / name / "raw/train.en") for name in ("clean", "noisy"))
    assert sum(one != other for one, other in zip(clean, noisy, strict=True)) == 25
    assert sorted(clean) == sorted(noisy)


@pytest.mark.usefixtures("quick")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peaks = []
    for count in (1_600, 8_000):
        source = write_corpus(tmp_path / f"c{count}", corpus(160, 1) * (count // 160))
        tracemalloc.start()
        prepare(wanted(source, tmp_path / f"o{count}", vocab_size=60))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_fairseq_that_fails_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "fairseq_cli").mkdir()  # not what is run, although it lies in the folder worked in
    (tmp_path / "fairseq_cli" / "__init__.py").write_text("")
    (tmp_path / "fairseq_cli" / "preprocess.py").write_text("print('not fairseq')\n")
    with pytest.raises(ValueError, match=r"fairseq_cli\.preprocess failed with status \d+: .*dict"):
        preparation.preprocess(tmp_path, ("en", "ro"), ["test"], ("dict.txt", "dict.txt"))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("train.en-ro.en.idx", lambda content: content[:-4], "is damaged, or is not an index"),
        ("train.en-ro.ro.bin", lambda content: content[:-2], "is damaged: it has "),
        ("dict.ro.txt", lambda content: content.replace(b" 1", b"", 1), ", line 1: "),
        ("dict.ro.txt", lambda content: b"", "of other data: it has 4 symbols, but train.en-ro.ro.bin has number 69"),
    ],
)
def test_damaged_data_is_named(
    name: str, damage: Callable[[bytes], bytes], said: str, prepared: Path, tmp_path: Path
) -> None:
    """In the task that trains on it."""
    shutil.copytree(prepared / "bin", tmp_path / "bin")
    path = tmp_path / "bin" / name
    path.write_bytes(damage(path.read_bytes()))
    config = AttnRegTranslationConfig(data=str(tmp_path / "bin"), source_lang="en", target_lang="ro")
    with pytest.raises(ValueError) as caught:
        AttnRegTranslationTask.setup_task(config).load_dataset("train")
    assert str(caught.value).startswith(str(path)) and said in str(caught.value)
