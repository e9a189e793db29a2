"""The four stages of a preparation: raw text, sentencepiece, encoding, binarization.

Each reads what earlier stages left in the output folder, writes into a folder of its own (whose content is
moved to the output folder once the stage is complete) and returns facts for the manifest. Text goes through
line by line.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from attn_reg_plugin.corpora import binarize, pieces
from attn_reg_plugin.corpora import opus_mt_pieces as opus_mt_prepare
from attn_reg_plugin.corpora.manifest import sha256
from attn_reg_plugin.corpora.parallel import read_pairs
from attn_reg_plugin.corpora.pieces import PieceModel
from attn_reg_plugin.corpora.preparation_options import PrepareOptions
from attn_reg_plugin.corpora.progress_bar import track
from attn_reg_plugin.corpora.romanian import STRIPPED, normalize
from attn_reg_plugin.corpora.sources import Source, Split
from attn_reg_plugin.dictionaries import SPECIAL, UNKNOWN, read_dictionary, write_dictionary
from attn_reg_plugin.files import read_lines


class Encoder(Protocol):
    """What turns a line into pieces."""

    def encode(self, text: str) -> list[str]:
        """The pieces of a line; empty where nothing is left."""
        ...


@dataclass(frozen=True)
class Work:
    """What a stage works on.

    Attributes:
        options: what was asked for.
        source: where the text comes from; only the first stage reads it.
        out: the output folder.
        temporary: the stage's own folder, empty, inside `out`.
        splits: fairseq's name of a split -> its title and counts; known after the first stage.
    """

    options: PrepareOptions
    source: Source
    out: Path
    temporary: Path
    splits: dict[str, dict[str, Any]]


def raw(work: Work) -> dict[str, Any]:
    """Write `raw/SPLIT.LANGUAGE`: the text, one sentence per line, without empty training pairs.

    Raises:
        ValueError: an empty line where none may be, or a split without any pair.
    """
    scratch, folder = work.temporary / "scratch", work.temporary / "raw"
    scratch.mkdir()
    folder.mkdir()
    splits, notes = work.source.splits(scratch)
    counts = {split.name: _write_raw(split, folder, work.options) for split in splits}
    shutil.rmtree(scratch)
    return {
        "names": {split.name: split.title for split in splits},
        "notes": notes,
        "references": "unchanged" if work.options.rule(work.options.languages[1]) != STRIPPED else STRIPPED,
        "splits": counts,
    }


def _write_raw(split: Split, folder: Path, options: PrepareOptions) -> dict[str, Any]:
    """Write a split; its counts."""
    source, target = options.languages
    rules = options.rule(source), options.rule(target)
    if split.name != "train" and rules[1] != STRIPPED:
        rules = rules[0], "none"  # a reference stays as it was published
    tolerant = split.name == "train" and not options.strict
    read = empty = 0
    with (
        _writers(folder, split.name, options.languages) as (source_file, target_file),
        track(split.pairs(), f"reading {split.title}") as pairs,
    ):
        for pair in pairs:
            read += 1
            if not pair.source.strip() or not pair.target.strip():
                if not tolerant:
                    place = split.places[1 if pair.source.strip() else 0]
                    raise ValueError(f"{place}, line {pair.line}: empty; every line must hold a sentence")
                empty += 1
                continue
            source_file.write(normalize(pair.source, rules[0]) + "\n")
            target_file.write(normalize(pair.target, rules[1]) + "\n")
    if read == empty:
        raise ValueError(f"{split.places[0]} and {split.places[1]} give no pair at all for {split.name}")
    return {"title": split.title, "read": read, "dropped": {"empty": empty}, "kept": read - empty}


@contextmanager
def _writers(folder: Path, split: str, languages: tuple[str, str]) -> Iterator[tuple[TextIO, TextIO]]:
    """The two text files of a split, open for writing."""
    source, target = (folder / f"{split}.{language}" for language in languages)
    with (
        source.open("w", encoding="utf-8", newline="\n") as source_file,
        target.open("w", encoding="utf-8", newline="\n") as target_file,
    ):
        yield source_file, target_file


def spm(work: Work) -> dict[str, Any]:
    """Write the sentencepiece models and their fairseq dictionaries, trained here or reused.

    Raises:
        ValueError: a vocabulary size that does not suit the text, a file that is not a model, or a dictionary
            that does not fit its model.
    """
    options = work.options
    if options.opus_mt is not None:
        return {"spm": opus_mt_prepare.write(options, work.temporary)}
    facts: dict[str, Any] = {"kind": options.spm, "models": {}}
    for number, (name, dictionary) in enumerate(options.models.items()):
        path, target = work.temporary / name, work.temporary / dictionary
        if options.vocab_size is None:
            PieceModel(options.spm_model[number])  # so that a refusal names the file that was given
            shutil.copyfile(options.spm_model[number], path)
        else:
            languages = options.languages if options.spm == "joint" else options.languages[number : number + 1]
            with track(_training_text(work, languages), f"training {name}") as text:
                pieces.train_model(text, path, options.vocab_size, options.character_coverage)
        model = PieceModel(path)
        if options.dictionary:
            pieces.check_fit(model, options.spm_model[number], options.dictionary[number])
            shutil.copyfile(options.dictionary[number], target)
        else:
            write_dictionary(model.symbols, target)
        pieces.check_fit(model, path, target)
        size = len(read_dictionary(target)) + len(SPECIAL)
        facts["models"][name] = {
            "dictionary": dictionary,
            "dictionary_size": size,
            "pieces": len(model.symbols),
            "reused": bool(options.spm_model),
        }
    return {"spm": facts}


def _training_text(work: Work, languages: tuple[str, ...]) -> Iterator[str]:
    for language in languages:
        for line in read_lines(work.out / "raw" / f"train.{language}"):
            yield normalize(line, work.options.rule(language))


def encode(work: Work) -> dict[str, Any]:
    """Write `pieces/SPLIT.LANGUAGE`: pieces with spaces between; training pairs of a bad length are left out or cut.

    Raises:
        ValueError: a validation or test line of which no piece is left, or no training pair that is.
    """
    (work.temporary / "pieces").mkdir()
    if work.options.opus_mt is not None:
        source, target = opus_mt_prepare.sides(work.options, work.out)
    else:
        models = [PieceModel(work.out / name) for name in work.options.models]
        source, target = models[0], models[-1]
    return {"splits": {name: _encode_split(work, name, source, target) for name in work.splits}}


def _encode_split(work: Work, split: str, source_model: Encoder, target_model: Encoder) -> dict[str, Any]:
    """Encode a split; its counts, which `_write_raw`'s are completed with."""
    options = work.options
    rules = [options.rule(language) for language in options.languages]
    paths = [work.out / "raw" / f"{split}.{language}" for language in options.languages]
    counts: Counter[str] = Counter()
    with (
        _writers(work.temporary / "pieces", split, options.languages) as files,
        track(read_pairs(*paths), f"encoding {work.splits[split]['title']}") as pairs,
    ):
        for pair in pairs:
            source = source_model.encode(normalize(pair.source, rules[0]))
            target = target_model.encode(normalize(pair.target, rules[1]))
            reason = _reason(len(source), len(target), options)
            if split == "train" and reason:
                counts[reason] += 1
                continue
            if split == "train" and max(len(source), len(target)) > options.max_pieces:
                counts["truncated"] += 1
                source, target = source[: options.max_pieces], target[: options.max_pieces]
            if reason == "no_pieces":
                path = paths[1 if source else 0]
                raise ValueError(f"{path}, line {pair.line}: sentencepiece leaves nothing of this line")
            counts["kept"] += 1
            for file, sentence, side in zip(files, (source, target), ("source", "target"), strict=True):
                file.write(" ".join(sentence) + "\n")
                counts[f"{side}_pieces"] += len(sentence)
                counts[f"{side}_unknown"] += sentence.count(UNKNOWN)
    if not counts["kept"]:
        raise ValueError(
            f"no training pair is left: --max-pieces {options.max_pieces} and --max-ratio "
            f"{options.max_ratio} drop all {counts.total()}"
        )
    sides = ("kept", "source_pieces", "target_pieces", "source_unknown", "target_unknown")
    facts: dict[str, Any] = {name: counts[name] for name in sides}
    if split == "train":
        facts["dropped"] = {name: counts[name] for name in ("no_pieces", "too_long", "ratio")}
        facts |= {"truncated": counts["truncated"]} if options.long_pairs == "truncate" else {}
    return facts


def _reason(source: int, target: int, options: PrepareOptions) -> str:
    """Why a training pair of these lengths is dropped; empty where it is kept."""
    shorter, longer = sorted((source, target))
    if shorter == 0:
        return "no_pieces"
    if longer > options.max_pieces and options.long_pairs == "drop":
        return "too_long"
    return "ratio" if longer > options.max_ratio * shorter else ""


def binary(work: Work) -> dict[str, Any]:
    """Write `bin/` with fairseq's own preprocessing.

    Raises:
        ValueError: fairseq failed, or its files do not have a sequence for every pair.
    """
    options, destination = work.options, work.temporary / "bin"
    binarize.preprocess(
        work.out,
        destination,
        options.languages,
        list(work.splits),
        options.dictionaries,
        options.workers,
    )
    expected = {name: split["kept"] for name, split in work.splits.items()}
    binarize.check_counts(destination, options.languages, expected)
    return {}


def describe_models(options: PrepareOptions) -> dict[str, Any]:
    """The hashes of the models and dictionaries that are reused, for the manifest.

    Raises:
        FileNotFoundError: one of them is missing.
    """
    for path in (*options.spm_model, *options.dictionary):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
    return {
        "spm_model": [sha256(path) for path in options.spm_model],
        "dictionary": [sha256(path) for path in options.dictionary],
        **opus_mt_prepare.describe(options),
    }


#: in order: name and function
STAGES: tuple[tuple[str, Callable[[Work], dict[str, Any]]], ...] = (
    ("raw", raw),
    ("spm", spm),
    ("encode", encode),
    ("binarize", binary),
)
