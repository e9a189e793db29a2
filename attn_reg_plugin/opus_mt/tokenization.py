"""OPUS-MT's vocabulary and tokenization for fairseq: `transformers.MarianTokenizer`, with symbols in place of numbers.

Marian numbers its pieces by `vocab.json`; fairseq's dictionary begins with `<s> <pad> </s> <unk>`. So a dictionary
here is fairseq's four, of which the last three are Marian's own, and then every other piece in Marian's order. `<s>`
isn't a piece of Marian's: it is what decoding starts from.
"""

import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attn_reg_plugin.dictionaries import SPECIAL, write_dictionary
from attn_reg_plugin.files import first_line, read_json

VOCABULARY, TARGET_VOCABULARY, TOKENIZER = "vocab.json", "target_vocab.json", "tokenizer_config.json"
SOURCE_MODEL, TARGET_MODEL = "source.spm", "target.spm"
CONFIG, GENERATION = "config.json", "generation_config.json"
#: the tokenizer's files, and what else goes along with them so that the way back needs nothing else
TOKENIZER_FILES = (
    *(VOCABULARY, TARGET_VOCABULARY, TOKENIZER, "special_tokens_map.json", "added_tokens.json"),
    *(SOURCE_MODEL, TARGET_MODEL),
)
FILES = (*TOKENIZER_FILES, CONFIG, GENERATION)
#: the kinds of special tokens in the order of fairseq's dictionary, after `<s>`
KINDS = ("pad_token", "eos_token", "unk_token")
_ESCAPED = re.compile(r"<piece:\d+>")


class Vocabulary:
    """The pieces of a `vocab.json`, numbered by Marian and by fairseq.

    Args:
        path: the file.
        special: `pad_token`, `eos_token`, `unk_token` → the piece.

    Attributes:
        ids: piece → Marian's number, 0 … V − 1.
        order: Marian's number of each symbol of fairseq's dictionary, without `<s>`: pad, eos, unk, then the rest.
        symbols: the symbols of `dict.txt`, which lists them without the special ones.
        symbol_of: Marian's number → the symbol; `number_of` the other way.

    Raises:
        ValueError: the numbers are not 0 … V − 1, or a special token is missing.
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
        rest = sorted((number, piece) for piece, number in self.ids.items() if number not in first)
        self.order: list[int] = first + [number for number, _ in rest]
        self.symbols: list[str] = [_symbol(piece, number) for number, piece in rest]
        self.symbol_of = dict(zip(self.order, [*SPECIAL[1:], *self.symbols], strict=True))
        self.number_of = {symbol: number for number, symbol in self.symbol_of.items()}


def _symbol(piece: str, number: int) -> str:
    """Write a piece for a fairseq dictionary, which can hold neither white space nor its own four twice."""
    plain = piece not in SPECIAL and piece.split() == [piece] and not _ESCAPED.fullmatch(piece)
    return piece if plain else f"<piece:{number}>"


class Side:
    """A language: its vocabulary, and text in, symbols of its dictionary out, without the end of sentence."""

    def __init__(self, vocabulary: Vocabulary, numbers: Callable[[str], list[int]]) -> None:
        self.vocabulary, self._numbers = vocabulary, numbers

    def encode(self, text: str) -> list[str]:
        """Part a text into symbols; `<unk>` for what the vocabulary does not have; empty where nothing is left."""
        return [self.vocabulary.symbol_of[number] for number in self._numbers(text)[:-1]]


class OpusMTTokenizer:
    """The tokenizer of an OPUS-MT folder, or of one that `attn-reg convert opus-mt` wrote.

    Args:
        folder: holds `source.spm`, `target.spm`, `vocab.json`, `tokenizer_config.json`, and `target_vocab.json` where
            the vocabularies are separate.
        prefix: put before every source sentence, with a space, as `>>ron<<` where a model has several target languages.

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
        self.folder, config = folder, read_json(folder / TOKENIZER)
        self.separate = bool(config.get("separate_vocabs", False))
        needed = (VOCABULARY, SOURCE_MODEL, TARGET_MODEL, *((TARGET_VOCABULARY,) if self.separate else ()))
        for name in needed:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} has no {name}, which every such OPUS-MT folder has")
        if config.get("tokenizer_class", "MarianTokenizer") != "MarianTokenizer":
            raise ValueError(f"{folder / TOKENIZER} is of a {config['tokenizer_class']}, not of a MarianTokenizer")
        self._theirs = _load(folder)
        self.special = {kind: str(getattr(self._theirs, kind)) for kind in KINDS}
        self.languages = tuple(str(config.get(f"{side}_lang") or "") for side in ("source", "target"))
        vocabulary = Vocabulary(folder / VOCABULARY, self.special)
        target = Vocabulary(folder / TARGET_VOCABULARY, self.special) if self.separate else vocabulary
        if other := [token for token in self._theirs.get_added_vocab() if token not in self.special.values()]:
            raise ValueError(f"{folder} adds the token {other[0]!r} to its tokenizer, which has none in fairseq")
        if prefix and prefix not in vocabulary.ids:
            codes = [piece for piece in vocabulary.ids if piece.startswith(">>") and piece.endswith("<<")]
            known = ", ".join(codes[:20]) + (", ..." if len(codes) > 20 else "")
            raise ValueError(f"the source prefix {prefix!r} is not in {vocabulary.path}, which has {known or 'none'}")
        start = f"{prefix} " if prefix else ""
        self.source = Side(vocabulary, lambda text: self._theirs(start + text, verbose=False)["input_ids"])
        self.target = Side(target, lambda text: self._theirs(text_target=text, verbose=False)["input_ids"])

    def refuse_reversed(self, languages: tuple[str, str] | None) -> None:
        """Refuse, by a ValueError, source and target that the folder names the other way round."""
        if languages == self.languages[::-1]:
            named, wanted = self.languages, "-".join(languages)
            raise ValueError(f"{self.folder} translates from {named[0]} to {named[1]}, not {wanted}")

    def decode(self, symbols: Sequence[str]) -> str:
        """Join target symbols to text; the special ones are left out, unknown symbols too."""
        number_of = self.target.vocabulary.number_of
        numbers = [number_of[symbol] for symbol in symbols if symbol in number_of]
        return self._theirs.decode(numbers, skip_special_tokens=True)


def _load(folder: Path) -> Any:
    """Load Hugging Face's tokenizer; what cannot be read is a ValueError that names a file."""
    from transformers import MarianTokenizer

    read_json(folder / VOCABULARY)  # a refusal names the file
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")  # it is never called
        try:
            return MarianTokenizer.from_pretrained(folder)
        except Exception as error:  # transformers has an error of its own for everything
            raise ValueError(f"{folder} has a tokenizer that transformers cannot load ({first_line(error)})") from None


def copy_files(folder: Path, destination: Path) -> None:
    """Copy the tokenizer and the settings of a model from one folder to another."""
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, destination / name)


def write_dictionaries(tokenizer: OpusMTTokenizer, paths: Sequence[Path]) -> None:
    """Write the fairseq dictionaries of the source and the target."""
    for side, path in zip((tokenizer.source, tokenizer.target), paths, strict=True):
        write_dictionary(side.vocabulary.symbols, path)
