"""The options of `attn-reg prepare`: one dataclass per corpus."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.corpora import phrasebook
from attn_reg_plugin.dictionaries import is_pair

#: a source that is not a folder
HUB = "hub"
_COMMAS = str.maketrans("şţŞŢ", "șțȘȚ")
_COMBINING_COMMAS = str.maketrans("sStT", "șȘțȚ")


def with_commas(text: str) -> str:
    """Write Romanian ş and ţ with a comma below (U+0219, U+021B), as its spelling has them, in either case.

    Much text has them with a cedilla, composed or combining, which is another letter to a model and to BLEU.
    """
    return re.sub("([sStT])\u0327", lambda match: match[1].translate(_COMBINING_COMMAS), text.translate(_COMMAS))


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of every corpus; a value outside what is allowed is a ValueError."""

    CORPUS: ClassVar[str]
    VOCAB_SIZE: ClassVar[int] = 8000

    pair: str = setting("the two languages, source first, as the files' names end: en-ro, fr-de ...", metavar="PAIR")
    out: Path = setting("folder to write; created if missing", metavar="DIR")
    vocab_size: int | None = setting(
        "pieces that the model for both languages is trained to have (default: 8000, of the phrasebook 800)",
        None,
        within="(4, inf)",
        metavar="N",
    )
    character_coverage: float = setting(
        "share of the characters of the training text that get a piece; the rest is <unk>", 1.0, within="[0.98, 1]"
    )
    spm_model: Path | None = setting("reuse a sentencepiece model instead of training one", None, metavar="FILE")
    opus_mt: Path | None = setting(
        "use the pieces and the vocabulary of an OPUS-MT model: the folder that `attn-reg convert opus-mt` wrote; in "
        "place of --spm-model",
        None,
        metavar="DIR",
    )
    source_prefix: str = setting(
        "with --opus-mt: put this piece before every source sentence, as a model with several target languages wants, "
        "such as '>>ron<<'",
        "",
        metavar="PIECE",
    )
    max_pieces: int = setting("pieces that a side of a training pair may have", 250, within="[1, inf)", metavar="N")
    long_pairs: str = setting(
        "what is done with training pairs with a side of more than --max-pieces: 'drop' leaves them out, 'truncate' "
        "cuts each side to that many pieces",
        "drop",
        choices=("drop", "truncate"),
    )
    noise: float = setting(
        "share of the training targets that are exchanged among each other, in [0, 1]: wrong translations, as a "
        "crawled corpus has them, which a model can only memorize",
        0.0,
        within="[0, 1]",
        metavar="X",
    )
    seed: int = setting(
        "seed of what --noise and --set-aside draw, and of the phrasebook's training pairs (1 takes the first ones)",
        1,
        metavar="N",
    )
    workers: int = setting("processes for fairseq's binarization", 1, within="[1, inf)", metavar="N")

    def __post_init__(self) -> None:
        """Check what depends on other options, and fill in what follows from them."""
        self._allow("pair", is_pair(self.pair), "two different languages with a hyphen, source first, such as en-fr")
        reused, opus_mt = self.spm_model is not None, self.opus_mt is not None
        self._allow("source-prefix", not self.source_prefix or opus_mt, "left out without --opus-mt")
        self._allow("spm-model", not (reused and opus_mt), "left out with --opus-mt")
        if reused or opus_mt:
            other = "--opus-mt" if opus_mt else "--spm-model"
            self._allow("vocab-size", self.vocab_size is None, f"left out with {other}")
        elif self.vocab_size is None:
            object.__setattr__(self, "vocab_size", self.VOCAB_SIZE)

    def carry_out(self) -> None:
        """Prepare the corpus, see `preparation.prepare`."""
        from attn_reg_plugin.corpora.preparation import prepare

        prepare(self)

    def _allow(self, name: str, condition: bool, allowed: str) -> None:
        """Raise the one sentence for an option unless the condition holds."""
        if not condition:
            value = getattr(self, name.replace("-", "_"))
            given = ",".join(value) if isinstance(value, tuple) else value
            raise ValueError(f"--{name} {given}: it must be {allowed}")

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target."""
        source, _, target = self.pair.partition("-")
        return source, target

    @property
    def dictionaries(self) -> tuple[str, str]:
        """The names of the source's and the target's dictionary in the output folder."""
        source, target = self.languages
        return ("dict.txt", "dict.txt") if self.opus_mt is None else (f"dict.{source}.txt", f"dict.{target}.txt")

    def letters(self, language: str, text: str) -> str:
        """Write a text of a language in the letters that the model is to see; an OPUS-MT model has its own."""
        return with_commas(text) if language == "ro" and self.opus_mt is None else text


@dataclass(frozen=True, kw_only=True)
class TextOptions(PrepareOptions):
    """Options of `attn-reg prepare text`: parallel files of any two languages."""

    CORPUS: ClassVar[str] = "text"
    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg prepare text --pair en-fr --source my_text --out data/en-fr",
        "attn-reg prepare text --pair en-fr --source my_text --out data/en-fr --opus-mt models/en-fr",
    )

    source: str = setting(
        "folder of parallel files, plain or .gz: train.en and train.fr, valid.* (or dev.*, newsdev2016.*) and test.*, "
        "test1.*, ... (or newstest*.*); without a test set, the validation set is split in halves",
        metavar="DIR",
    )
    limit: int | None = setting(
        "read only the first N training pairs (of those that --origin keeps)", None, within="[1, inf)", metavar="N"
    )
    origin: tuple[str, ...] = setting(
        "keep only training pairs whose line of train.origin is one of these", (), metavar="NAME[,NAME]"
    )
    split_valid: bool = setting(
        "split the validation set in halves even where there is a test set: the first half is valid, the second test",
        False,
    )
    set_aside: int = setting(
        "N of these training pairs, drawn at random, become a test set; training pairs that share a side with one of "
        "them are left out",
        0,
        within="[0, inf)",
        metavar="N",
    )

    def __post_init__(self) -> None:
        """Check the options of this corpus too."""
        super().__post_init__()
        self._allow("origin", not (self.origin and self.from_hub), "left out with --source hub")
        object.__setattr__(self, "origin", tuple(sorted(set(self.origin))))

    @property
    def from_hub(self) -> bool:
        """Whether the source is the hub, and not a folder, which of `prepare text` may be called so."""
        return isinstance(self, Wmt16Options) and self.source == HUB


@dataclass(frozen=True, kw_only=True)
class Wmt16Options(TextOptions):
    """Options of `attn-reg prepare wmt16`: those of `text`, and a source on the hub."""

    CORPUS: ClassVar[str] = "wmt16"
    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg prepare wmt16 --pair en-ro --out data/en-ro",
        "attn-reg prepare wmt16 --pair tr-en --source my_text --out data/tr-en --max-pieces 128",
    )

    source: str = setting(
        "'hub' (the datasets library, wmt/wmt16, streamed) or a folder of parallel files, as `prepare text` reads them",
        HUB,
        metavar="SOURCE",
    )


@dataclass(frozen=True, kw_only=True)
class PhrasebookOptions(PrepareOptions):
    """Options of `attn-reg prepare phrasebook`."""

    CORPUS: ClassVar[str] = "phrasebook"
    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg prepare phrasebook --pair en-ro --out data",
        "attn-reg prepare phrasebook --pair en-tr --train 300 --noise 0.25 --out data",
    )
    VOCAB_SIZE: ClassVar[int] = 800

    train: int = setting("training pairs", 4000, within="[1, inf)", metavar="N")
    valid: int = setting("validation pairs", 500, within="[1, inf)", metavar="N")
    test: int = setting("test pairs", 500, within="[1, inf)", metavar="N")

    def __post_init__(self) -> None:
        """Check the options of this corpus too."""
        super().__post_init__()
        known = phrasebook.Triple._fields
        self._allow("pair", set(self.languages) <= set(known), f"two of {', '.join(known)}, such as en-ro")
        phrasebook.check_sizes(self.train, self.valid, self.test)
