"""The record of a preparation: what was asked for, which stages are complete, the hash of every file.

`manifest.json` is rewritten, atomically, after every stage. A stage counts as complete only while all the
files it wrote are still there with the contents they had, so a run that was killed, at whatever moment,
continues at the first stage that is not. The file has no times and no absolute paths: the same request gives
the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from attn_reg_plugin.files import write_json

NAME = "manifest.json"


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal; reads a block at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The keys that differ, with short values."""
    parts = []
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        texts = json.dumps(before, ensure_ascii=False), json.dumps(now, ensure_ascii=False)
        short = max(map(len, texts)) <= 60
        parts.append(f"{key} was {texts[0]} and is now {texts[1]}" if short else f"{key} has changed")
    return "; ".join(parts)


class Manifest:
    """The manifest of one output folder.

    Args:
        folder: the output folder, which exists.
        request: what was asked for; JSON values only.

    Attributes:
        data: what `manifest.json` holds.
    """

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self.folder = folder
        self.data: dict[str, Any] = {"complete": False, "request": request, "stages": {}}

    @classmethod
    def open(cls, folder: Path, request: dict[str, Any], owned: Iterable[str]) -> Manifest:
        """The manifest of a folder: the one that is there, or a new one.

        Args:
            folder: the output folder, which exists.
            request: what is asked for now.
            owned: names that a preparation writes into the folder.

        Raises:
            ValueError: the folder was prepared for another request (the sentence says what differs), or it
                holds one of `owned` without a manifest.
        """
        manifest = cls(folder, json.loads(json.dumps(request)))
        path = folder / NAME
        if not path.exists():
            foreign = [name for name in owned if (folder / name).exists()]
            if foreign:
                raise ValueError(
                    f"{folder} holds {', '.join(foreign)} but no {NAME}, so something else wrote it: give "
                    "--out another folder, or --overwrite to replace it"
                )
            manifest.save()
            return manifest
        data = _read(path)
        if data is None:
            raise ValueError(f"{path} is not a manifest of attn-reg prepare: give --overwrite to redo it")
        old = data["request"]
        if old != manifest.data["request"]:
            raise ValueError(
                f"{folder} was prepared with other options or from other files "
                f"({_differences(old, manifest.data['request'])}): give --out another folder, or --overwrite "
                "to replace it"
            )
        manifest.data = data
        return manifest

    def done(self, stage: str) -> bool:
        """Whether a stage is recorded and each file it wrote is there, unchanged."""
        outputs = self.data["stages"].get(stage)
        return outputs is not None and all(
            (self.folder / name).is_file() and sha256(self.folder / name) == digest for name, digest in outputs.items()
        )

    def forget(self, stages: Iterable[str]) -> None:
        """Record that stages are no longer complete."""
        self.data["complete"] = False
        for stage in stages:
            self.data["stages"].pop(stage, None)
        self.save()

    def finish(self, stage: str, outputs: Iterable[Path], facts: dict[str, Any]) -> None:
        """Record a complete stage: the hashes of its files, and what else there is to know.

        Args:
            stage: its name.
            outputs: the files it wrote, inside the folder.
            facts: top-level entries; a dict is merged into the dict that is there.
        """
        self.data["stages"][stage] = {
            path.relative_to(self.folder).as_posix(): sha256(path) for path in sorted(outputs)
        }
        for key, value in facts.items():
            self.data[key] = _merged(self.data.get(key), value)
        self.save()

    def complete(self, versions: dict[str, str]) -> None:
        """Record that every stage is complete, and which versions of which packages made them."""
        self.data["complete"] = True
        self.data["versions"] = versions
        self.save()

    def save(self) -> None:
        """Write `manifest.json` whole, or not at all."""
        write_json(self.folder / NAME, self.data, sort_keys=True)


def unfinished(folder: Path) -> bool:
    """Whether a folder holds a preparation that never was complete, or lost that."""
    data = _read(folder / NAME) if (folder / NAME).is_file() else None
    return data is not None and not data["complete"]


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a manifest; None where it is not what `Manifest` writes. Names in it stay inside the folder."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        request, stages, splits = data["request"], data["stages"], data.get("splits", {})
        names = [name for outputs in stages.values() for name in outputs.items()]
        fits = (
            isinstance(request, dict)
            and isinstance(data["complete"], bool)
            and all(isinstance(hashed, str) and _is_inside(name) for name, hashed in names)
            and all(re.fullmatch(r"train|valid|test\d*", split) for split in splits)
            and all(isinstance(split["title"], str) for split in splits.values())
            and ("raw" not in stages or {"names", "notes", "splits"} <= data.keys())
            and ("spm" not in stages or isinstance(data["spm"]["models"], dict))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return data if fits else None


def _is_inside(name: str) -> bool:
    """Whether a relative path names something below its folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts) and "\0" not in name


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {key: _merged(old.get(key), new[key]) if key in new else old[key] for key in old | new}
