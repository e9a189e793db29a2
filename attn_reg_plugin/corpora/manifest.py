"""The record of a preparation, `manifest.json`: what was asked for, the stages that are done, and facts about them.

It is rewritten whole after every stage, with the hash of each file that the stage wrote. A stage counts as done only
while these files are there as they were. The record has no times and no absolute paths: the same request gives the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attn_reg_plugin.files import read_json, write_json

NAME = "manifest.json"


def sha256(path: Path) -> str:
    """Hash a file's bytes, a block at a time; in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(folder: Path) -> dict[str, Any] | None:
    """Read the record of a folder; None where there is none.

    Raises:
        ValueError: it is not what `prepare` writes.
    """
    path = folder / NAME
    if not path.exists():
        return None
    advice = "not a manifest of attn-reg prepare: give --overwrite to redo it"
    try:
        data = read_json(path)
    except ValueError:
        raise ValueError(f"{path} is {advice}") from None
    parts = {"complete": bool, "request": dict, "stages": dict}
    if not all(isinstance(data.get(name), kind) for name, kind in parts.items()):
        raise ValueError(f"{path} is {advice}")
    return data


def save(folder: Path, data: dict[str, Any]) -> None:
    """Write the record, whole or not at all."""
    write_json(folder / NAME, data, sort_keys=True)


def done(folder: Path, data: dict[str, Any], stage: str) -> bool:
    """Tell whether a stage is recorded and each file it wrote is there, unchanged."""
    outputs = data["stages"].get(stage)
    return outputs is not None and all(
        (folder / name).is_file() and sha256(folder / name) == digest for name, digest in outputs.items()
    )


def hashes(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Hash all files at or below the paths of some patterns, by their names inside the folder."""
    found = [path for pattern in patterns for top in folder.glob(pattern) for path in (top, *top.rglob("*"))]
    return {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(found) if path.is_file()}


def merge(old: Any, new: Any) -> Any:
    """Put new facts over old ones; a dict goes into the dict that is there."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {key: merge(old.get(key), new[key]) if key in new else old[key] for key in old | new}


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Name the keys that differ, with values where they are short."""
    parts = []
    for key in sorted(old.keys() | new.keys()):
        texts = [json.dumps(request.get(key), ensure_ascii=False, sort_keys=True) for request in (old, new)]
        if texts[0] != texts[1]:
            short = max(map(len, texts)) <= 60
            parts.append(f"{key} was {texts[0]} and is now {texts[1]}" if short else f"{key} has changed")
    return "; ".join(parts)
