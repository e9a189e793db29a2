"""`attn-reg prepare` from the command line to fairseq's binaries."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from attn_reg_plugin.cli import main
from attn_reg_plugin.corpora import preparation
from attn_reg_plugin.corpora.options import PhrasebookOptions
from attn_reg_plugin.corpora.pieces import PieceModel
from attn_reg_plugin.corpora.preparation import prepare
from attn_reg_plugin.dictionaries import count_sequences
from attn_reg_plugin.files import sha256
from tests.corpora.small_corpus import corpus, lines, wanted, write_corpus, write_split

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "wmt16-en-ro"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole preparation by the command, with the real fairseq; the folder has a comma in its name."""
    folder = tmp_path_factory.mktemp("whole")
    train = [*corpus(160, 1), ("", "gol"), ("the " * 300, "un " * 300), ("the", "un mic " * 20)]
    source = write_corpus(folder / "corpus", train)
    plain = source / "train.ro"
    (source / "train.ro.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    options = ["--vocab-size", "70", "--max-ratio", "5", "--workers", "2"]
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
                assert model.decode(symbols) == expected
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
    assert train == counts | {"title": "train", "unknown": 0}
    assert titles == {"train": "train", "valid": "newsdev2016", "test": "newstest2016", "test1": "newstest2017"}
    assert set(manifest["versions"]) >= {"sentencepiece"}
    source, outputs = prepared.parent / "corpus", manifest["files"]
    assert manifest["request"]["source"] == {p.name: sha256(p) for p in source.iterdir()}
    there = {p.relative_to(prepared).as_posix() for p in prepared.rglob("*") if p.is_file()}
    assert set(outputs) == there - {"manifest.json"}
    assert all(sha256(prepared / name) == digest for name, digest in outputs.items())
    assert "bin/preprocess.log" not in there  # fairseq's log has times and paths
    assert str(prepared.parent) not in text


@pytest.mark.usefixtures("quick")
def test_long_pairs_are_left_out_or_cut_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the training set alone; what is cut is the beginning of the same pieces."""
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
def test_the_same_request_gives_the_same_manifest_anywhere(tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(wanted(write_corpus(tmp_path / name), tmp_path / f"{name}-out"))
    assert (tmp_path / "one-out/manifest.json").read_bytes() == (tmp_path / "two-out/manifest.json").read_bytes()


@pytest.mark.parametrize("languages", [("en", "fr"), ("pt_BR", "zh")])
def test_any_two_languages_from_files_of_ones_own(tmp_path: Path, languages: tuple[str, str]) -> None:
    """`train`, `valid`, `test` and further test sets; then fairseq's own binaries."""
    for name, count in {"train": 160, "valid": 9, "test": 8, "test1": 7, "test10": 5, "test2": 6}.items():
        write_split(tmp_path / "mine", name, corpus(count, count), languages)
    pair = "-".join(languages)
    words = ["--pair", pair, "--source", str(tmp_path / "mine"), "--out", str(tmp_path / "out"), "--vocab-size", "70"]
    assert main(["prepare", "text", *words]) == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))
    titles = {name: split["title"] for name, split in manifest["splits"].items()}
    assert titles == {**{name: name for name in ("train", "valid", "test", "test1", "test2")}, "test3": "test10"}
    assert manifest["request"]["romanian"] == "none" and manifest["request"]["corpus"] == "text"
    for language in languages:
        counts = [
            count_sequences(tmp_path / "out/bin" / f"{split}.{pair}.{language}.idx")
            for split in ("train", "valid", "test3")
        ]
        assert counts == [160, 9, 5]
        assert lines(tmp_path / "out/raw" / f"train.{language}") == lines(tmp_path / "mine" / f"train.{language}")


@pytest.mark.usefixtures("quick")
def test_models_are_reused_joint_and_separate(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "c")
    prepare(wanted(source, tmp_path / "two", spm="separate", vocab_size=40))
    models = tuple(tmp_path / "two" / f"spm.{language}.model" for language in ("en", "ro"))
    assert {p.name for p in (tmp_path / "two").glob("dict*")} == {"dict.en.txt", "dict.ro.txt"}
    assert prepare(wanted(source, tmp_path / "again", spm_model=models))["request"]["spm"] == "separate"
    for name in ("spm.en.model", "pieces/test1.ro"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    prepare(wanted(source, tmp_path / "one"))
    joint = {"spm_model": (tmp_path / "one/spm.model",), "dictionary": (tmp_path / "one/dict.txt",)}
    assert not prepare(wanted(source, tmp_path / "third", **joint))["models"]["spm.model"]["trained"]


@pytest.mark.usefixtures("quick")
def test_the_hub_is_prepared_like_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": corpus(160, 1), "validation": corpus(12, 2), "test": corpus(9, 3)}

    def load_dataset(name: str, configuration: str, streaming: bool) -> datasets.IterableDatasetDict:
        assert (name, configuration, streaming) == ("wmt/wmt16", "ro-en", True)
        rows = {key: [{"translation": {"en": e, "ro": r}} for e, r in value] for key, value in splits.items()}
        return datasets.IterableDatasetDict(
            {key: datasets.Dataset.from_list(value).to_iterable_dataset() for key, value in rows.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert "source" not in prepare(wanted("hub", tmp_path / "hub"))["request"]
    prepare(wanted(write_corpus(tmp_path / "c"), tmp_path / "folder"))
    for name in ("spm.model", "raw/valid.ro", "pieces/train.en", "pieces/test.ro"):
        assert (tmp_path / "hub" / name).read_bytes() == (tmp_path / "folder" / name).read_bytes()


@pytest.mark.usefixtures("quick")
def test_a_phrasebook_with_noise(tmp_path: Path) -> None:
    """Only training targets are exchanged."""
    sizes = {"train": 100, "valid": 8, "test": 5, "seed": 7}
    manifests = {}
    for name, noise in (("clean", 0.0), ("noisy", 0.25)):
        options = PhrasebookOptions(pair="ro-en", out=tmp_path / name, **sizes, vocab_size=120, noise=noise)
        manifests[name] = prepare(options)
    assert manifests["noisy"]["request"] == manifests["clean"]["request"] | {"noise": 0.25}
    counts = {name: split["kept"] for name, split in manifests["noisy"]["splits"].items()}
    assert counts == {"train": 100, "valid": 8, "test": 5}
    files = {p.name for p in (tmp_path / "noisy").iterdir()}
    assert files == {"raw", "pieces", "bin", "spm.model", "dict.txt", "manifest.json"}
    for name in ("train.ro", "valid.en", "valid.ro", "test.en", "test.ro"):
        assert lines(tmp_path / "clean/raw" / name) == lines(tmp_path / "noisy/raw" / name)
    clean, noisy = (lines(tmp_path / name / "raw/train.en") for name in ("clean", "noisy"))
    assert sum(one != other for one, other in zip(clean, noisy, strict=True)) == 25
    assert sorted(clean) == sorted(noisy)


@pytest.mark.usefixtures("quick")
def test_the_real_phrasebook_with_the_default_vocabulary(tmp_path: Path) -> None:
    arguments = ["prepare", "phrasebook", "--pair", "en-tr", "--out", str(tmp_path / "out"), "--train", "1000"]
    assert main(arguments) == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))
    assert [manifest["splits"][name]["kept"] for name in ("train", "valid", "test")] == [1000, 500, 500]
    assert manifest["models"]["spm.model"]["dictionary_size"] == 800
    assert sum(split["unknown"] for split in manifest["splits"].values()) == 0


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


@pytest.mark.usefixtures("quick")
@pytest.mark.skipif(not REAL.is_dir(), reason="the real corpus is not beside the repository")
def test_two_thousand_real_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["wmt16", "--pair", "en-ro", "--source", REAL, "--out", tmp_path / "out", "--limit", 2000]
    assert main(["prepare", *map(str, arguments), "--vocab-size", "1000", "--origin", "ro-sts,tatoeba"]) == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))
    assert manifest["splits"]["train"]["read"] == 2000
    assert manifest["splits"]["valid"]["kept"] + manifest["splits"]["test"]["kept"] == 1999
    assert manifest["splits"]["train"]["unknown"] == 0
    assert manifest["splits"]["test"]["title"] == "newsdev2016b"
    assert "newsdev2016 is split" in capsys.readouterr().out


def test_a_fairseq_that_fails_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "fairseq_cli").mkdir()  # not what is run, although it lies in the folder worked in
    (tmp_path / "fairseq_cli" / "__init__.py").write_text("")
    (tmp_path / "fairseq_cli" / "preprocess.py").write_text("print('not fairseq')\n")
    with pytest.raises(ValueError, match=r"fairseq_cli\.preprocess failed with status \d+: .*dict"):
        preparation.preprocess(tmp_path, ("en", "ro"), ["test"], ("dict.txt", "dict.txt"))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("valid.en-ro.en.idx", lambda content: content[:-4], "valid.en-ro.en.idx is damaged"),
        ("valid.en-ro.en.idx", lambda content: b"TNTIDX" + content[6:], "valid.en-ro.en.idx is damaged"),
        ("valid.en-ro.en.idx", lambda content: b"", "valid.en-ro.en.idx is damaged"),
        ("valid.en-ro.en.bin", lambda content: content[:-2], "valid.en-ro.en.bin is damaged: it has "),
    ],
)
def test_damaged_binaries(
    name: str, damage: Callable[[bytes], bytes], said: str, prepared: Path, tmp_path: Path
) -> None:
    for path in (prepared / "bin").glob("valid*"):
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(damage(content) if path.name == name else content)
    assert count_sequences(prepared / "bin" / "valid.en-ro.en.idx") == 12
    with pytest.raises(ValueError, match=said):
        count_sequences(tmp_path / "valid.en-ro.en.idx")


@pytest.mark.usefixtures("quick")
def test_a_sequence_that_fairseq_lost_is_noticed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "count_sequences", lambda index: 159)
    with pytest.raises(ValueError, match=r"fairseq wrote 159 sequences to train\.en-ro\.en\.idx, but train has 160"):
        prepare(wanted(source, tmp_path / "out"))
