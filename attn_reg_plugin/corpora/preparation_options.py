"""The options of `attn-reg prepare`: one dataclass per corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.corpora import phrasebook
from attn_reg_plugin.corpora.romanian import RULES

PAIRS = ("en-ro", "ro-en", "en-tr", "tr-en")
SPM = ("joint", "separate")
LONG_PAIRS = ("drop", "truncate")
#: the help of an option of several corpora
NOISE = (
    "share of the training targets that are exchanged among each other, in [0, 1]: wrong translations, as a crawled "
    "corpus has them, which a model can only memorize"
)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What the preparation of every corpus can be told; a value outside what is allowed is a ValueError."""

    CORPUS: ClassVar[str]
    VOCAB_SIZE: ClassVar[int]

    pair: str = setting(f"translation direction, source first: {', '.join(PAIRS)}", metavar="PAIR")
    out: Path = setting("folder to write; created if missing", metavar="DIR")
    spm: str | None = setting(
        "sentencepiece: 'joint' (one model and a joined dictionary, as --share-all-embeddings needs) or "
        "'separate' (one per language); default: joint, or separate where --spm-model names two",
        None,
        metavar="KIND",
    )
    vocab_size: int | None = setting(
        "pieces a model is trained to have (default: 8000 for wmt16, 800 for phrasebook)", None, metavar="N"
    )
    character_coverage: float = setting(
        "share of the characters of the training text that get a piece, above 0 up to 1; the rest is <unk>",
        1.0,
        metavar="X",
    )
    spm_model: tuple[Path, ...] = setting(
        "reuse a sentencepiece model instead of training one: FILE, or SOURCE,TARGET for one per language",
        (),
        metavar="FILE[,FILE]",
    )
    dictionary: tuple[Path, ...] = setting(
        "reuse the fairseq dictionary that belongs to --spm-model (dict.txt of a model to fine-tune): FILE, "
        "or SOURCE,TARGET; default: made from the model's pieces",
        (),
        metavar="FILE[,FILE]",
    )
    opus_mt: Path | None = setting(
        "use the pieces and the vocabulary of an OPUS-MT model: the folder that `attn-reg convert opus-mt` wrote; "
        "takes the place of --spm-model and --dictionary",
        None,
        metavar="DIR",
    )
    source_prefix: str = setting(
        "with --opus-mt: put this piece before every source sentence, as a model with several target languages wants, "
        "such as '>>ron<<'",
        "",
        metavar="PIECE",
    )
    max_pieces: int = setting("pieces that a side of a training pair may have", 250, metavar="N")
    long_pairs: str = setting(
        "what is done with training pairs with a side of more than --max-pieces: 'drop' leaves them out, 'truncate' "
        "cuts each side to that many pieces",
        "drop",
        choices=LONG_PAIRS,
    )
    max_ratio: float = setting(
        "drop training pairs with a side more than this many times as long, in pieces, as the other",
        9.0,
        metavar="X",
    )
    strict: bool = setting("refuse training pairs with an empty side instead of dropping them", False)
    romanian: str | None = setting(
        "Romanian letters: 'cedilla' (default) writes ş ţ as ș ț in all that is trained on, validated on and "
        "translated, and leaves the Romanian references in raw/ as they were, so that scores stay "
        "comparable; 'no-diacritics' writes a i s t for ă â î ș ț as well, in the references too, since a "
        "system without diacritics cannot be scored against a text with them; 'none', the default with --opus-mt, "
        "changes nothing",
        None,
        metavar="RULE",
    )
    workers: int = setting("processes for fairseq's binarization", 1, metavar="N")
    overwrite: bool = setting("replace what an earlier preparation with other options wrote", False)

    def __post_init__(self) -> None:
        """Check every value that does not depend on files, and fill in what depends on other options."""
        self._allow("pair", self.pair in PAIRS, f"one of {', '.join(PAIRS)}")
        models = len(self.spm_model)
        self._check_opus_mt()
        self._allow("spm-model", models <= 2, "one file, or two, source and target")
        if self.spm is None:
            object.__setattr__(self, "spm", "separate" if models == 2 else "joint")
        self._allow("spm", self.spm in SPM, f"one of {', '.join(SPM)}")
        wanted = 1 if self.spm == "joint" else 2
        self._allow("spm-model", models in (0, wanted), f"{wanted} with --spm {self.spm}")
        self._allow("dictionary", not self.dictionary or bool(models), "given together with --spm-model")
        self._allow("dictionary", len(self.dictionary) in (0, wanted), f"{wanted} with --spm {self.spm}")
        self._allow("vocab-size", self.vocab_size is None or not models, "left out with --spm-model")
        if self.vocab_size is None and not models and self.opus_mt is None:
            object.__setattr__(self, "vocab_size", self.VOCAB_SIZE)
        self._allow("vocab-size", self.vocab_size is None or self.vocab_size > 4, "above 4")
        self._allow("character-coverage", 0 < self.character_coverage <= 1, "above 0 and at most 1")
        self._allow("max-pieces", self.max_pieces >= 1, "at least 1")
        self._allow("long-pairs", self.long_pairs in LONG_PAIRS, f"one of {', '.join(LONG_PAIRS)}")
        self._allow("max-ratio", self.max_ratio >= 1, "at least 1")
        self._allow("workers", self.workers >= 1, "at least 1")
        has_romanian = "ro" in self.languages
        if self.romanian is None:
            # an OPUS-MT model has its own letters, and its tokenizer is to see the text as it is
            changed = has_romanian and self.opus_mt is None
            object.__setattr__(self, "romanian", "cedilla" if changed else "none")
        self._allow("romanian", self.romanian in RULES, f"one of {', '.join(RULES)}")
        self._allow("romanian", has_romanian or self.romanian == "none", f"'none' for --pair {self.pair}")

    def _check_opus_mt(self) -> None:
        """An OPUS-MT model brings its own models and dictionaries."""
        if self.opus_mt is None:
            self._allow("source-prefix", not self.source_prefix, "left out without --opus-mt")
            return
        for name, given in (("spm-model", self.spm_model), ("dictionary", self.dictionary)):
            self._allow(name, not given, "left out with --opus-mt")
        self._allow("vocab-size", self.vocab_size is None, "left out with --opus-mt")
        self._allow("spm", self.spm is None, "left out with --opus-mt")
        object.__setattr__(self, "spm", "separate")

    def _allow(self, name: str, condition: bool, allowed: str) -> None:
        """Raise the one sentence for an option unless the condition holds."""
        if not condition:
            value = getattr(self, name.replace("-", "_"))
            given = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"--{name} {given}: it must be {allowed}")

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target."""
        source, _, target = self.pair.partition("-")
        return source, target

    @property
    def models(self) -> dict[str, str]:
        """The name of a model file in the output folder -> the name of its dictionary."""
        if self.spm == "joint":
            return {"spm.model": "dict.txt"}
        return {f"spm.{language}.model": f"dict.{language}.txt" for language in self.languages}

    @property
    def dictionaries(self) -> tuple[str, str]:
        """The names of the source's and the target's dictionary in the output folder."""
        names = list(self.models.values())
        return names[0], names[-1]

    def rule(self, language: str) -> str:
        """The rule of `romanian.py` for text of a language."""
        return self.romanian if language == "ro" and self.romanian else "none"


@dataclass(frozen=True, kw_only=True)
class Wmt16Options(PrepareOptions):
    """Options of `attn-reg prepare wmt16`."""

    CORPUS: ClassVar[str] = "wmt16"
    VOCAB_SIZE: ClassVar[int] = 8000

    source: str = setting(
        "'hub' (the datasets library, wmt/wmt16, streamed) or a folder of parallel files: train.*, "
        "newsdev2016.* (or valid.*, dev.*) and newstest*.* (or test.*), plain or .gz; without a test set, "
        "newsdev2016 is split in halves",
        metavar="SOURCE",
    )
    limit: int | None = setting(
        "read only the first N training pairs (of those that --origin keeps)", None, metavar="N"
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
        metavar="N",
    )
    noise: float = setting(NOISE, 0.0, metavar="X")
    seed: int = setting("seed of what --set-aside and --noise draw", 1, metavar="N")

    def __post_init__(self) -> None:
        """Check the options of this corpus too."""
        super().__post_init__()
        self._allow("limit", self.limit is None or self.limit >= 1, "at least 1")
        self._allow("origin", not self.origin or self.source != "hub", "left out with --source hub")
        self._allow("set-aside", self.set_aside >= 0, "at least 0")
        self._allow("noise", 0 <= self.noise <= 1, "in [0, 1]")
        object.__setattr__(self, "origin", tuple(sorted(set(self.origin))))


@dataclass(frozen=True, kw_only=True)
class PhrasebookOptions(PrepareOptions):
    """Options of `attn-reg prepare phrasebook`."""

    CORPUS: ClassVar[str] = "phrasebook"
    VOCAB_SIZE: ClassVar[int] = 800

    train: int = setting("training pairs", 4000, metavar="N")
    valid: int = setting("validation pairs", 500, metavar="N")
    test: int = setting("test pairs", 500, metavar="N")
    seed: int = setting(
        "seed of the random choice of training pairs (1 takes the first ones) and of those that --noise exchanges",
        1,
        metavar="N",
    )
    noise: float = setting(NOISE, 0.0, metavar="X")

    def __post_init__(self) -> None:
        """Check the options of this corpus too."""
        super().__post_init__()
        for name in ("train", "valid", "test"):
            self._allow(name, getattr(self, name) >= 1, "at least 1")
        phrasebook.check_sizes(self.train, self.valid, self.test)
        self._allow("noise", 0 <= self.noise <= 1, "in [0, 1]")
        if round(self.noise * self.train) == 1:
            raise ValueError(f"--noise {self.noise}: it exchanges 1 of {self.train} targets, and it takes at least 2")


#: the corpora of the command, each with its options and what it is
CORPORA: dict[str, tuple[type[PrepareOptions], str]] = {
    "wmt16": (Wmt16Options, "WMT16 news translation, from the hub or a folder of parallel files"),
    "phrasebook": (
        PhrasebookOptions,
        "a small made-up corpus in English, Romanian and Turkish, for trying things",
    ),
}
