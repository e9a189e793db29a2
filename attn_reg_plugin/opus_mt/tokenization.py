"""OPUS-MT's vocabulary and tokenization, as `transformers.MarianTokenizer` (5.23) does it, for fairseq.

Marian numbers its pieces by `vocab.json`; fairseq's dictionary begins with `<s> <pad> </s> <unk>`. So a dictionary
here is fairseq's four, of which the last three are Marian's own, and then every other piece in Marian's order. `<s>`
isn't a piece of Marian's: it is what decoding starts from.

Punctuation is not normalized: `MarianTokenizer` has a normalizer and never calls it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_reg_plugin import files
from attn_reg_plugin.dictionaries import SPECIAL, UNKNOWN

VOCABULARY, TARGET_VOCABULARY, TOKENIZER = "vocab.json", "target_vocab.json", "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
SOURCE_MODEL, TARGET_MODEL = "source.spm", "target.spm"
CONFIG, GENERATION = "config.json", "generation_config.json"
#: the tokenizer's files, and what else goes along with them so that the way back needs nothing else
TOKENIZER_FILES = (
    VOCABULARY,
    TARGET_VOCABULARY,
    TOKENIZER,
    SPECIAL_MAP,
    "added_tokens.json",
    SOURCE_MODEL,
    TARGET_MODEL,
)
FILES = (*TOKENIZER_FILES, CONFIG, GENERATION)
#: the kinds of special tokens in the order of fairseq's dictionary, after `<s>`, and what they are by default
KINDS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_ESCAPED = re.compile(r"<piece:\d+>")
_UNDERLINE = "▁"
#: what `clean_up_tokenization_spaces` takes out of a text, in this order
_CLEANING = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't"} | {
    f" '{ending}": f"'{ending}" for ending in ("m", "s", "ve", "re")
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or no object.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}, which every OPUS-MT folder has")
    return files.read_json(path)


class Vocabulary:
    """The pieces of a `vocab.json`, numbered by Marian and by fairseq.

    Args:
        path: the file.
        special: `pad_token`, `eos_token`, `unk_token` → the piece.

    Attributes:
        ids: piece → Marian's number, 0 … V − 1.
        order: Marian's number of each symbol of fairseq's dictionary, without `<s>`: pad, eos, unk, then the rest.
        symbols: the symbols of `dict.txt`, which lists them without the special ones.

    Raises:
        ValueError: the numbers are not 0 … V − 1, or a special token is missing.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: Path, special: dict[str, str]) -> None:
        self.path = path
        self.ids: dict[str, int] = read_json(path)
        if sorted(self.ids.values(), key=str) != sorted(range(len(self.ids)), key=str):
            raise ValueError(
                f"{path} has {len(self.ids)} pieces, whose numbers must be 0 to {len(self.ids) - 1}, each once"
            )
        for kind, piece in special.items():
            if piece not in self.ids:
                raise ValueError(f"{path} lacks {piece!r}, the {kind} of the tokenizer")
        first = [self.ids[special[kind]] for kind in KINDS]
        rest = [(number, piece) for piece, number in self.ids.items() if number not in first]
        rest.sort()
        self.order: list[int] = first + [number for number, _ in rest]
        self.symbols: list[str] = [_symbol(piece, number) for number, piece in rest]
        names = dict(zip(first, SPECIAL[1:], strict=True)) | dict(zip(self.order[3:], self.symbols, strict=True))
        self._symbol_of = {piece: names[number] for piece, number in self.ids.items()}
        self._piece_of = {symbol: piece for piece, symbol in self._symbol_of.items()}

    def symbol(self, piece: str) -> str:
        """The symbol of a piece; `<unk>` if there is no such piece."""
        return self._symbol_of.get(piece, UNKNOWN)

    def piece(self, symbol: str) -> str:
        """The piece of a symbol; the symbol itself if there is no such piece."""
        return self._piece_of.get(symbol, symbol)


def _symbol(piece: str, number: int) -> str:
    """How a piece is written in a fairseq dictionary, which can hold neither white space nor its own four twice."""
    plain = piece not in SPECIAL and piece.split() == [piece] and not _ESCAPED.fullmatch(piece)
    return piece if plain else f"<piece:{number}>"


class Side:
    """Encodes one language: text in, symbols of its dictionary out, without the end of sentence.

    Args:
        processor: the sentencepiece model.
        vocabulary: of this language.
        special: the special tokens' pieces.
        prefix: put before every text, with a space, as `>>ron<<` where a model has several target languages.
    """

    def __init__(self, processor: Any, vocabulary: Vocabulary, special: dict[str, str], prefix: str = "") -> None:
        self._processor, self.vocabulary = processor, vocabulary
        self._special = frozenset(special.values())
        self._splitter = re.compile(f"({'|'.join(re.escape(piece) for piece in special.values())})")
        self._prefix = f"{prefix} " if prefix else ""

    def encode(self, text: str) -> list[str]:
        """The symbols of a text; `<unk>` for what the vocabulary does not have; empty where nothing is left."""
        symbols: list[str] = []
        for part in self._splitter.split(self._prefix + text):
            pieces = [part] if part in self._special else self._pieces(part) if part else []
            symbols += map(self.vocabulary.symbol, pieces)
        return symbols

    def _pieces(self, text: str) -> list[str]:
        """A language code at the beginning is a piece of its own; the rest is sentencepiece's."""
        end = text.find("<<") + 2 if text.startswith(">>") else 0
        code = end if end > 1 else 0
        return [*([text[:code]] if code else []), *self._processor.encode(text[code:], out_type=str)]


class OpusMTTokenizer:
    """The tokenizer of an OPUS-MT folder, or of one that `attn-reg convert opus-mt` wrote.

    Args:
        folder: holds `source.spm`, `target.spm`, `vocab.json`, `tokenizer_config.json`, and `target_vocab.json` where
            the vocabularies are separate.
        prefix: put before every source sentence.

    Attributes:
        source, target: encode a sentence of either language.
        special: `pad_token`, `eos_token`, `unk_token` → the piece.
        separate: whether each language has its own vocabulary.
        languages: source and target as the folder names them, empty where it does not.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file cannot be read, a setting cannot be followed, or the prefix isn't a piece.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        config = read_json(folder / TOKENIZER)
        old = "added_tokens_decoder" not in config and (folder / SPECIAL_MAP).is_file()
        legacy = read_json(folder / SPECIAL_MAP) if old else {}
        self.special = {kind: _content(legacy.get(kind, config.get(kind, default))) for kind, default in KINDS.items()}
        _refuse_settings(folder, config, legacy, self.special)
        self.separate = bool(config.get("separate_vocabs", False))
        self.languages = tuple(str(config.get(f"{side}_lang") or "") for side in ("source", "target"))
        self._clean = bool(config.get("clean_up_tokenization_spaces", False))
        vocabulary = Vocabulary(folder / VOCABULARY, self.special)
        target = Vocabulary(folder / TARGET_VOCABULARY, self.special) if self.separate else vocabulary
        if target.order[:3] != vocabulary.order[:3]:
            raise ValueError(
                f"{target.path} numbers {', '.join(self.special.values())} {target.order[:3]}, but {vocabulary.path} "
                f"{vocabulary.order[:3]}; only vocabularies that agree here can be used"
            )
        if prefix and prefix not in vocabulary.ids:
            codes = [piece for piece in vocabulary.ids if piece.startswith(">>") and piece.endswith("<<")]
            known = ", ".join(codes[:20]) + (", ..." if len(codes) > 20 else "")
            raise ValueError(f"the source prefix {prefix!r} is not in {vocabulary.path}, which has {known or 'none'}")
        models = [_load_model(folder / name) for name in (SOURCE_MODEL, TARGET_MODEL)]
        self.source = Side(models[0], vocabulary, self.special, prefix)
        self.target = Side(models[1], target, self.special)
        # Hugging Face's joins the pieces of a shared vocabulary with the source's model
        self._decoder = models[1] if self.separate else models[0]

    def decode(self, symbols: Sequence[str]) -> str:
        """The text of target symbols; the special ones are left out, unknown pieces too."""
        pieces = [self.target.vocabulary.piece(symbol) for symbol in symbols if symbol and symbol not in SPECIAL]
        text = self._decoder.decode_pieces(pieces).replace(_UNDERLINE, " ").strip()
        if self._clean:
            for old, new in _CLEANING.items():
                text = text.replace(old, new)
        return text


def copy_files(folder: Path, destination: Path) -> None:
    """Copy the tokenizer and the settings of a model from one folder to another."""
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, destination / name)


def write_dictionaries(tokenizer: OpusMTTokenizer, paths: Sequence[Path]) -> None:
    """Write the fairseq dictionaries of the source and the target."""
    for side, path in zip((tokenizer.source, tokenizer.target), paths, strict=True):
        files.write_text(path, "".join(f"{symbol} 1\n" for symbol in side.vocabulary.symbols))


def _content(token: str | dict[str, Any]) -> str:
    """A token as older and newer folders write it: a text, or an object with a `content`."""
    return token["content"] if isinstance(token, dict) else str(token)


def _refuse_settings(folder: Path, config: dict[str, Any], legacy: dict[str, Any], special: dict[str, str]) -> None:
    """Refuse what the tokenization here does not do."""
    if config.get("tokenizer_class", "MarianTokenizer") != "MarianTokenizer":
        raise ValueError(f"{folder / TOKENIZER} is of a {config['tokenizer_class']}, not of a MarianTokenizer")
    if config.get("sp_model_kwargs"):
        raise ValueError(f"{folder / TOKENIZER} sets sp_model_kwargs, which must be empty: sampling is not reproduced")
    added = [_content(token) for token in config.get("added_tokens_decoder", {}).values()]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        added += [_content(token) for tokens in (config, legacy) for token in tokens.get(name) or []]
    if (folder / "added_tokens.json").is_file():
        added += read_json(folder / "added_tokens.json")
    for token in added:
        if token not in special.values():
            raise ValueError(
                f"{folder} adds the token {token!r} to its tokenizer; only {', '.join(special.values())} can be used"
            )


def _load_model(path: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}, which every OPUS-MT folder has")
    try:
        return SentencePieceProcessor(model_file=str(path))
    except RuntimeError:
        raise ValueError(f"{path} is not a sentencepiece model") from None
