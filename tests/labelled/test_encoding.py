"""Encoding with the model's tokenizer: pairs, truncation, words and their first pieces, choices."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, RobertaTokenizer

from attn_reg_plugin.labelled import (
    ChoiceExample,
    TaggedSentence,
    TextExample,
    encode,
    find_task,
    load_tokenizer,
    longest_input,
)
from tests.labelled.tokenizers import PIECES, bert_tokenizer

CLS, SEP, UNK = 2, 3, 1
WORD = {piece: number for number, piece in enumerate(PIECES)}
RTE, COLA, WNUT, SWAG, STSB = (find_task(name) for name in ("rte", "cola", "wnut17", "swag", "stsb"))


def pieces(row: np.ndarray) -> str:
    return " ".join(PIECES[number] for number in row)


def test_a_text_and_a_pair() -> None:
    (one,) = encode([TextExample(1, "The cat sleeps.", None, 1)], COLA, bert_tokenizer(), 16)
    assert pieces(one.input_ids) == "[CLS] the cat sleep ##s . [SEP]" and one.label == 1
    assert one.input_ids.dtype == np.int32 and one.token_type_ids.tolist() == [0] * 7
    (pair,) = encode([TextExample(1, "a cat", "a dog sleeps", 0)], RTE, bert_tokenizer(), 16)
    assert pieces(pair.input_ids) == "[CLS] a cat [SEP] a dog sleep ##s [SEP]"
    assert pair.token_type_ids.tolist() == [0] * 4 + [1] * 5


@pytest.mark.parametrize("count", [3, 2300])
def test_truncation_is_said_once_for_the_whole_set(count: int, caplog: pytest.LogCaptureFixture) -> None:
    examples = [TextExample(line, "a cat " * (9 if line % 3 == 0 else 1), "a dog", 0) for line in range(count)]
    with caplog.at_level(logging.WARNING):
        rows = encode(examples, RTE, bert_tokenizer(), 8, "rte train")
    cut = (count + 2) // 3
    assert caplog.messages == [f"rte train: {cut} of {count} examples were truncated at 8 tokens"]
    # of a pair, the longer text loses its end
    assert pieces(rows[0].input_ids) == "[CLS] a cat a [SEP] a dog [SEP]"
    assert max(len(row.input_ids) for row in rows) == 8


def test_labels_stand_at_the_first_piece_of_each_word() -> None:
    sentence = TaggedSentence(1, ("unwanted", "cat", "sleeping", "."), (5, 6, 7, 8))
    (row,) = encode([sentence], WNUT, bert_tokenizer(), 16)
    assert pieces(row.input_ids) == "[CLS] un ##want ##ed cat sleep ##ing . [SEP]"
    assert row.label.tolist() == [-100, 5, -100, -100, 6, 7, -100, 8, -100]


def test_a_word_that_tokenizes_to_nothing_becomes_an_unknown_one() -> None:
    """Two of them in a row, at the start and at the end."""
    sentence = TaggedSentence(1, ("\x01", "cat", "\x02", "\u200b", "dog", "\x03"), (1, 2, 3, 4, 5, 6))
    (row,) = encode([sentence], WNUT, bert_tokenizer(), 16)
    assert row.input_ids.tolist() == [CLS, UNK, WORD["cat"], UNK, UNK, WORD["dog"], UNK, SEP]
    assert row.label.tolist() == [-100, 1, 2, 3, 4, 5, 6, -100]


def test_truncated_words_lose_their_labels_and_are_not_taken_for_empty(caplog: pytest.LogCaptureFixture) -> None:
    sentences = [TaggedSentence(1, ("\x01", *["cat"] * 9), tuple(range(10))), TaggedSentence(2, ("dog",), (3,))]
    with caplog.at_level(logging.WARNING):
        long, short = encode(sentences, WNUT, bert_tokenizer(), 6)
    assert long.input_ids.tolist() == [CLS, UNK, *[WORD["cat"]] * 3, SEP]
    assert long.label.tolist() == [-100, 0, 1, 2, 3, -100]
    assert short.label.tolist() == [-100, 3, -100]
    assert caplog.messages == ["wnut17: 1 of 2 examples were truncated at 6 tokens"]


def test_choices_stand_with_the_beginning() -> None:
    examples = [ChoiceExample(1, "the cat", ("sleeps", "a"), 1), ChoiceExample(2, "a", ("runs.", "dog"), 0)]
    first, second = encode(examples, SWAG, bert_tokenizer(), 16)
    assert [pieces(ids) for ids in first.input_ids] == [
        "[CLS] the cat [SEP] sleep ##s [SEP]",
        "[CLS] the cat [SEP] a [SEP]",
    ]
    assert [types.tolist() for types in first.token_type_ids] == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert [pieces(ids) for ids in second.input_ids] == ["[CLS] a [SEP] runs . [SEP]", "[CLS] a [SEP] dog [SEP]"]
    assert (first.label, second.label) == (1, 0)


def test_a_slow_tokenizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimpleNamespace(is_fast=False)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **options: slow)
    with pytest.raises(ValueError, match="mine has SimpleNamespace, a slow tokenizer; a fast one is needed"):
        load_tokenizer("mine", COLA)


@pytest.fixture
def roberta(tmp_path: Path) -> Path:
    """A byte-level tokenizer, saved; `Ġ` is the space before a word."""
    letters = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefgh", "Ġ", "Ġa", "Ġb"]
    vocabulary = {piece: number for number, piece in enumerate(letters)}
    RobertaTokenizer(vocab=vocabulary, merges=[("Ġ", "a"), ("Ġ", "b")]).save_pretrained(tmp_path)
    return tmp_path


def test_a_byte_level_tokenizer_puts_a_space_before_every_word_of_a_tagged_sentence(roberta: Path) -> None:
    sentence = TaggedSentence(1, ("a", "bc"), (1, 2))
    tokenizer = load_tokenizer(str(roberta), WNUT)
    (row,) = encode([sentence], WNUT, tokenizer, 16)
    assert tokenizer.convert_ids_to_tokens(row.input_ids) == ["<s>", "Ġa", "Ġb", "c", "</s>"]
    assert row.label.tolist() == [-100, 1, 2, -100, -100] and row.token_type_ids is None
    plain = load_tokenizer(str(roberta), COLA)
    assert plain.convert_ids_to_tokens(plain("a")["input_ids"]) == ["<s>", "a", "</s>"]


def test_so_does_one_that_splits_in_several_steps(tmp_path: Path) -> None:
    steps = [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer = Tokenizer(models.BPE({"?": 0, "a": 1, "Ġ": 2, "Ġa": 3, "1": 4}, [("Ġ", "a")], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?").save_pretrained(tmp_path)
    (row,) = encode([TaggedSentence(1, ("a", "a1"), (1, 2))], WNUT, load_tokenizer(str(tmp_path), WNUT), 16)
    assert row.input_ids.tolist() == [3, 3, 4] and row.label.tolist() == [1, 2, -100]
    assert load_tokenizer(str(tmp_path), COLA)("x a a1")["input_ids"][-3:] == [3, 3, 4], "as in a text"


def test_so_does_one_that_writes_spaces_as_a_sign_before_it_parts(tmp_path: Path) -> None:
    """As Gemma's: the pieces of a tagged sentence are those of the text, whose first word has no space."""
    tokenizer = Tokenizer(models.BPE({"?": 0, "a": 1, "b": 2, "▁": 3, "▁a": 4, "▁b": 5}, [("▁", "a"), ("▁", "b")]))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?").save_pretrained(tmp_path)
    (row,) = encode([TaggedSentence(1, ("b", "a", "ab"), (1, 2, 3))], WNUT, load_tokenizer(str(tmp_path), WNUT), 16)
    assert row.input_ids.tolist() == [5, 4, 4, 2] and row.label.tolist() == [1, 2, 3, -100]
    assert load_tokenizer(str(tmp_path), COLA)("b a ab")["input_ids"] == [2, 4, 4, 2]


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the tokenizer of .*absent could not be loaded \("):
        load_tokenizer(str(tmp_path / "absent"), COLA)


def config(family: str, positions: int | None) -> SimpleNamespace:
    return SimpleNamespace(model_type=family, max_position_embeddings=positions, pad_token_id=1)


@pytest.mark.parametrize(
    ("limit", "family", "positions", "length"),
    [
        (128, "bert", 512, 128),
        (10**30, "bert", 512, 512),
        (10**30, "roberta", 514, 512),
        (512, "xlm-roberta", 514, 512),
        (10**30, "ibert", 40, 38),
        (256, "t5", None, 256),
        (256, "xlnet", -1, 256),
    ],
)
def test_the_models_length(limit: int, family: str, positions: int | None, length: int) -> None:
    assert longest_input(bert_tokenizer(model_max_length=limit), config(family, positions)) == length


def test_a_length_asked_for_must_fit() -> None:
    tokenizer = bert_tokenizer(model_max_length=64)
    assert longest_input(tokenizer, config("bert", 512), 4) == 4
    for wanted in (3, 65):
        with pytest.raises(ValueError, match=rf"inputs of {wanted} tokens .* must be at least 4 and at most 64"):
            longest_input(tokenizer, config("bert", 512), wanted)
    endless = bert_tokenizer()
    assert longest_input(endless, config("t5", None), 9999) == 9999
    with pytest.raises(ValueError, match="neither the tokenizer nor the t5 model says how long"):
        longest_input(endless, config("t5", None))
