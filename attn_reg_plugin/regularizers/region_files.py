"""Kept regions in files: one that is only ever appended to for each epoch and rank, read by every rank of the machine.

Each record names the update that it was made in, so a training that continues after update U takes what was written
before, and what a kill left unfinished is never read. Files are read by position, through the system's page cache,
which all processes share; a file that is removed stays readable to whoever has it open.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSION = 1
_TITLE = b"attn_reg_plugin kept regions\n"
_NAME = re.compile(r"ad_drop_regions_(\d+)_(\d+)\.bin")
#: magic, checksum of what follows, digest, update, p, direction, number of parts, bytes of payload
_HEAD = struct.Struct("<4sI16sqdBHQ")
_MAGIC = b"KEPT"
_PART = struct.Struct("<HHHII")
_CHECKED = 8  # where what the checksum covers begins

#: of each call of a site: (site's index, call, H, T, S)
Parts = tuple[tuple[int, int, int, int, int], ...]


class Setting(NamedTuple):
    """What a region was made with: p, and the direction."""

    p: float
    direction: str


class Record(NamedTuple):
    """One example's regions in a file.

    Attributes:
        digest: of the example.
        update: updates made before the one that trained on it.
        offset, size: of the packed bits.
    """

    digest: bytes
    update: int
    setting: Setting
    parts: Parts
    offset: int
    size: int


class RegionFile:
    """One epoch's regions of one rank.

    Attributes:
        epoch, rank: as in its name.
        end: up to where it was read or written.
        damaged: at how many places what was written cannot be read: a wrong checksum, or an end in mid-record.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.descriptor, self.end, self.damaged = descriptor, 0, 0
        match = _NAME.fullmatch(path.name)
        self.path, self.epoch, self.rank = path, int(match[1]), int(match[2])

    @classmethod
    def create(cls, folder: Path, epoch: int, rank: int, fingerprint: dict[str, object]) -> RegionFile:
        """A new one, over whatever is there.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = file_name(folder, epoch, rank)
        file = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        title = json.dumps(fingerprint, sort_keys=True).encode()
        file._write(_TITLE + struct.pack("<I", len(title)) + title)
        return file

    @classmethod
    def open(cls, path: Path, fingerprint: dict[str, object]) -> RegionFile | None:
        """One that is there; None if it isn't whole enough to have a title.

        Raises:
            ValueError: it is of another model, tokenizer or version; the sentence says what differs.
            OSError: it cannot be read.
        """
        file = cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        start = len(_TITLE) + 4
        begin = os.pread(file.descriptor, start, 0)
        length = struct.unpack("<I", begin[-4:])[0] if len(begin) == start and begin.startswith(_TITLE) else 0
        title = os.pread(file.descriptor, min(length, file._whole()), start)
        try:
            theirs = json.loads(title) if length and len(title) == length else None
        except ValueError:
            theirs = None
        if not isinstance(theirs, dict):
            file.close()
            return None
        check_fingerprint(str(path), theirs, fingerprint)
        file.end = start + length
        return file

    def append(self, digest: bytes, update: int, setting: Setting, parts: Parts, payload: Tensor) -> Record:
        """Write one example's regions, a contiguous uint8 vector on the CPU.

        Raises:
            OSError: the disk is full, for instance.
        """
        content = ctypes.string_at(payload.data_ptr(), payload.numel()) if payload.numel() else b""
        low = int(setting.direction == "low")
        head = _HEAD.pack(_MAGIC, 0, digest, update, setting.p, low, len(parts), len(content))[_CHECKED:]
        head += b"".join(_PART.pack(*part) for part in parts)
        checksum = zlib.crc32(content, zlib.crc32(head))
        offset = self.end + _CHECKED + len(head)
        self._write(_MAGIC + struct.pack("<I", checksum) + head + content)
        return Record(digest, update, setting, parts, offset, len(content))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        at = self.end
        while view:
            written = os.pwrite(self.descriptor, view, at)
            view, at = view[written:], at + written
        self.end = at

    def records(self, before: int | None = None) -> Iterator[Record]:
        """Those from `end` on, in order; the end moves along, and stops at what isn't whole.

        Args:
            before: up to the first that was made in this update or later.
        """
        whole = self._whole()
        while self.end < whole:
            head = os.pread(self.descriptor, _HEAD.size, self.end)
            if len(head) < _HEAD.size:
                return
            magic, checksum, digest, update, p, low, number, size = _HEAD.unpack(head)
            length = number * _PART.size + size
            if magic == _MAGIC and before is not None and update >= before:
                return
            if magic != _MAGIC or self.end + _HEAD.size + length > whole:
                self.damaged += 1
                return
            rest = os.pread(self.descriptor, length, self.end + _HEAD.size)
            start, self.end = self.end, self.end + _HEAD.size + length
            if zlib.crc32(rest, zlib.crc32(head[_CHECKED:])) != checksum:
                self.damaged += 1
                continue
            parts = tuple(_PART.iter_unpack(rest[: number * _PART.size]))
            offset = start + _HEAD.size + number * _PART.size
            yield Record(digest, update, Setting(p, "low" if low else "high"), parts, offset, size)

    def _whole(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, record: Record) -> Tensor:
        """The packed bits of a record."""
        content = os.pread(self.descriptor, record.size, record.offset)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte()

    def cut(self) -> None:
        """Let the file end at `end`."""
        os.ftruncate(self.descriptor, self.end)

    def remove(self) -> None:
        """Delete it, and close it."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close it; nothing happens if it is."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionFile:
        """Of a copied model: itself, since a descriptor has one owner."""
        return self


def file_name(folder: Path, epoch: int, rank: int) -> Path:
    """Where a rank keeps the regions of an epoch."""
    return folder / f"ad_drop_regions_{epoch}_{rank}.bin"


def files_in(folder: Path) -> list[tuple[Path, int, int]]:
    """The files of regions in a folder, with epoch and rank, in this order."""
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir()) if folder.is_dir() else ()
    found = [(path, int(match[1]), int(match[2])) for path, match in matches if match]
    return sorted(found, key=lambda one: one[1:])


def check_fingerprint(where: str, theirs: dict[str, object], ours: dict[str, object]) -> None:
    """Refuse regions that were kept for something else.

    Raises:
        ValueError: they are of another model, tokenizer or version; the sentence says what differs.
    """
    for key in ours:
        if theirs.get(key) != ours[key]:
            raise ValueError(
                f"{where} has kept regions of another {key} ({_short(theirs.get(key))}, but now it is "
                f"{_short(ours[key])}); train in another folder, or use --finetune-from-model"
            )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
