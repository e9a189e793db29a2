"""`attn-reg prepare`: a parallel corpus made ready for `fairseq-train`.

    attn-reg prepare text --pair en-fr --source FOLDER --out DIR
    attn-reg prepare text --pair en-fr --source FOLDER --out DIR --opus-mt CONVERTED
    attn-reg prepare wmt16 --pair en-ro --out DIR
    attn-reg prepare phrasebook --pair en-tr --out DIR

Afterwards DIR holds:

    raw/SPLIT.LANGUAGE      the text, one sentence per line: references to score against, and what was trained on
    spm.model, dict.txt     sentencepiece model and fairseq dictionary (spm.en.model, dict.en.txt if separate)
    opus_mt/                instead of spm.model, with --opus-mt: the tokenizer and the settings of that model
    pieces/SPLIT.LANGUAGE   the encoded text
    bin/                    fairseq's binaries and dictionaries: the folder to give to fairseq-train
    manifest.json           what was asked for, counts, versions and the hash of every file

SPLIT is `train`, `valid`, `test`, `test1`, ...; `names` in the manifest says which test set each is. There are four
stages, and the manifest says which are done. A run that was killed is simply started again: what an unfinished stage
wrote is replaced.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from attn_reg_plugin.corpora import manifest
from attn_reg_plugin.corpora.arrangement import Arrangement, Split
from attn_reg_plugin.corpora.options import HUB, PhrasebookOptions, PrepareOptions, TextOptions, Wmt16Options
from attn_reg_plugin.corpora.parallel import STRIPPED, normalize, read_pairs
from attn_reg_plugin.corpora.sources import FolderSource, HubSource, PhrasebookSource, Source
from attn_reg_plugin.dictionaries import UNKNOWN
from attn_reg_plugin.files import lock_folder, naming

__all__ = ["PhrasebookOptions", "TextOptions", "Wmt16Options", "prepare"]

#: options that do not change what is written, or that the source and the pieces describe
_UNRECORDED = {"out", "workers", "overwrite", "source", "spm_model", "dictionary", "opus_mt", "source_prefix"}
_UNRECORDED |= {"train", "valid", "test", "seed", "noise", "split_valid", "set_aside"}
#: in the output folder while a process works there
_LOCK = ".lock"
#: how an index of fairseq's mmap format begins
_MAGIC = b"MMIDIDX\x00\x00"


@dataclass(frozen=True)
class Work:
    """The task of a stage.

    Attributes:
        options: what was asked for.
        source: where the text comes from; only the first stage reads it.
        splits: fairseq's name of a split -> its title and counts; known after the first stage.
    """

    options: PrepareOptions
    source: Source
    splits: dict[str, dict[str, Any]]

    @property
    def out(self) -> Path:
        """The output folder."""
        return self.options.out


def prepare(wanted: PrepareOptions, load_dataset: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Prepare a corpus, or what is still missing of it.

    Args:
        wanted: the options.
        load_dataset: used in place of `datasets.load_dataset` where the source is the hub.

    Returns:
        The content of `manifest.json`.

    Raises:
        ValueError: an option or a file that cannot be used; one sentence that says which, and where. Or another
            process works in the folder.
        FileNotFoundError: a folder or file that is missing.
        OSError: a path cannot be read or written.
    """
    for module, package in (("fairseq_cli", "fairseq-fixed"), ("sentencepiece", "sentencepiece")):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"{package} is not installed, and preparing a corpus needs it: pip install {package}")
    from attn_reg_plugin.corpora.pieces import describe

    source = _source(wanted, load_dataset)
    _check_inputs(wanted)
    fields = (field.name for field in dataclasses.fields(wanted) if field.name not in _UNRECORDED)
    request = {"corpus": wanted.CORPUS, "source": source.describe(), **describe(wanted)}
    request |= {name: getattr(wanted, name) for name in fields}
    if wanted.out.exists() and not wanted.out.is_dir():
        raise ValueError(f"--out {wanted.out} is a file: it must be a folder, or not exist yet")
    wanted.out.mkdir(parents=True, exist_ok=True)
    with naming(wanted.out), lock_folder(wanted.out, _LOCK):
        return _carry_out(wanted, source, json.loads(json.dumps(request)))


def _source(wanted: PrepareOptions, load_dataset: Callable[..., Any] | None) -> Source:
    if isinstance(wanted, PhrasebookOptions):
        sizes = {"train": wanted.train, "valid": wanted.valid, "test": wanted.test}
        return PhrasebookSource(wanted.languages, sizes, wanted.seed, wanted.noise)
    assert isinstance(wanted, TextOptions)
    arrangement = Arrangement(wanted.split_valid, wanted.set_aside, wanted.noise, wanted.seed)
    if isinstance(wanted, Wmt16Options) and wanted.source == HUB:
        return HubSource(wanted.languages, wanted.limit, load_dataset, arrangement)
    return FolderSource(Path(wanted.source), wanted.languages, wanted.limit, wanted.origin, arrangement)


def _check_inputs(wanted: PrepareOptions) -> None:
    """Refuse to read what would be replaced."""
    inputs = {"--spm-model": wanted.spm_model, "--dictionary": wanted.dictionary}
    inputs["--opus-mt"] = (wanted.opus_mt,) if wanted.opus_mt else ()
    inputs["--source"] = (Path(wanted.source),) if isinstance(wanted, TextOptions) and wanted.source != HUB else ()
    for option, paths in inputs.items():
        for path in paths:
            real, out = Path(os.path.realpath(path)), Path(os.path.realpath(wanted.out))
            inside = real.relative_to(out).parts if real.is_relative_to(out) else ()
            if inside and any(Path(inside[0]).match(name) for name in _OWNED):
                raise ValueError(f"{option} {path} lies in what --out {wanted.out} replaces: give another folder")


def _carry_out(wanted: PrepareOptions, source: Source, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out the stages that are missing, in a folder that is held."""
    out, data = wanted.out, _recorded(wanted, request)
    names = [name for name, _, _ in STAGES]
    first = next((number for number, name in enumerate(names) if not manifest.done(out, data, name)), len(names))
    if first == len(names) and data["complete"]:
        print(f"already prepared: {out}")
        return data
    if first:
        print(f"continuing after stage {names[first - 1]}")
    data["complete"], data["stages"] = False, {name: data["stages"][name] for name in names[:first]}
    manifest.save(out, data)
    _remove(out, [pattern for _, _, patterns in STAGES[first:] for pattern in patterns])
    for name, stage, patterns in STAGES[first:]:
        print(f"stage {name} ...", flush=True)
        data = manifest.merge(data, stage(Work(wanted, source, data.get("splits", {}))))
        data["stages"][name] = manifest.hashes(out, patterns)
        manifest.save(out, data)
    data |= {"complete": True, "versions": _versions()}
    manifest.save(out, data)
    _report(data, wanted)
    return data


def _versions() -> dict[str, str]:
    """The versions of the packages that made the files."""
    found = {}
    for name in ("fairseq", "fairseq-fixed", "sentencepiece"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _recorded(wanted: PrepareOptions, request: dict[str, Any]) -> dict[str, Any]:
    """Read the folder's record, or begin a new one; an unfinished preparation with other options gives way.

    Raises:
        ValueError: the folder was prepared for another request (the sentence says what differs), or something else
            wrote into it.
    """
    out, new = wanted.out, {"complete": False, "request": request, "stages": {}}
    try:
        old = manifest.read(out)
    except ValueError:
        if not wanted.overwrite:
            raise
        old = None
    if old is not None and old["request"] == request:
        return old
    foreign = sorted(path.name for name in _OWNED for path in out.glob(name))
    if not wanted.overwrite and old is None and foreign:
        raise ValueError(
            f"{out} holds {', '.join(foreign)} but no {manifest.NAME}, so something else wrote it: give --out another "
            "folder, or --overwrite to replace it"
        )
    if not wanted.overwrite and old is not None:
        if old["complete"]:
            raise ValueError(
                f"{out} was prepared with other options or from other files "
                f"({manifest.differences(old['request'], request)}): give --out another folder, or --overwrite to "
                "replace it"
            )
        print(f"starting anew: {out} holds only an unfinished preparation with other options")
    _remove(out, _OWNED)
    return new


def _remove(folder: Path, patterns: Iterable[str]) -> None:
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _report(data: dict[str, Any], wanted: PrepareOptions) -> None:
    """Say what was made."""
    for note in data["notes"]:
        print(f"note: {note}")
    for name in sorted(data["splits"], key=_order):
        split = data["splits"][name]
        dropped = ", ".join(f"{count} {reason}" for reason, count in split["dropped"].items() if count)
        unknown = split["source_unknown"] + split["target_unknown"]
        print(
            f"{name} ({split['title']}): {split['kept']} pairs"
            + (f", dropped {dropped}" if dropped else "")
            + (f", {split['truncated']} truncated" if split.get("truncated") else "")
            + (f", {unknown} unknown pieces" if unknown else "")
        )
    for name, model in data["spm"]["models"].items():
        print(f"{name}: {model['pieces']} pieces, dictionary of {model['dictionary_size']}")
    print(f"prepared {wanted.out}: fairseq-train {wanted.out / 'bin'} ...")


def _order(split: str) -> tuple[int, int, str]:
    """Sort splits: train, valid, test, test1, ..., test10."""
    return ("tr", "va", "te").index(split[:2]), len(split), split


# -- stage raw --------------------------------------------------------------------------------------------------------


def raw(work: Work) -> dict[str, Any]:
    """Write `raw/SPLIT.LANGUAGE`: the text, one sentence per line, without empty training pairs.

    Raises:
        ValueError: an empty line where none may be, or a split without any pair.
    """
    (work.out / "raw").mkdir()
    splits, notes = work.source.splits()
    counts = {split.name: _write_raw(split, work.out / "raw", work.options) for split in splits}
    stripped = work.options.rule(work.options.languages[1]) == STRIPPED
    return {
        "names": {split.name: split.title for split in splits},
        "notes": notes,
        "references": STRIPPED if stripped else "unchanged",
        "splits": counts,
    }


def _write_raw(split: Split, folder: Path, options: PrepareOptions) -> dict[str, Any]:
    """Write a split; its counts."""
    rules = [options.rule(language) for language in options.languages]
    if split.name != "train" and rules[1] != STRIPPED:
        rules[1] = "none"  # a reference stays as it was published
    tolerant = split.name == "train" and not options.strict
    read = empty = 0
    with _writers(folder, split.name, options.languages) as files:
        for pair in _progress(split.pairs(), f"reading {split.title}"):
            read += 1
            if not pair.source.strip() or not pair.target.strip():
                if not tolerant:
                    place = split.places[1 if pair.source.strip() else 0]
                    raise ValueError(f"{place}, line {pair.line}: empty; every line must hold a sentence")
                empty += 1
                continue
            for file, text, rule in zip(files, pair[1:], rules, strict=True):
                file.write(normalize(text, rule) + "\n")
    if read == empty:
        raise ValueError(f"{split.places[0]} and {split.places[1]} give no pair at all for {split.name}")
    return {"title": split.title, "read": read, "dropped": {"empty": empty}, "kept": read - empty}


@contextmanager
def _writers(folder: Path, split: str, languages: tuple[str, str]) -> Iterator[tuple[TextIO, TextIO]]:
    """Open the two text files of a split for writing."""
    source, target = (folder / f"{split}.{language}" for language in languages)
    options = {"mode": "w", "encoding": "utf-8", "newline": "\n"}
    with source.open(**options) as source_file, target.open(**options) as target_file:
        yield source_file, target_file


def _progress(items: Iterator[Any], description: str) -> Iterator[Any]:
    """Count items by a bar while standard error is a terminal."""
    from tqdm import tqdm

    yield from tqdm(items, description, disable=None, leave=False, unit="")


# -- stages spm and encode --------------------------------------------------------------------------------------------


def spm(work: Work) -> dict[str, Any]:
    """Write the sentencepiece models and their fairseq dictionaries, or those of an OPUS-MT model."""
    from attn_reg_plugin.corpora.pieces import write_models

    return {"spm": write_models(work.options, work.out)}


def encode(work: Work) -> dict[str, Any]:
    """Write `pieces/SPLIT.LANGUAGE`: pieces with spaces between; training pairs of a bad length are left out or cut.

    Raises:
        ValueError: a validation or test line of which no piece is left, or no training pair that is.
    """
    from attn_reg_plugin.corpora.pieces import encoders

    (work.out / "pieces").mkdir()
    encode_sides = [encoder.encode for encoder in encoders(work.options, work.out)]
    return {"splits": {name: _encode_split(work, name, encode_sides) for name in work.splits}}


def _encode_split(work: Work, split: str, encode_sides: list[Callable[[str], list[str]]]) -> dict[str, Any]:
    """Encode a split; its counts, which `_write_raw`'s are completed with."""
    options, most = work.options, work.options.max_pieces
    rules = [options.rule(language) for language in options.languages]
    paths = [work.out / "raw" / f"{split}.{language}" for language in options.languages]
    counts: Counter[str] = Counter()
    pairs = _progress(read_pairs(*paths), f"encoding {work.splits[split]['title']}")
    with _writers(work.out / "pieces", split, options.languages) as files:
        for pair in pairs:
            sides = [
                encode_side(normalize(text, rule))
                for encode_side, text, rule in zip(encode_sides, pair[1:], rules, strict=True)
            ]
            reason = _reason(*map(len, sides), options)
            if split == "train" and reason:
                counts[reason] += 1
                continue
            if split == "train" and max(map(len, sides)) > most:
                counts["truncated"] += 1
                sides = [side[:most] for side in sides]
            if reason == "no_pieces":
                path = paths[1 if sides[0] else 0]
                raise ValueError(f"{path}, line {pair.line}: sentencepiece leaves nothing of this line")
            counts["kept"] += 1
            for file, pieces, name in zip(files, sides, ("source", "target"), strict=True):
                file.write(" ".join(pieces) + "\n")
                counts[f"{name}_pieces"] += len(pieces)
                counts[f"{name}_unknown"] += pieces.count(UNKNOWN)
    if not counts["kept"]:
        raise ValueError(
            f"no training pair is left: --max-pieces {most} and --max-ratio {options.max_ratio} drop all "
            f"{counts.total()}"
        )
    names = ("kept", "source_pieces", "target_pieces", "source_unknown", "target_unknown")
    facts: dict[str, Any] = {name: counts[name] for name in names}
    if split == "train":
        facts["dropped"] = {name: counts[name] for name in ("no_pieces", "too_long", "ratio")}
        facts |= {"truncated": counts["truncated"]} if options.long_pairs == "truncate" else {}
    return facts


def _reason(source: int, target: int, options: PrepareOptions) -> str:
    """Say why a training pair of these lengths is dropped; empty where it is kept."""
    shorter, longer = sorted((source, target))
    if shorter == 0:
        return "no_pieces"
    if longer > options.max_pieces and options.long_pairs == "drop":
        return "too_long"
    return "ratio" if longer > options.max_ratio * shorter else ""


# -- stage binarize ---------------------------------------------------------------------------------------------------


def binarize(work: Work) -> dict[str, Any]:
    """Write `bin/` with fairseq's own preprocessing.

    Raises:
        ValueError: fairseq failed, or its files do not have a sequence for every pair.
    """
    options = work.options
    preprocess(work.out, options.languages, list(work.splits), options.dictionaries, options.workers)
    check_counts(work.out / "bin", options.languages, {name: split["kept"] for name, split in work.splits.items()})
    return {}


def preprocess(
    folder: Path, languages: tuple[str, str], splits: Sequence[str], dictionaries: tuple[str, str], workers: int = 1
) -> None:
    """Run `fairseq_cli.preprocess` from `pieces/SPLIT.LANGUAGE` to `bin/` of a folder, in a process of its own.

    Args:
        folder: holds `pieces/` and the dictionaries; paths given to fairseq are relative to it, because fairseq splits
            lists of paths at commas.
        languages: source and target.
        splits: `train`, `valid`, `test`, `test1`, ... in any order.
        dictionaries: the file of the source and of the target, relative to `folder` (twice the same if joined).
        workers: how many processes.

    Raises:
        ValueError: fairseq failed; the sentence ends with its last line.
    """
    tests = [f"pieces/{name}" for name in sorted(splits, key=_order) if name.startswith("test")]
    flags = {
        "source-lang": languages[0],
        "target-lang": languages[1],
        "trainpref": "pieces/train",
        "validpref": "pieces/valid",
        "testpref": ",".join(tests),
        "srcdict": dictionaries[0],
        "tgtdict": dictionaries[1],
        "destdir": "bin",
        "workers": str(workers),
    }
    command = [sys.executable, "-P", "-m", "fairseq_cli.preprocess"]
    command += [word for name, value in flags.items() for word in (f"--{name}", value)]
    result = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if result.returncode != 0:
        lines = result.stdout.strip().splitlines() or ["it said nothing"]
        raise ValueError(f"fairseq_cli.preprocess failed with status {result.returncode}: {lines[-1]}")
    (folder / "bin" / "preprocess.log").unlink(missing_ok=True)  # times and paths, different in every run


def check_counts(destination: Path, languages: tuple[str, str], expected: Mapping[str, int]) -> None:
    """Check that every binary has as many sequences as its split has pairs.

    Args:
        destination: fairseq's folder of binaries.
        languages: source and target.
        expected: split -> number of pairs.

    Raises:
        ValueError: a number differs.
    """
    for split, pairs in expected.items():
        for language in languages:
            index = destination / f"{split}.{languages[0]}-{languages[1]}.{language}.idx"
            found = count_sequences(index)
            if found != pairs:
                raise ValueError(f"fairseq wrote {found} sequences to {index.name}, but {split} has {pairs} pairs")


def count_sequences(index: Path) -> int:
    """Read how many sequences a fairseq index file (`*.idx`, mmap format) has.

    Raises:
        ValueError: it is not such a file.
    """
    with index.open("rb") as file:
        head = file.read(len(_MAGIC) + 17)
    if len(head) != len(_MAGIC) + 17 or not head.startswith(_MAGIC):
        raise ValueError(f"{index} is not an index of fairseq's mmap format")
    return struct.unpack("<QBQ", head[len(_MAGIC) :])[2]


#: in order: name, function, and the names that it writes into the output folder
STAGES: tuple[tuple[str, Callable[[Work], dict[str, Any]], tuple[str, ...]], ...] = (
    ("raw", raw, ("raw",)),
    ("spm", spm, ("opus_mt", "spm.model", "dict.txt", "spm.*.model", "dict.*.txt")),
    ("encode", encode, ("pieces",)),
    ("binarize", binarize, ("bin",)),
)
_OWNED = tuple(pattern for _, _, patterns in STAGES for pattern in patterns)
