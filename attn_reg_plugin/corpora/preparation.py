"""`attn-reg prepare`: a parallel corpus made ready for `fairseq-train`.

    attn-reg prepare wmt16 --pair en-ro --source FOLDER --out DIR
    attn-reg prepare wmt16 --pair en-ro --source FOLDER --out DIR --opus-mt CONVERTED
    attn-reg prepare phrasebook --pair en-tr --out DIR

What is in DIR afterwards:

    raw/SPLIT.LANGUAGE      the text, one sentence per line: references to score against, and what was trained on
    spm.model, dict.txt     sentencepiece model and fairseq dictionary (spm.en.model, dict.en.txt if separate)
    opus_mt/                instead of spm.model, with --opus-mt: the tokenizer and the settings of that model
    pieces/SPLIT.LANGUAGE   the encoded text
    bin/                    fairseq's binaries and dictionaries: the folder to give to fairseq-train
    manifest.json           what was asked for, counts, versions and the hash of every file

SPLIT is `train`, `valid`, `test`, `test1`, ...; `names` in the manifest says which test set each is. A stage
is written elsewhere and moved into place when it is complete, so a run that was killed is simply started
again.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attn_reg_plugin.corpora import binarize
from attn_reg_plugin.corpora.arrangement import Arrangement
from attn_reg_plugin.corpora.manifest import NAME, Manifest, unfinished
from attn_reg_plugin.corpora.preparation_options import PhrasebookOptions, PrepareOptions, Wmt16Options
from attn_reg_plugin.corpora.sources import FolderSource, HubSource, PhrasebookSource, Source
from attn_reg_plugin.files import TEMPORARY, lock_folder, naming

#: options that do not change what is written, or that the manifest records as hashes
_UNRECORDED = {
    "out",
    "workers",
    "overwrite",
    "source",
    "spm_model",
    "dictionary",
    "opus_mt",
    "source_prefix",
    "train",
    "valid",
    "test",
    "seed",
    "noise",
    "split_valid",
    "set_aside",
}
#: in the output folder while a process works there
_LOCK = ".lock"
#: every name that a preparation may write into its folder, besides the manifest
_OWNED = (
    *("raw", "pieces", "bin", "opus_mt", "spm.model", "dict.txt"),
    *(f"spm.{language}.model" for language in ("en", "ro", "tr")),
    *(f"dict.{language}.txt" for language in ("en", "ro", "tr")),
)


def _source(wanted: PrepareOptions, load_dataset: Callable[..., Any] | None) -> Source:
    if isinstance(wanted, PhrasebookOptions):
        sizes = (wanted.train, wanted.valid, wanted.test)
        return PhrasebookSource(wanted.languages, *sizes, wanted.seed, wanted.noise)
    if not isinstance(wanted, Wmt16Options):
        raise ValueError(f"no source is known for {type(wanted).__name__}")
    arrangement = Arrangement(wanted.split_valid, wanted.set_aside, wanted.noise, wanted.seed)
    if wanted.source == "hub":
        return HubSource(wanted.languages, wanted.limit, load_dataset, arrangement)
    return FolderSource(Path(wanted.source), wanted.languages, wanted.limit, wanted.origin, arrangement)


def _request(wanted: PrepareOptions, source: Source, reused: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides what is written."""
    fields = (field.name for field in dataclasses.fields(wanted) if field.name not in _UNRECORDED)
    values = {name: getattr(wanted, name) for name in fields}
    if wanted.long_pairs == "drop":  # as earlier versions did, which recorded nothing of it
        values.pop("long_pairs")
    return {"corpus": wanted.CORPUS, "source": source.describe(), **reused, **values}


def _versions() -> dict[str, str]:
    found = {}
    for name in ("fairseq", "fairseq-fixed", "sentencepiece"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _make_folder(out: Path) -> None:
    """Make the output folder, and see that it can be written to."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: it must be a folder, or not exist yet")
    out.mkdir(parents=True, exist_ok=True)
    probe = out / f"{TEMPORARY}probe-{os.getpid()}"
    with naming(out, probe):
        probe.touch()
        probe.unlink()


def _check_inputs(wanted: PrepareOptions) -> None:
    """Refuse to read what would be replaced."""
    inputs = {"--spm-model": wanted.spm_model, "--dictionary": wanted.dictionary}
    if wanted.opus_mt is not None:
        inputs["--opus-mt"] = (wanted.opus_mt,)
    if isinstance(wanted, Wmt16Options) and wanted.source != "hub":
        inputs["--source"] = (Path(wanted.source),)
    for option, paths in inputs.items():
        for path in paths:
            real = Path(os.path.realpath(path))
            if any(real.is_relative_to(os.path.realpath(wanted.out / name)) for name in _OWNED):
                raise ValueError(f"{option} {path} lies in what --out {wanted.out} replaces: give another folder")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _staging(out: Path, stage: str) -> Iterator[Path]:
    """A new folder inside `out`, gone at the end; leftovers of killed runs go too."""
    for leftover in (*out.glob(f"{TEMPORARY}*"), *out.glob(f".{NAME}{TEMPORARY}*")):
        _remove(leftover)
    folder = out / f"{TEMPORARY}{stage}-{os.getpid()}"
    folder.mkdir()
    try:
        with naming(out, folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move_into(folder: Path, out: Path) -> list[Path]:
    """Move what is in a folder to another, replacing what is there; the files that were moved."""
    files = []
    for path in sorted(folder.iterdir()):
        final = out / path.name
        _remove(final)
        os.replace(path, final)
        files += [file for file in final.rglob("*") if file.is_file()] if final.is_dir() else [final]
    return files


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
    binarize.require_packages()
    from attn_reg_plugin.corpora import stages  # imports sentencepiece

    source = _source(wanted, load_dataset)
    _check_inputs(wanted)
    request = _request(wanted, source, stages.describe_models(wanted))
    _make_folder(wanted.out)
    with naming(wanted.out), lock_folder(wanted.out, _LOCK):
        return _prepare(wanted, source, request)


def _prepare(wanted: PrepareOptions, source: Source, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out the stages that are missing, in a folder that is held."""
    from attn_reg_plugin.corpora import stages

    failed = unfinished(wanted.out)
    if (wanted.overwrite or failed) and _is_other(wanted.out, request):
        if failed and not wanted.overwrite:
            print(f"starting anew: {wanted.out} holds only an unfinished preparation with other options")
        for name in (*_OWNED, NAME):
            _remove(wanted.out / name)
    manifest = Manifest.open(wanted.out, request, _OWNED)
    names = [name for name, _ in stages.STAGES]
    first = next((number for number, name in enumerate(names) if not manifest.done(name)), len(names))
    if first == len(names) and manifest.data["complete"]:
        print(f"already prepared: {wanted.out}")
        return manifest.data
    if first:
        print(f"continuing after stage {names[first - 1]}")
    manifest.forget(names[first:])
    for name, function in stages.STAGES[first:]:
        print(f"stage {name} ...", flush=True)
        with _staging(wanted.out, name) as temporary:
            facts = function(stages.Work(wanted, source, wanted.out, temporary, manifest.data.get("splits", {})))
            manifest.finish(name, _move_into(temporary, wanted.out), facts)
    manifest.complete(_versions())
    _report(manifest.data, wanted)
    return manifest.data


def _is_other(out: Path, request: dict[str, Any]) -> bool:
    """Whether the folder's manifest is missing, or not one of this request."""
    if not (out / NAME).exists():
        return True
    try:
        Manifest.open(out, request, ())
    except ValueError:
        return True
    return False


def _report(data: dict[str, Any], wanted: PrepareOptions) -> None:
    """Say what was made."""
    for note in data["notes"]:
        print(f"note: {note}")
    order = {"tr": 0, "va": 1, "te": 2}
    for name in sorted(data["splits"], key=lambda name: (order[name[:2]], len(name), name)):
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
