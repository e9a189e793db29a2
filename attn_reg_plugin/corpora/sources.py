"""Sources of parallel text: a folder of files, WMT16 through the `datasets` library, or the phrasebook.

A source gives splits, named as fairseq names them (`train`, `valid`, `test`, `test1`, ...). Only the training pairs are
a stream, so memory does not grow with the corpus, unless pairs are set aside or exchanged.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from attn_reg_plugin.corpora import phrasebook
from attn_reg_plugin.corpora.options import PhrasebookOptions, PrepareOptions, TextOptions
from attn_reg_plugin.files import find_text, names_in, one_line, read_lines, reason_of

#: the data set on the Hugging Face hub; its splits, their names for fairseq, and their titles
WMT16 = "wmt/wmt16"
_HUB_SPLITS = (("train", "train", "train"), ("validation", "valid", "newsdev2016"), ("test", "test", "newstest2016"))
_VALID_NAMES = ("newsdev2016", "valid", "dev")
_ORIGINS = "train.origin"


class Pair(NamedTuple):
    """A sentence and its translation, each a line; `line` is their number in their files, counted from 1."""

    line: int
    source: str
    target: str


@dataclass(frozen=True)
class Split:
    """A part of a corpus.

    Attributes:
        name: fairseq's name: `train`, `valid`, `test`, `test1`, ...
        title: the corpus's own name, such as `newstest2016`.
        places: the source and the target side, as messages name them.
        pairs: the pairs; those of training may be read once only.
    """

    name: str
    title: str
    places: tuple[str, str]
    pairs: Iterable[Pair]


def read_splits(options: PrepareOptions) -> tuple[list[Split], list[str]]:
    """List the splits of a corpus, training first, and sentences that the user should know.

    Raises:
        ValueError: a source that cannot be read, or too few pairs for what is asked.
        FileNotFoundError: a file is missing.
    """
    if isinstance(options, TextOptions):
        return arrange(options, *(_hub(options) if options.from_hub else _folder(options)))
    assert isinstance(options, PhrasebookOptions)
    train, *others = _phrasebook(options)
    train, *notes = _noisy(options, train) if options.noise else [train]
    return [train, *others], notes


# -- a folder of files ------------------------------------------------------------------------------------------------


def find_files(options: TextOptions) -> dict[str, tuple[Path, Path]]:
    """Find the files of a folder, each plain or `.gz`: the title of a split -> its source and its target.

    Training comes first, then the validation set, then the test sets in their order.

    Raises:
        FileNotFoundError: no such folder, or a file that is needed is not there (lists what is).
    """
    folder = Path(options.source)
    if not folder.is_dir():
        raise FileNotFoundError(f"--source {folder}: no such folder; give a folder of parallel files")
    parts = (path.name.removesuffix(".gz").rpartition(".") for path in folder.iterdir())
    stems = {stem for stem, _, language in parts if language in options.languages}
    valid = next((name for name in _VALID_NAMES if name in stems), "valid")
    tests = [name for name in stems if name.startswith("newstest")]
    tests = tests or [name for name in stems if re.fullmatch(r"test\d*", name)]
    found = {}
    for stem in ("train", valid, *sorted(tests, key=lambda name: (len(name), name))):
        names = [f"{stem}.{language}" for language in options.languages]
        paths = [find_text(folder, name) for name in names]
        if paths[0] is None or paths[1] is None:
            missing = " and no ".join(name for name, path in zip(names, paths, strict=True) if path is None)
            raise FileNotFoundError(f"{folder} has no {missing} (plain or .gz); it has: {names_in(folder)}")
        found[stem] = paths[0], paths[1]
    return found


def find_origins(options: TextOptions) -> Path:
    """Find the file with the corpus that each training pair is of.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it lacks an origin that is asked for (lists those it has).
    """
    path = find_text(Path(options.source), _ORIGINS)
    if path is None:
        raise FileNotFoundError(f"--origin needs {Path(options.source) / _ORIGINS}, which is not there")
    if other := set(options.origin) - (known := set(read_lines(path))):
        raise ValueError(f"--origin {min(other)!r}: {path} has only {', '.join(sorted(known))}")
    return path


def _folder(options: TextOptions) -> list[Split]:
    (title, train), *rest = find_files(options).items()
    if options.origin:
        lines = read_aligned(*train, find_origins(options))
        pairs = (Pair(number, *two) for number, (*two, origin) in enumerate(lines, 1) if origin in options.origin)
    else:
        pairs = read_pairs(*train)
    splits = [Split("train", title, (str(train[0]), str(train[1])), islice(pairs, options.limit))]
    for (title, paths), name in zip(rest, ("valid", *["test"] * (len(rest) - 1)), strict=True):
        splits.append(Split(name, title, (str(paths[0]), str(paths[1])), list(read_pairs(*paths))))
    return splits


def read_aligned(*paths: Path) -> Iterator[tuple[str, ...]]:
    """Read files that are aligned line by line, a line of each at a time.

    Raises:
        ValueError: the files have not equally many lines (names a shorter file and the first line it lacks), or one of
            them cannot be read as UTF-8 text.
        FileNotFoundError: one of the files is missing.
    """
    for number, lines in enumerate(zip_longest(*map(read_lines, paths)), start=1):
        if None in lines:
            long = next(path for path, line in zip(paths, lines, strict=True) if line is not None)
            raise ValueError(
                f"{paths[lines.index(None)]}, line {number} is missing: {long} has a line {number}, and parallel files "
                "must have equally many lines"
            )
        yield lines


def read_pairs(source: Path, target: Path) -> Iterator[Pair]:
    """Read the pairs of two files, a pair at a time; errors as of `read_aligned`."""
    return (Pair(number, *lines) for number, lines in enumerate(read_aligned(source, target), start=1))


# -- the hub ----------------------------------------------------------------------------------------------------------


def _hub(options: TextOptions) -> list[Split]:
    """Read WMT16 through the `datasets` library; training is streamed."""
    first, second = options.languages
    configuration = f"{second if first == 'en' else first}-en"

    def pairs(rows: Iterable[Any]) -> Iterator[Pair]:
        with _refused(configuration):
            for number, row in enumerate(rows, start=1):
                yield Pair(number, *(one_line(row["translation"][language]) for language in options.languages))

    with _refused(configuration):
        import datasets

        data = datasets.load_dataset(WMT16, configuration, streaming=True)
        there = [names for names in _HUB_SPLITS if names[0] in data or names[1] != "test"]
        rows = [pairs(data[key]) for key, _, _ in there]
    splits = []
    for (key, name, title), found in zip(there, rows, strict=True):
        places = (f"{WMT16} {configuration} {key} ({first})", f"{WMT16} {configuration} {key} ({second})")
        splits.append(Split(name, title, places, islice(found, options.limit) if name == "train" else list(found)))
    return splits


@contextmanager
def _refused(configuration: str) -> Iterator[None]:
    """Make one sentence of whatever the library says."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{WMT16} ({configuration}) could not be read through the datasets library ({reason_of(error)}): give "
            "--source a folder of parallel files instead"
        ) from error


# -- the phrasebook ---------------------------------------------------------------------------------------------------


def _phrasebook(options: PhrasebookOptions) -> list[Split]:
    splits = []
    for name, triples in phrasebook.splits(options.train, options.valid, options.test, options.seed).items():
        sources, targets = ([getattr(triple, language) for triple in triples] for language in options.languages)
        places = (f"phrasebook {name} ({options.languages[0]})", f"phrasebook {name} ({options.languages[1]})")
        splits.append(Split(name, name, places, list(map(Pair, range(1, len(triples) + 1), sources, targets))))
    return splits


# -- splits arranged anew ---------------------------------------------------------------------------------------------


def arrange(options: TextOptions, train: Split, valid: Split, *tests: Split) -> tuple[list[Split], list[str]]:
    """Part the validation set, set training pairs aside and exchange targets, as asked; name the test sets.

    Without a test set the validation set is parted in any case. Sentences say what the user should know.

    Raises:
        ValueError: too few pairs for what is asked.
    """
    notes = []
    if options.split_valid or not tests:
        valid, half, note = _halves(valid)
        tests, notes = (half, *tests), [note]
    if options.set_aside:
        train, aside, note = _set_aside(options, train)
        tests, notes = (*tests, aside), [*notes, note]
    if options.noise:
        train, note = _noisy(options, train)
        notes.append(note)
    return [train, valid, *(replace(test, name=f"test{number or ''}") for number, test in enumerate(tests))], notes


def _halves(valid: Split) -> tuple[Split, Split, str]:
    """Part the validation pairs into a validation and a test set."""
    pairs = list(valid.pairs)
    half, total = len(pairs) // 2, len(pairs)
    if half == 0:
        raise ValueError(f"{valid.places[0]} has {total} lines, too few to be split into valid and test")
    first = replace(valid, title=f"{valid.title}a", pairs=pairs[:half])
    second = replace(valid, title=f"{valid.title}b", pairs=pairs[half:])
    ranges = f"lines 1 to {half} are valid ({first.title}), lines {half + 1} to {total} are test ({second.title})"
    return first, second, f"{valid.title} is split: {ranges}"


def _set_aside(options: TextOptions, train: Split) -> tuple[Split, Split, str]:
    """Draw pairs for a test set; what stays in training shares no side with any of them."""
    pairs = list(train.pairs)
    whole = [pair.line for pair in pairs if is_whole(pair)]
    lines = set(phrasebook.shuffled(whole, f"aside:{options.seed}")[: options.set_aside])
    chosen = [pair for pair in pairs if pair.line in lines]
    left = [pair for pair in pairs if pair.line not in lines]
    sources, targets = {_plain(pair.source) for pair in chosen}, {_plain(pair.target) for pair in chosen}
    kept = [pair for pair in left if _plain(pair.source) not in sources and _plain(pair.target) not in targets]
    if not any(map(is_whole, kept)):
        raise ValueError(f"--set-aside {options.set_aside} leaves none of the {len(whole)} pairs of {train.places[0]}")
    same = f"{len(left) - len(kept)} left out that share a side with one of them"
    note = f"{len(chosen)} training pairs are set aside as a test set, and {same}"
    return replace(train, pairs=kept), replace(train, title="set-aside", pairs=chosen), note


def _noisy(options: PrepareOptions, train: Split) -> tuple[Split, str]:
    """Exchange targets; pairs with an empty side have no part in it."""
    pairs = list(train.pairs)
    whole = [index for index, pair in enumerate(pairs) if is_whole(pair)]
    number = round(options.noise * len(whole))
    if number < 2:
        raise ValueError(
            f"--noise {options.noise} exchanges {number} of the {len(whole)} targets of {train.places[1]}, but must "
            "exchange at least 2"
        )
    targets = phrasebook.exchange([pairs[index].target for index in whole], options.noise, options.seed)
    for index, target in zip(whole, targets, strict=True):
        pairs[index] = pairs[index]._replace(target=target)
    return replace(train, pairs=pairs), f"{number} of {len(whole)} training targets are exchanged among each other"


def is_whole(pair: Pair) -> bool:
    """Tell whether a pair has both sides."""
    return bool(pair.source.strip() and pair.target.strip())


def _plain(text: str) -> str:
    """Reduce a sentence to its letters and digits, small and composed, to compare it by."""
    letters = unicodedata.normalize("NFC", text).casefold()
    return "".join(letter for letter in letters if letter.isalnum()) or text
