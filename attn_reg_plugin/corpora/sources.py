"""Sources of parallel text: a folder of files, WMT16 through the `datasets` library, or the phrasebook.

A source lists its splits, named as fairseq names them (`train`, `valid`, `test`, `test1`, ...). The pairs of a split
are a stream that can be opened again and again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from attn_reg_plugin.corpora import phrasebook
from attn_reg_plugin.corpora.arrangement import Arrangement, Split
from attn_reg_plugin.corpora.manifest import sha256
from attn_reg_plugin.corpora.parallel import Pair, read_pairs
from attn_reg_plugin.files import find_text, one_line, read_lines

#: the data set on the Hugging Face hub; its splits, their names for fairseq, and their titles
WMT16 = "wmt/wmt16"
_HUB_SPLITS = (("train", "train", "train"), ("validation", "valid", "newsdev2016"), ("test", "test", "newstest2016"))
_VALID_NAMES = ("newsdev2016", "valid", "dev")


class Source(Protocol):
    """All that a preparation needs to know of a source."""

    def describe(self) -> dict[str, Any]:
        """Tell this source from another, for the manifest: JSON values, no absolute paths."""
        ...

    def splits(self) -> tuple[list[Split], list[str]]:
        """List the splits, training first, and sentences that the user should know."""
        ...


class FolderSource:
    """Parallel files `train.*`, `valid.*` (`dev.*`, `newsdev2016.*`) and `test.*`, `test1.*`, ... (`newstest*.*`).

    Args:
        folder: where they are, each plain or `.gz`.
        languages: source and target.
        limit: read only the first training pairs.
        origins: keep only the training pairs whose line of `train.origin` is one of these.
        arrangement: how the splits are changed.

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
        arrangement: Arrangement = Arrangement(),  # noqa: B008  it cannot change
    ) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"--source {folder}: no such folder; give a folder of parallel files")
        self.folder, self.languages, self.limit, self.arrangement = folder, languages, limit, arrangement
        self.origins = frozenset(origins)
        self.train = self._pair("train")
        names = (path.name.removesuffix(".gz").rpartition(".") for path in folder.iterdir())
        stems = {stem for stem, _, language in names if language in languages}
        self.valid_name = next((name for name in _VALID_NAMES if name in stems), "valid")
        self.valid = self._pair(self.valid_name)
        tests = [name for name in stems if name.startswith("newstest")]
        tests = tests or [name for name in stems if re.fullmatch(r"test\d*", name)]
        self.tests = {name: self._pair(name) for name in sorted(tests, key=lambda name: (len(name), name))}
        self.origin_file = self._check_origins() if self.origins else None

    def _pair(self, stem: str) -> tuple[Path, Path]:
        found = [find_text(self.folder, f"{stem}.{language}") for language in self.languages]
        if found[0] is None or found[1] is None:
            missing = [f"{stem}.{name}" for name, path in zip(self.languages, found, strict=True) if path is None]
            there = ", ".join(sorted(path.name for path in self.folder.iterdir())) or "nothing"
            raise FileNotFoundError(f"{self.folder} has no {' and no '.join(missing)} (plain or .gz); it has: {there}")
        return found[0], found[1]

    def _check_origins(self) -> Path:
        path = find_text(self.folder, "train.origin")
        if path is None:
            raise FileNotFoundError(f"--origin needs {self.folder / 'train.origin'}, which is not there")
        known = set(read_lines(path))
        for origin in sorted(self.origins - known):
            raise ValueError(f"--origin {origin!r}: {path} has only {', '.join(sorted(known))}")
        return path

    def describe(self) -> dict[str, Any]:
        """Name the files, with the hash of each."""
        files = [*self.train, *self.valid, *(path for pair in self.tests.values() for path in pair)]
        files += [self.origin_file] if self.origin_file else []
        return {"kind": "folder", "files": {path.name: sha256(path) for path in files}, **self.arrangement.describe()}

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

    def splits(self) -> tuple[list[Split], list[str]]:
        """List the splits; without a test set, the validation pairs are split in halves."""

        def split(name: str, title: str, paths: tuple[Path, Path]) -> Split:
            return Split(name, title, (str(paths[0]), str(paths[1])), lambda: read_pairs(*paths))

        train = Split("train", "train", (str(self.train[0]), str(self.train[1])), self._train_pairs)
        tests = [split("test", title, paths) for title, paths in self.tests.items()]
        return self.arrangement.of(train, split("valid", self.valid_name, self.valid), tests)


class HubSource:
    """WMT16 through the `datasets` library, streamed.

    Args:
        languages: source and target; one is English.
        limit: read only the first training pairs.
        load_dataset: `datasets.load_dataset`, or a function in its place.
        arrangement: how the splits are changed.
    """

    def __init__(
        self,
        languages: tuple[str, str],
        limit: int | None = None,
        load_dataset: Callable[..., Any] | None = None,
        arrangement: Arrangement = Arrangement(),  # noqa: B008  it cannot change
    ) -> None:
        self.languages, self.limit, self._load_dataset = languages, limit, load_dataset
        self.arrangement = arrangement
        self.configuration = f"{languages[1] if languages[0] == 'en' else languages[0]}-en"

    def describe(self) -> dict[str, Any]:
        """Name the data set and its configuration."""
        data = {"kind": "hub", "dataset": WMT16, "configuration": self.configuration}
        return {**data, **self.arrangement.describe()}

    def _load(self) -> Any:
        load_dataset = self._load_dataset
        if load_dataset is None:
            try:
                from datasets import load_dataset
            except ImportError:
                raise ValueError("--source hub needs the datasets library: pip install datasets") from None
        try:
            return load_dataset(WMT16, self.configuration, streaming=True)
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ValueError:
        reason = (str(error).splitlines() or [""])[0]
        return ValueError(
            f"{WMT16} ({self.configuration}) could not be read through the datasets library "
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
                raise self._failure(error) from error
            number += 1
            try:
                source, target = (one_line(row["translation"][language]) for language in self.languages)
            except (KeyError, TypeError, AttributeError):
                both = " and ".join(map(repr, self.languages))
                raise ValueError(f"{place}, row {number}: no 'translation' with {both} in it") from None
            yield Pair(number, source, target)

    def splits(self) -> tuple[list[Split], list[str]]:
        """List the splits; nothing is downloaded before their pairs are read."""
        data = self._load()
        missing = [key for key, _, _ in _HUB_SPLITS[:2] if key not in data]
        if missing:
            raise ValueError(f"{WMT16} ({self.configuration}) has no split {missing[0]!r}; it has: {', '.join(data)}")

        def split(key: str, name: str, title: str) -> Split:
            place = f"{WMT16} {self.configuration} {key}"
            limit = self.limit if name == "train" else None
            sides = (f"{place} ({self.languages[0]})", f"{place} ({self.languages[1]})")
            return Split(name, title, sides, lambda: islice(self._pairs(data[key], place), limit))

        train, valid, test = (split(*names) for names in _HUB_SPLITS)
        return self.arrangement.of(train, valid, [test] if "test" in data else [])


@dataclass(frozen=True)
class PhrasebookSource:
    """The phrasebook.

    Attributes:
        languages: source and target.
        sizes: how many pairs of train, valid and test.
        seed: of the random choice of training pairs, and of those whose targets are exchanged.
        noise: share of the training targets that are exchanged among each other, in [0, 1].
    """

    languages: tuple[str, str]
    sizes: Mapping[str, int]
    seed: int
    noise: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Give the sizes, the seed and, if there is any, the noise and how many targets it exchanges."""
        noise = {"noise": self.noise, "exchanged": round(self.noise * self.sizes["train"])} if self.noise else {}
        return {"kind": "phrasebook", **self.sizes, "seed": self.seed, **noise}

    def splits(self) -> tuple[list[Split], list[str]]:
        """List the three splits."""
        made = phrasebook.splits(**self.sizes, seed=self.seed)
        return [self._split(name, triples) for name, triples in made.items()], []

    def _split(self, name: str, triples: list[phrasebook.Triple]) -> Split:
        sources, targets = ([getattr(triple, language) for triple in triples] for language in self.languages)
        if name == "train":
            targets = phrasebook.exchange(targets, self.noise, self.seed)
        pairs = [Pair(line, *pair) for line, pair in enumerate(zip(sources, targets, strict=True), start=1)]
        places = (f"phrasebook {name} ({self.languages[0]})", f"phrasebook {name} ({self.languages[1]})")
        return Split(name, name, places, lambda: iter(pairs))
