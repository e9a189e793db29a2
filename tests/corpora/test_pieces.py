"""Sentencepiece models, their dictionaries, and what is refused."""

import random
from pathlib import Path

import pytest
from fairseq.data import Dictionary
from sentencepiece import SentencePieceTrainer

from attn_reg_plugin import dictionaries
from attn_reg_plugin.corpora import pieces
from attn_reg_plugin.corpora.pieces import PieceModel


def sentences(count: int = 300) -> list[str]:
    draw = random.Random(3)
    words = [a + b for a in ("ri", "ho", "wa", "blu", "gre", "ci", "old") for b in ("ver", "use", "lks", "nty")]
    words += ["<pad>", "<s>", "<b>", "pop", "țară", "şi", "the", "a"]
    return [" ".join(draw.choices(words, k=draw.randint(2, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "spm.model"
    pieces.train_model(iter(sentences()), path, 50)
    return path


def test_a_model_numbers_its_pieces_as_its_dictionary_does(model_path: Path, tmp_path: Path) -> None:
    model = PieceModel(model_path)
    dictionaries.write_dictionary(model.symbols, tmp_path / "dict.txt")
    dictionary = [*dictionaries.SPECIAL, *dictionaries.read_dictionary(tmp_path / "dict.txt")]
    assert len(dictionary) == 50
    assert dictionary == [model._processor.id_to_piece(index) for index in range(50)]


def test_what_the_model_does_not_know_is_unk(model_path: Path) -> None:
    assert PieceModel(model_path).encode("the ☃").count(dictionaries.UNKNOWN) == 1
    assert PieceModel(model_path).encode("\u200b") == []


@pytest.mark.parametrize("symbol", ["<pad>", "two words"])
def test_a_model_with_a_piece_no_dictionary_can_hold_is_refused(tmp_path: Path, symbol: str) -> None:
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()),
        model_prefix=str(tmp_path / "odd"),
        vocab_size=50,
        user_defined_symbols=[symbol],
        minloglevel=2,
    )
    with pytest.raises(ValueError, match=f"'{symbol}', cannot be in a fairseq dictionary"):
        PieceModel(tmp_path / "odd.model")


def test_vocabularies_that_do_not_suit_the_text_are_refused(tmp_path: Path) -> None:
    for size, said in (
        (5000, r"too high \(5000\)\. .* a value <= \d+"),
        (10, r"smaller than required_chars\. 10 vs \d+"),
    ):
        with pytest.raises(ValueError, match=f"--vocab-size {size}: Vocabulary size .*{said}"):
            pieces.train_model(iter(sentences()), tmp_path / "m", size)
    with pytest.raises(ValueError, match=r"could not train a model, --vocab-size 10: .*sentences"):
        pieces.train_model(iter([]), tmp_path / "m", 10)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a 1\nb\n", "line 2: 'b' is not '<symbol> <count>'"),
        (b"a x\n", "line 1: 'a x' is not"),
        (b"a 1\nb 1\na 2\n", "line 3: 'a' a second time"),
        (b"<pad> 1\n", "line 1: '<pad>' a second time, or one of fairseq's own"),
        (b"\xff 1\n", "dict.txt is not UTF-8 text"),
    ],
)
def test_dictionaries_that_fairseq_would_not_read(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        dictionaries.read_dictionary(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
    with pytest.raises(Exception):  # noqa: B017  fairseq has several of its own
        Dictionary.load(str(path))


def test_dictionaries_that_fairseq_reads(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("a 1\nb c 2\nd 3 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\na 2 #fairseq:overwrite\n\ufeffx 1")
    assert Dictionary.load(str(path)).symbols[4:] == dictionaries.read_dictionary(path)
    path.write_text("")
    assert dictionaries.read_dictionary(path) == [] and len(Dictionary.load(str(path))) == 4
