"""`attn-reg prepare`: a parallel corpus made ready for `fairseq-train`.

Afterwards the folder that `--out` names, DIR, holds:

    raw/SPLIT.LANGUAGE      the text, one sentence per line: references to score against, and what was trained on
    spm.model, dict.txt     sentencepiece model and fairseq dictionary, of both languages together
    opus_mt/, dict.L.txt    instead, with --opus-mt: the tokenizer and the settings of that model, its dictionaries
    pieces/SPLIT.LANGUAGE   the encoded text
    bin/                    fairseq's binaries and dictionaries: the folder to give to fairseq-train
    manifest.json           what was asked for, counts, and the hash of every file read and written

SPLIT is `train`, `valid`, `test`, `test1`, ...; the manifest says which test set each is. All of it is made in a folder
beside DIR that takes its place at the end, so DIR holds the whole or nothing. The same request gives the same bytes,
and where they are there already, nothing is done. What a killed preparation leaves beside DIR, `.DIR.tmp-...`, may go.
"""

import dataclasses
import importlib.metadata
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attn_reg_plugin.corpora.options import PrepareOptions, TextOptions
from attn_reg_plugin.corpora.sources import Pair, Split, find_files, find_origins, is_whole, read_pairs, read_splits
from attn_reg_plugin.dictionaries import UNKNOWN
from attn_reg_plugin.files import read_json, sha256, whole_folder, write_json

MANIFEST = "manifest.json"
#: options that do not change what is written, or whose files are recorded by their hashes
_UNRECORDED = ("out", "workers", "source", "spm_model", "opus_mt")

#: why training pairs are left out
_DROPPED = ("empty", "no_pieces", "too_long", "ratio")
#: how many times as long as the other, in pieces, a side of a training pair may be
_MAX_RATIO = 9


def prepare(wanted: PrepareOptions) -> dict[str, Any]:
    """Prepare a corpus, unless that is done; the content of `manifest.json`.

    Raises:
        ValueError: an option, a file or a folder that cannot be used.
        OSError: a path is missing, or cannot be read or written.
    """
    out, request = wanted.out, _request(wanted)
    data = _earlier(out, request)
    if data is not None:
        print(f"already prepared: {out}")
        return data
    with whole_folder(out) as folder:
        data = _fill(wanted, request, folder)
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"another process has written to {out} meanwhile; start again")
    _report(data, wanted)
    return data


# -- what was asked for -----------------------------------------------------------------------------------------------


def _request(wanted: PrepareOptions) -> dict[str, Any]:
    """Record the options and the hashes of the files that are read, without their places; see what is reused."""
    from attn_reg_plugin.corpora.pieces import check_reused

    fields = (field.name for field in dataclasses.fields(wanted) if field.name not in _UNRECORDED)
    request = {"corpus": wanted.CORPUS, **{name: getattr(wanted, name) for name in fields}}
    request["reused"] = [sha256(path) for path in check_reused(wanted)]
    if isinstance(wanted, TextOptions) and not wanted.from_hub:
        files = [path for pair in find_files(wanted).values() for path in pair]
        files += [find_origins(wanted)] if wanted.origin else []
        request["source"] = {path.name: sha256(path) for path in files}
    return json.loads(json.dumps(request))


def _earlier(out: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Give the manifest of a folder that was prepared; None where there is none.

    Raises:
        ValueError: it is of another request, or a file is not as it was.
    """
    path = out / MANIFEST
    if not path.exists():
        return None
    try:
        old = read_json(path)
        before, files = dict(old["request"]), dict(old["files"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a manifest of attn-reg prepare: give --out another folder") from None
    if before != request:
        said = f"was prepared with other options or from other files ({_differences(before, request)})"
    elif changed := [name for name in files if not (out / name).is_file() or sha256(out / name) != files[name]]:
        said = f"is not as it was prepared: {changed[0]} is missing or changed"
    else:
        return old
    raise ValueError(f"{out} {said}: give --out another folder, or remove this one")


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Name the keys that differ, with values where they are short."""
    parts = []
    for key in sorted(old.keys() | new.keys()):
        texts = [json.dumps(request.get(key), ensure_ascii=False, sort_keys=True) for request in (old, new)]
        if texts[0] != texts[1]:
            short = max(map(len, texts)) <= 60
            parts.append(f"{key} was {texts[0]} and is now {texts[1]}" if short else f"{key} has changed")
    return "; ".join(parts)


def _report(data: dict[str, Any], wanted: PrepareOptions) -> None:
    """Say what was made."""
    for note in data["notes"]:
        print(f"note: {note}")
    for name, split in data["splits"].items():
        counts = [f"{split['kept']} pairs", *(f"{split[why]} dropped as {why}" for why in _DROPPED if split[why])]
        letters = " ".join(split["letters"][:5]) + "; a model learns to write <unk> for them" * (name == "train")
        for what, said in (("truncated", "truncated"), ("unknown", f"unknown pieces ({letters})")):
            counts += [f"{split[what]} {said}"] if split[what] else []
        print(f"{name} ({split['title']}): {', '.join(counts)}")
    for name, model in data["models"].items():
        print(f"{name}: {model['pieces']} pieces, dictionary of {model['dictionary_size']}")
    print(f"prepared {wanted.out}: fairseq-train {shlex.quote(str(wanted.out / 'bin'))} ...")


# -- what is made -----------------------------------------------------------------------------------------------------


def _fill(wanted: PrepareOptions, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write all into an empty folder, the manifest last; its content."""
    from attn_reg_plugin.corpora.pieces import encoders, write_models

    for name in ("raw", "pieces"):
        (folder / name).mkdir()
    splits, notes = read_splits(wanted)
    names = ("read", "kept", "truncated", "unknown", *_DROPPED)
    counts: dict[str, dict[str, Any]] = {
        split.name: {"title": split.title, **dict.fromkeys(names, 0)} for split in splits
    }
    for split in splits:
        _write(folder / "raw", split, wanted, _raw(split, wanted, counts[split.name]), "reading")
    print("pieces ...", flush=True)
    models = write_models(wanted, folder)
    sides = encoders(wanted, folder)
    for split in splits:
        pairs = read_pairs(*(folder / "raw" / f"{split.name}.{language}" for language in wanted.languages))
        pieces = _pieces(split, pairs, wanted, sides, counts[split.name])
        _write(folder / "pieces", split, wanted, pieces, "encoding")
    print("binaries ...", flush=True)
    preprocess(folder, wanted.languages, list(counts), wanted.dictionaries, wanted.workers)
    files = {path.relative_to(folder).as_posix(): sha256(path) for path in folder.rglob("*") if path.is_file()}
    data = {"request": request, "notes": notes, "splits": counts, "models": models, "files": files}
    data["sentencepiece"] = importlib.metadata.version("sentencepiece")
    write_json(folder / MANIFEST, data, sort_keys=True)
    return data


def _write(folder: Path, split: Split, options: PrepareOptions, pairs: Iterable[Sequence[str]], doing: str) -> None:
    """Write pairs of lines into the two files of a split, with a bar while standard error is a terminal."""
    from tqdm import tqdm

    with ExitStack() as stack:
        paths = [folder / f"{split.name}.{language}" for language in options.languages]
        files = [stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in paths]
        for pair in tqdm(pairs, f"{doing} {split.title}", disable=None, leave=False, unit=""):
            for file, line in zip(files, pair, strict=True):
                file.write(line + "\n")


def _raw(split: Split, options: PrepareOptions, counts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Give the text of a split, without training pairs that lack a side; count them.

    Raises:
        ValueError: an empty line of another split, or no pair at all.
    """
    (source, target), training = options.languages, split.name == "train"
    for pair in split.pairs:
        counts["read"] += 1
        if is_whole(pair):
            # a reference stays as it was published
            yield (
                options.letters(source, pair.source),
                options.letters(target, pair.target) if training else pair.target,
            )
        elif training:
            counts["empty"] += 1
        else:
            place = split.places[1 if pair.source.strip() else 0]
            raise ValueError(f"{place}, line {pair.line}: empty; every line must hold a sentence")
    if counts["read"] == counts["empty"]:
        raise ValueError(f"{split.places[0]} and {split.places[1]} give no pair at all for {split.name}")


def _pieces(
    split: Split, pairs: Iterable[Pair], options: PrepareOptions, sides: Sequence[Any], counts: dict[str, Any]
) -> Iterator[list[str]]:
    """Give the pieces of a split, with spaces between; training pairs of a bad length are left out or cut, and counted.

    Raises:
        ValueError: a validation or test line of which no piece is left, or no training pair that is.
    """
    most, training, letters = options.max_pieces, split.name == "train", (Counter[str](), Counter[str]())
    for pair in pairs:
        texts = list(map(options.letters, options.languages, pair[1:]))
        pieces = [side.encode(text) for side, text in zip(sides, texts, strict=True)]
        reason = _reason(*map(len, pieces), options)
        if training and reason:
            counts[reason] += 1
            continue
        if reason == "no_pieces":
            place, line = split.places[1 if pieces[0] else 0], list(split.pairs)[pair.line - 1].line
            raise ValueError(f"{place}, line {line}: sentencepiece leaves nothing of this line")
        if training and max(map(len, pieces)) > most:
            counts["truncated"] += 1
            pieces = [some[:most] for some in pieces]
        counts["kept"] += 1
        for some, text, seen in zip(pieces, texts, letters, strict=True):
            counts["unknown"] += some.count(UNKNOWN)
            seen.update(text if UNKNOWN in some else "")
        yield [" ".join(some) for some in pieces]
    candidates = [(side, letter) for side, seen in zip(sides, letters, strict=True) for letter, _ in seen.most_common()]
    counts["letters"] = list(dict.fromkeys(letter for side, letter in candidates if UNKNOWN in side.encode(letter)))
    if not counts["kept"]:
        raise ValueError(
            f"no training pair is left: --max-pieces {most} and sides {_MAX_RATIO} times as long as the other drop all "
            f"{counts['read'] - counts['empty']}"
        )


def _reason(source: int, target: int, options: PrepareOptions) -> str:
    """Say why a training pair of these lengths is dropped; empty where it is kept."""
    shorter, longer = sorted((source, target))
    if shorter == 0:
        return "no_pieces"
    if longer > options.max_pieces and options.long_pairs == "drop":
        return "too_long"
    return "ratio" if longer > _MAX_RATIO * shorter else ""


def preprocess(
    folder: Path, languages: tuple[str, str], splits: Sequence[str], dictionaries: tuple[str, str], workers: int = 1
) -> None:
    """Run `fairseq_cli.preprocess` from `pieces/SPLIT.LANGUAGE` to `bin/` of a folder, in a process of its own.

    Paths are relative to the folder, because fairseq splits lists of paths at commas.

    Raises:
        ValueError: fairseq failed; the sentence ends with its last line.
    """
    flags = {
        "source-lang": languages[0],
        "target-lang": languages[1],
        "trainpref": "pieces/train",
        "validpref": "pieces/valid",
        "testpref": ",".join(f"pieces/{name}" for name in splits if name.startswith("test")),
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
