"""Pieces and numbers are `MarianTokenizer`'s, and so is the text that is made of them."""

import json
import random
from argparse import Namespace
from pathlib import Path

import pytest
from fairseq.data import Dictionary
from fairseq.data.encoders import build_bpe

from attn_reg_plugin.models.opus_mt import OpusMTBPE
from attn_reg_plugin.opus_mt.tokenization import OpusMTTokenizer, Vocabulary, write_dictionaries
from tests.opus_mt.folders import copy, edit, load_tokenizer, train_model, write_tokenizer

ODD = [
    *("", " ", "a", ".", "▁", "▁▁ ▁a", "☃", "😀", "\N{WOMAN}\u200d\N{WOMAN} 😀😀", "e\u0301 ê é", "ﬁ ① Ａ", "\u200b"),
    *("a\tb", "a\rb", "\x00", "a\x00b", "\x01\x02\x1f", "a\u2028b\u2029c", "a\x85b", "\x7f", "\ud7ff\ue000", "中文"),
    *("</s>", "<unk>", "<pad>", "a</s>b", "a <pad> b</s></s>", "<s>", "a <s> b", "</s", "<piece:3>", "<<unk>>", "ß ẞ"),
    *(">>ron<< hello", ">>ron<<hello", " >>ron<< hello", "hello >>ron<<", ">>xyz<< hello", ">>", ">><<", ">> <<"),
    *(">>ron<<", ">>ron<", ">>ron<< >>tur<< a", "a</s>>>ron<< b", "a" * 3000, "the house " * 2000, "\u0301"),
    *("\ufeffa", "a\u00a0b"),
]


class Both:
    """Hugging Face's tokenizer of a folder and ours, with fairseq's dictionaries."""

    def __init__(self, folder: Path) -> None:
        self.theirs, self.ours = load_tokenizer(folder), OpusMTTokenizer(folder)
        paths = [folder / "source.dict", folder / "target.dict"]
        write_dictionaries(self.ours, paths)
        self.dictionaries = [Dictionary.load(str(path)) for path in paths]

    def numbers(self, text: str, side: int) -> list[int]:
        """Marian's numbers, by way of fairseq's."""
        encoder = (self.ours.source, self.ours.target)[side]
        line = " ".join(encoder.encode(text))
        found = self.dictionaries[side].encode_line(line, add_if_not_exist=False)
        return [encoder.vocabulary.order[number - 1] for number in found.tolist()]

    def differing(self, texts: list[str], sides: tuple[int, ...] = (0, 1)) -> list[tuple[int, str]]:
        """The side and the beginning of each text to which the two give other numbers; as a source and a target."""
        theirs = (lambda text: self.theirs(text), lambda text: self.theirs(text_target=text))
        return [
            (side, text[:80])
            for text in texts
            for side in sides
            if self.numbers(text, side) != theirs[side](text)["input_ids"]
        ]


def changed(folder: Path, destination: Path, **config: object) -> Path:
    """A copy of a folder with other settings of the tokenizer."""
    edit(copy(folder, destination) / "tokenizer_config.json", **config)
    return destination


@pytest.fixture(scope="module", params=["shared", "separate"])
def both(request: pytest.FixtureRequest, marian: tuple, separate: tuple, tmp_path_factory) -> Both:
    return Both((marian if request.param == "shared" else separate)[1])


def test_sentences_of_the_phrasebook(both: Both, phrases: dict) -> None:
    assert both.differing([triple.en for triple in phrases["train"]], sides=(0,)) == []
    assert both.differing([text for triple in phrases["train"][:500] for text in (triple.ro, triple.tr)]) == []


def test_odd_lines(both: Both) -> None:
    assert both.differing(ODD) == []
    assert both.numbers("", 0) == [0] and both.numbers("\x01", 0) == [0]


def test_odd_lines_with_a_model_that_changes_nothing(tmp_path: Path, phrases: dict) -> None:
    """Control characters and white space reach the vocabulary; some have a piece of their own there."""
    lines = [triple.en for triple in phrases["train"]] + [f"a{odd}b" for odd in ("\u00a0", "\u2009", "\x85", "☃")] * 30
    options = {"normalization_rule_name": "identity", "character_coverage": 1.0, "remove_extra_whitespaces": False}
    model = train_model(lines, tmp_path / "spm", 260, **options)
    write_tokenizer(tmp_path / "hf", model, model, codes=[">>ron<<", "<s>", "a b", "<piece:5>", "\u3000", ""])
    made = Both(tmp_path / "hf")
    assert any(symbol.startswith("<piece:") for symbol in made.dictionaries[0].symbols)
    assert made.differing([*ODD, "a\u00a0b", "a\u2009\u2009b", "a\x85b"]) == []
    vocabulary = made.ours.source.vocabulary
    for number in vocabulary.ids.values():
        symbol = vocabulary.symbol_of[number]
        assert vocabulary.number_of[symbol] == number
        assert made.dictionaries[0].index(symbol) == vocabulary.order.index(number) + 1


def test_a_byte_fallback_model(tmp_path: Path, phrases: dict) -> None:
    model = train_model((t.en for t in phrases["train"]), tmp_path / "spm", 560, byte_fallback=True)
    write_tokenizer(tmp_path / "hf", model, model)
    made = Both(tmp_path / "hf")
    assert made.differing(ODD) == []
    text = "the 😀 house"
    assert made.ours.decode(made.ours.source.encode(text)) == text


@pytest.mark.parametrize("clean", [False, True])
def test_text_is_made_as_theirs_is(both: Both, clean: bool, tmp_path: Path) -> None:
    folder = changed(Path(both.theirs.name_or_path), tmp_path / "hf", clean_up_tokenization_spaces=clean)
    made, draw = Both(folder), random.Random(4)
    vocabulary = made.ours.target.vocabulary
    for _ in range(300):
        ids = [draw.randrange(len(vocabulary.order)) for _ in range(draw.randint(0, 12))]
        line = made.dictionaries[1].string([vocabulary.order.index(number) + 1 for number in ids])
        assert made.ours.decode(line.split(" ")) == made.theirs.decode(ids, skip_special_tokens=True)
    symbols = made.ours.target.encode("Nu , da . n't ?")
    assert ("Nu, da." in made.ours.decode(symbols)) == clean


def test_the_bpe_of_fairseq(marian: tuple, phrases: dict) -> None:
    bpe = build_bpe(Namespace(bpe="opus_mt", opus_mt_folder=str(marian[1])))
    assert isinstance(bpe, OpusMTBPE)
    for triple in phrases["train"][:50]:
        assert bpe.decode(bpe.encode(triple.en)) == triple.en
    assert bpe.encode("") == "" and bpe.decode("") == "" and bpe.decode("<unk>") == ""


def test_a_prefix_comes_first(marian: tuple) -> None:
    folder = marian[1]
    plain, prefixed = OpusMTTokenizer(folder), OpusMTTokenizer(folder, ">>ron<<")
    assert prefixed.source.encode("the house") == [">>ron<<", *plain.source.encode("the house")]
    assert prefixed.target.encode("casa") == plain.target.encode("casa")
    with pytest.raises(ValueError, match=r"prefix '>>deu<<' is not in .*vocab\.json, which has >>ron<<, >>tur<<$"):
        OpusMTTokenizer(folder, ">>deu<<")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"tokenizer_class": "T5Tokenizer"}, r"tokenizer_config\.json is of a T5Tokenizer, not of a MarianTokenizer"),
        (
            {"additional_special_tokens": ["<eop>"]},
            "adds the token '<eop>' to its tokenizer, which has none in fairseq",
        ),
        ({"eos_token": "<end>"}, r"vocab\.json lacks '<end>', the eos_token"),
        ({"separate_vocabs": True}, r"has no target_vocab\.json"),
    ],
)
def test_settings_that_cannot_be_followed(config: dict, sentence: str, marian: tuple, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        OpusMTTokenizer(changed(marian[1], tmp_path / "hf", **config))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"</s>": 0, "<unk>": 1, "a": 3, "<pad>": 4}, "has 4 pieces, whose numbers must be 0 to 3, each once"),
        ({"</s>": 0, "a": 1}, "lacks '<pad>', the pad_token"),
    ],
)
def test_vocabularies_that_cannot_be_used(content: object, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(content), encoding="utf-8")
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    with pytest.raises(ValueError, match=sentence):
        Vocabulary(tmp_path / "vocab.json", special)
