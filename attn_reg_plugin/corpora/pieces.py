"""Pieces and dictionaries: sentencepiece models, trained or reused, or those of a converted OPUS-MT model.

The dictionary holds the model's own pieces, in the model's order, so no piece that the model can produce is unknown to
fairseq. A model trained here also numbers its pieces as fairseq does (`<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3). What
the model does not know is written as `<unk>`, and counted.

With `--opus-mt` the prepared folder gets a copy of the tokenizer in `opus_mt/`, so that it is complete:
`fairseq-generate --bpe opus_mt --opus-mt-folder DIR/opus_mt` writes text, and `attn-reg convert opus-mt --to-hf` finds
what it needs.
"""

import io
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from attn_reg_plugin.corpora.options import PrepareOptions
from attn_reg_plugin.dictionaries import SPECIAL, UNKNOWN, read_dictionary, write_dictionary
from attn_reg_plugin.files import read_bytes, read_lines, whole_file
from attn_reg_plugin.opus_mt import tokenization
from attn_reg_plugin.opus_mt.tokenization import OpusMTTokenizer, Side

#: in the output folder: the sentencepiece model, or the tokenizer of an OPUS-MT model
MODEL, OPUS_MT = "spm.model", "opus_mt"
#: sentences, drawn at random, that a model is trained on at most; it bounds the memory of training
SAMPLE = 1_000_000
#: part of the result, since sums of floats depend on it
_THREADS = 4


class PieceModel:
    """A sentencepiece model as fairseq needs it: text in, symbols of a fairseq dictionary out.

    Attributes:
        symbols: the pieces that the dictionary needs, in the order of the model.

    Raises:
        ValueError: the file is not a sentencepiece model, or has a piece that no fairseq dictionary can hold.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        content, self._processor = read_bytes(path), SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError:
            raise ValueError(f"{path} is not a sentencepiece model (a file such as spm.model is)") from None
        model, self._table = self._processor, list[str]()
        for index in range(model.get_piece_size()):
            piece = model.id_to_piece(index)
            if model.is_unknown(index) or model.is_control(index) or model.is_unused(index):
                piece = UNKNOWN
            elif piece in SPECIAL or piece.split() != [piece]:
                raise ValueError(
                    f"{path}: piece {index}, {piece!r}, cannot be in a fairseq dictionary, which allows neither white "
                    f"space nor {' '.join(SPECIAL)}"
                )
            self._table.append(piece)
        self.symbols = [piece for piece in self._table if piece != UNKNOWN]

    def encode(self, text: str) -> list[str]:
        """Part a line into pieces, `<unk>` for what the model does not know; empty where nothing is left."""
        return [self._table[index] for index in self._processor.encode(text, out_type=int)]


def check_reused(options: PrepareOptions) -> list[Path]:
    """Check the model that is reused; its files.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no model, or the prefix isn't a piece.
    """
    if options.spm_model is not None:
        PieceModel(options.spm_model)
        return [options.spm_model]
    if options.opus_mt is None:
        return []
    OpusMTTokenizer(options.opus_mt, options.source_prefix).refuse_reversed(options.languages)
    files = [options.opus_mt / name for name in tokenization.TOKENIZER_FILES]
    return [path for path in files if path.is_file()]


def encoders(options: PrepareOptions, folder: Path) -> tuple[PieceModel, PieceModel] | tuple[Side, Side]:
    """Load the models of a folder, written by `write_models`, that encode the source and the target."""
    if options.opus_mt is not None:
        tokenizer = OpusMTTokenizer(folder / OPUS_MT, options.source_prefix)
        return tokenizer.source, tokenizer.target
    model = PieceModel(folder / MODEL)
    return model, model


def write_models(options: PrepareOptions, folder: Path) -> dict[str, Any]:
    """Write the model, trained on `raw/` or reused, and its dictionary into a folder; facts about it by its name.

    Raises:
        ValueError: a vocabulary size that does not suit the text, or a file of an OPUS-MT model that cannot be used.
    """
    if options.opus_mt is not None:
        return _write_opus_mt(options, options.opus_mt, folder)
    path, dictionary = folder / MODEL, folder / options.dictionaries[0]
    if options.spm_model is not None:
        shutil.copyfile(options.spm_model, path)
    else:
        assert options.vocab_size is not None
        files = ((language, folder / "raw" / f"train.{language}") for language in options.languages)
        lines = (options.letters(language, line) for language, file in files for line in read_lines(file))
        train_model(lines, path, options.vocab_size, options.character_coverage)
    model = PieceModel(path)
    write_dictionary(model.symbols, dictionary)
    return {MODEL: _facts(dictionary, len(model.symbols))}


def _write_opus_mt(options: PrepareOptions, model: Path, folder: Path) -> dict[str, Any]:
    tokenizer = OpusMTTokenizer(model, options.source_prefix)
    (folder / OPUS_MT).mkdir()
    tokenization.copy_files(model, folder / OPUS_MT)
    paths = [folder / name for name in options.dictionaries]
    tokenization.write_dictionaries(tokenizer, paths)
    names = [f"{OPUS_MT}/{name}" for name in (tokenization.SOURCE_MODEL, tokenization.TARGET_MODEL)]
    sides = zip(names, paths, (tokenizer.source, tokenizer.target), strict=True)
    return {name: _facts(path, len(side.vocabulary.ids)) for name, path, side in sides}


def _facts(dictionary: Path, pieces: int) -> dict[str, Any]:
    size = len(read_dictionary(dictionary)) + len(SPECIAL)
    return {"dictionary": dictionary.name, "dictionary_size": size, "pieces": pieces}


def train_model(lines: Iterable[str], path: Path, vocab_size: int, character_coverage: float = 1.0) -> None:
    """Train a unigram model on `SAMPLE` of the lines, drawn at random; the same lines always give the same file.

    Args:
        lines: text, read once as a stream.
        path: where the model is written.
        vocab_size: pieces in all, the four special ones included.
        character_coverage: share of the characters, from the most frequent on, that get a piece; 0.98 to 1.

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
        reason = str(error).rpartition("] ")[2] or str(error)
        raise ValueError(f"sentencepiece could not train a model, --vocab-size {vocab_size}: {reason}") from None
    with whole_file(path) as unfinished:
        unfinished.write_bytes(model.getvalue())
