"""Where parallel text comes from: a folder of files, the `datasets` library, or the phrasebook.

A source lists its splits, named as fairseq names them (`train`, `valid`, `test`, `test1`, ...). The pairs of
a split are a stream that can be opened again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from attn_reg_plugin.corpora import phrasebook
from attn_reg_plugin.corpora.arrangement import DEFAULT, Arrangement, Split
from attn_reg_plugin.corpora.manifest import sha256
from attn_reg_plugin.corpora.parallel import Pair, read_pairs
from attn_reg_plugin.files import find_text, one_line, read_lines

#: the data set on the Hugging Face hub, and its configuration for a language other than English
HUB = "wmt/wmt16"
HUB_CONFIGURATIONS = {"ro": "ro-en", "tr": "tr-en"}
_VALID_NAMES = ("newsdev2016", "valid", "dev")


class Source(Protocol):
    """What a preparation needs to know of a source."""

    def describe(self) -> dict[str, Any]:
        """What makes this source differ from another, for the manifest: JSON values, no absolute paths."""
        ...

    def splits(self, scratch: Path) -> tuple[list[Split], list[str]]:
        """The splits, training first, and sentences that the user should know; `scratch` is a new folder."""
        ...


class FolderSource:
    """Parallel files `train.*`, `newsdev2016.*` (or `valid.*`, `dev.*`), `newstest*.*` (or `test.*`).

    Args:
        folder: where they are, each plain or `.gz`.
        languages: source and target.
        limit: read only the first training pairs.
        origins: keep only the training pairs whose line of `train.origin` is one of these.
        arrangement: what becomes of the splits.

    Raises:
        FileNotFoundError: no such folder, or a file that is needed is not there (lists what is).
        ValueError: an origin that `train.origin` does not have (lists those it has).
    """

    def __init__(
        self,
        folder: Path,
        languages: tuple[str, str],
        limit: int | None = None,
        origins: Iterable[str] = (),
        arrangement: Arrangement = DEFAULT,
    ) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"--source {folder}: no such folder (give 'hub' or a folder of parallel files)")
        self.folder, self.languages, self.limit, self.arrangement = folder, languages, limit, arrangement
        self.origins = frozenset(origins)
        self.train = self._pair("train")
        self.valid_name, self.valid = self._first(_VALID_NAMES)
        tests = sorted(self._stems("newstest")) or [name for name in ["test"] if name in self._stems("test")]
        self.tests = {name: self._pair(name) for name in tests}
        self.origin_file = self._check_origins() if self.origins else None

    def _stems(self, prefix: str) -> set[str]:
        """Names of splits of which at least one side is there."""
        names = (path.name.removesuffix(".gz").rpartition(".") for path in self.folder.glob(f"{prefix}*"))
        return {stem for stem, _, language in names if language in self.languages}

    def _pair(self, stem: str) -> tuple[Path, Path]:
        found = [find_text(self.folder, f"{stem}.{language}") for language in self.languages]
        if found[0] is None or found[1] is None:
            missing = [f"{stem}.{name}" for name, path in zip(self.languages, found, strict=True) if path is None]
            there = ", ".join(sorted(path.name for path in self.folder.iterdir())) or "nothing"
            raise FileNotFoundError(f"{self.folder} has no {' and no '.join(missing)} (plain or .gz); it has: {there}")
        return found[0], found[1]

    def _first(self, names: Iterable[str]) -> tuple[str, tuple[Path, Path]]:
        names = tuple(names)
        there = [name for name in names if name in self._stems(name)]
        name = there[0] if there else names[0]
        return name, self._pair(name)

    def _check_origins(self) -> Path:
        path = find_text(self.folder, "train.origin")
        if path is None:
            raise FileNotFoundError(f"--origin needs {self.folder / 'train.origin'}, which is not there")
        known = set(read_lines(path))
        for origin in sorted(self.origins - known):
            raise ValueError(f"--origin {origin!r}: {path} has only {', '.join(sorted(known))}")
        return path

    def describe(self) -> dict[str, Any]:
        """The files by name, with the hash of each."""
        files = [*self.train, *self.valid, *(path for pair in self.tests.values() for path in pair)]
        if self.origin_file:
            files.append(self.origin_file)
        names = {path.name: sha256(path) for path in files}
        return {"kind": "folder", "files": names, **self.arrangement.describe()}

    def _train_pairs(self) -> Iterator[Pair]:
        pairs = read_pairs(*self.train)
        if self.origin_file is not None:
            pairs = self._of_origins(pairs, self.origin_file)
        return islice(pairs, self.limit)

    def _of_origins(self, pairs: Iterator[Pair], path: Path) -> Iterator[Pair]:
        origins, last = read_lines(path), 0
        for pair in pairs:
            origin = next(origins, None)
            if origin is None:
                raise ValueError(f"{path}, line {pair.line} is missing: {self.train[0]} has a line {pair.line}")
            if origin in self.origins:
                yield pair
            last = pair.line
        if next(origins, None) is not None:
            raise ValueError(f"{self.train[0]}, line {last + 1} is missing: {path} has a line {last + 1}")

    def splits(self, scratch: Path) -> tuple[list[Split], list[str]]:
        """The splits; without a test set, the validation pairs are split in halves."""

        def split(name: str, title: str, paths: tuple[Path, Path]) -> Split:
            return Split(name, title, (str(paths[0]), str(paths[1])), lambda: read_pairs(*paths))

        train = Split("train", "train", (str(self.train[0]), str(self.train[1])), self._train_pairs)
        tests = [split(f"test{number or ''}", title, paths) for number, (title, paths) in enumerate(self.tests.items())]
        return self.arrangement.of(train, split("valid", self.valid_name, self.valid), tests)


class HubSource:
    """WMT16 through the `datasets` library, streamed.

    Args:
        languages: source and target; one is English.
        limit: read only the first training pairs.
        load_dataset: `datasets.load_dataset`, or a function in its place.
        arrangement: what becomes of the splits.
    """

    #: the data set's name of a split, fairseq's, and WMT's
    SPLITS = (
        ("train", "train", "train"),
        ("validation", "valid", "newsdev2016"),
        ("test", "test", "newstest2016"),
    )

    def __init__(
        self,
        languages: tuple[str, str],
        limit: int | None = None,
        load_dataset: Callable[..., Any] | None = None,
        arrangement: Arrangement = DEFAULT,
    ) -> None:
        self.languages, self.limit, self._load_dataset = languages, limit, load_dataset
        self.arrangement = arrangement
        self.configuration = HUB_CONFIGURATIONS[languages[1] if languages[0] == "en" else languages[0]]

    def describe(self) -> dict[str, Any]:
        """The data set and its configuration."""
        data = {"kind": "hub", "dataset": HUB, "configuration": self.configuration}
        return {**data, **self.arrangement.describe()}

    def _load(self) -> Any:
        load_dataset = self._load_dataset
        if load_dataset is None:
            try:
                from datasets import load_dataset
            except ImportError:
                raise ValueError("--source hub needs the datasets library: pip install datasets") from None
        try:
            return load_dataset(HUB, self.configuration, streaming=True)
        except Exception as error:
            raise ValueError(self._failure(error)) from error

    def _failure(self, error: Exception) -> str:
        reason = (str(error).splitlines() or [""])[0]
        return (
            f"{HUB} ({self.configuration}) could not be read through the datasets library "
            f"({type(error).__name__}: {reason}): give --source a folder of parallel files instead"
        )

    def _pairs(self, rows: Iterable[Any], place: str) -> Iterator[Pair]:
        stream, number = iter(rows), 0
        while True:
            try:
                row = next(stream)
            except StopIteration:
                return
            except Exception as error:
                raise ValueError(self._failure(error)) from error
            number += 1
            try:
                source, target = (row["translation"][language] for language in self.languages)
                pair = Pair(number, one_line(source), one_line(target))
            except (KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{place}, row {number}: no 'translation' with '{self.languages[0]}' and "
                    f"'{self.languages[1]}' in it"
                ) from None
            yield pair

    def splits(self, scratch: Path) -> tuple[list[Split], list[str]]:
        """The splits; nothing is downloaded before their pairs are read."""
        data = self._load()
        missing = [key for key, _, _ in self.SPLITS[:2] if key not in data]
        if missing:
            raise ValueError(f"{HUB} ({self.configuration}) has no split {missing[0]!r}; it has: {', '.join(data)}")

        def split(key: str, name: str, title: str) -> Split:
            place = f"{HUB} {self.configuration} {key}"
            limit = self.limit if name == "train" else None
            sides = (f"{place} ({self.languages[0]})", f"{place} ({self.languages[1]})")
            return Split(name, title, sides, lambda: islice(self._pairs(data[key], place), limit))

        train, valid, test = (split(*item) for item in self.SPLITS)
        return self.arrangement.of(train, valid, [test] if "test" in data else [])


@dataclass(frozen=True)
class PhrasebookSource:
    """The phrasebook.

    Attributes:
        languages: source and target.
        train, valid, test: how many pairs.
        seed: of the random choice of training pairs, and of those whose targets are exchanged.
        noise: share of the training targets that are exchanged among each other, in [0, 1].
    """

    languages: tuple[str, str]
    train: int
    valid: int
    test: int
    seed: int
    noise: float = 0.0

    def describe(self) -> dict[str, Any]:
        """The sizes, the seed and, if there is any, the noise and how many targets it exchanges."""
        noise = {"noise": self.noise, "exchanged": round(self.noise * self.train)} if self.noise else {}
        return {
            "kind": "phrasebook",
            "train": self.train,
            "valid": self.valid,
            "test": self.test,
            "seed": self.seed,
            **noise,
        }

    def splits(self, scratch: Path) -> tuple[list[Split], list[str]]:
        """The splits; `scratch` is not used."""
        made = phrasebook.splits(self.train, self.valid, self.test, self.seed)
        return [self._split(name, triples) for name, triples in made.items()], []

    def _split(self, name: str, triples: list[phrasebook.Triple]) -> Split:
        sources, targets = ([getattr(triple, language) for triple in triples] for language in self.languages)
        if name == "train":
            targets = phrasebook.exchange(targets, self.noise, self.seed)
        pairs = [Pair(line, *pair) for line, pair in enumerate(zip(sources, targets, strict=True), start=1)]
        places = (f"phrasebook {name} ({self.languages[0]})", f"phrasebook {name} ({self.languages[1]})")
        return Split(name, name, places, lambda: iter(pairs))
