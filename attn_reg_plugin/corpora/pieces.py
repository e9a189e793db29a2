"""Sentencepiece: a model trained or reused, the fairseq dictionary made from it, and the encoding of lines.

The dictionary holds the model's own pieces, in the model's order, so no piece that the model can produce is
unknown to fairseq. A model trained here also numbers its pieces as fairseq does (`<s>` 0, `<pad>` 1, `</s>`
2, `<unk>` 3). Characters that the model does not know are written as `<unk>`, and counted.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from attn_reg_plugin.dictionaries import SPECIAL, UNKNOWN, read_dictionary
from attn_reg_plugin.files import write_bytes

#: sentences, drawn at random, that a model is trained on at most; what bounds the memory of training
SAMPLE = 1_000_000
#: part of the result, since sums of floats depend on it
_THREADS = 4


class PieceModel:
    """A sentencepiece model as fairseq needs it: text in, symbols of a fairseq dictionary out.

    Args:
        path: the model file.

    Attributes:
        symbols: the pieces that the dictionary needs, in the order of the model.

    Raises:
        ValueError: the file is not a sentencepiece model, or has a piece that no fairseq dictionary can hold.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"sentencepiece model {path}: no such file")
        try:
            self._processor = SentencePieceProcessor(model_file=str(path))
        except RuntimeError:
            raise ValueError(f"{path} is not a sentencepiece model (a file such as spm.model is)") from None
        processor = self._processor
        self.symbols: list[str] = []
        self._table: list[str] = []
        for index in range(processor.get_piece_size()):
            piece = processor.id_to_piece(index)
            if processor.is_unknown(index) or processor.is_control(index) or processor.is_unused(index):
                self._table.append(UNKNOWN)
                continue
            if piece in SPECIAL or piece.split() != [piece]:
                raise ValueError(
                    f"{path}: piece {index}, {piece!r}, cannot be in a fairseq dictionary, which allows "
                    f"neither white space nor {' '.join(SPECIAL)}"
                )
            self._table.append(piece)
            self.symbols.append(piece)

    def encode(self, text: str) -> list[str]:
        """The pieces of a line, `<unk>` for what the model does not know; empty where nothing is left."""
        table = self._table
        return [table[index] for index in self._processor.encode(text, out_type=int)]

    def decode(self, pieces: Sequence[str]) -> str:
        """The text of pieces."""
        return self._processor.decode(list(pieces))


def train_model(lines: Iterable[str], path: Path, vocab_size: int, character_coverage: float = 1.0) -> None:
    """Train a unigram model and write it; the same lines always give the same file.

    Args:
        lines: text, read once as a stream; `SAMPLE` lines of it, drawn at random, are used.
        path: where the model is written.
        vocab_size: pieces in all, the four special ones included.
        character_coverage: share of the characters, from the most frequent on, that get a piece; 0 to 1.

    Raises:
        ValueError: the vocabulary is too large or too small for the text, or the text too short.
    """
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            input_sentence_size=SAMPLE,
            shuffle_input_sentence=True,
            bos_id=0,
            pad_id=1,
            eos_id=2,
            unk_id=3,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(_explain(str(error), vocab_size)) from None
    write_bytes(path, model.getvalue())


def _explain(message: str, vocab_size: int) -> str:
    """One sentence for a failure of sentencepiece's trainer."""
    if match := re.search(r"too high.*?<= (\d+)", message):
        return (
            f"--vocab-size {vocab_size} is too large for this training text: at most {match[1]} pieces can "
            "be made of it"
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"--vocab-size {vocab_size} is too small for this training text: its characters alone need "
            f"{match[1]} pieces (or a lower --character-coverage)"
        )
    if "sentences_.empty()" in message:
        return "sentencepiece found no usable line in the training text"
    return f"sentencepiece could not train a model of {vocab_size} pieces: {message}"


def check_fit(model: PieceModel, model_path: Path, dictionary_path: Path) -> None:
    """Check that a dictionary has every piece of a model; it may have more.

    Raises:
        ValueError: it lacks some; the sentence says how many, and names one.
    """
    known = set(read_dictionary(dictionary_path))
    missing = [symbol for symbol in model.symbols if symbol not in known]
    if missing:
        raise ValueError(
            f"the dictionary {dictionary_path} does not fit the sentencepiece model {model_path}: it lacks "
            f"{len(missing)} of the model's {len(model.symbols)} pieces, {missing[0]!r} first"
        )
