"""The store of kept candidate regions: by example, in memory up to a limit, beyond it in files.

Several processes of one training always use files, of which each reads the others' at the beginning of an epoch. What
was written in which epoch is known, so files that neither the training nor its last checkpoint needs are removed.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.regularizers.region_files import (
    Parts,
    Record,
    RegionFile,
    Setting,
    check_fingerprint,
    file_name,
    files_in,
)

logger = logging.getLogger(__name__)

#: of the default limit: this share of the free memory, and at most so many bytes
_SHARE, _MOST = 4, 8 * 2**30


@dataclass(slots=True)
class Kept:
    """An example's regions.

    Attributes:
        update: updates made before the one that trained on it.
        setting: what they were made with.
        parts: what the packed bits are made of.
        bits: packed, uint8; or None where they are in `file`.
    """

    update: int
    setting: Setting
    parts: Parts
    bits: Tensor | None = None
    file: RegionFile | None = None
    record: Record | None = None

    def read(self) -> Tensor:
        """The packed bits."""
        return self.file.read(self.record) if self.bits is None else self.bits


def free_memory() -> int:
    """Bytes of memory that can be had without swapping; 0 where the system doesn't tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


class RegionStore:
    """Regions by the digest of their example.

    Args:
        limit_gb: of memory, in 2^30 bytes; 0 takes a quarter of what is free, at most 8.
        fingerprint: of the model and its tokenizer; other ones' regions are refused.

    Attributes:
        in_memory: bytes of packed bits in memory.
    """

    def __init__(self, limit_gb: float, fingerprint: Mapping[str, Any]) -> None:
        self.limit = int(limit_gb * 2**30) or min(free_memory() // _SHARE, _MOST)
        self.fingerprint = dict(fingerprint)
        self.in_memory, self.epoch = 0, 0
        self._kept: dict[bytes, Kept] = {}
        self._interned: dict[Parts, Parts] = {}
        self._folder: Path | None = None
        self._rank, self._world, self._alone, self._warned = 0, 1, True, False
        self._files: dict[Path, RegionFile] = {}
        self._own: RegionFile | None = None
        self._used: Counter[Path] = Counter()
        self._used_at: dict[int, set[Path]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: bytes) -> Kept | None:
        """What is kept of an example."""
        return self._kept.get(digest)

    def put(self, digest: bytes, update: int, setting: Setting, parts: Parts, bits: Tensor) -> None:
        """Keep an example's regions in place of older ones.

        Args:
            update: updates made before the one that trained on it.
            bits: packed, uint8, a vector.
        """
        parts = self._interned.setdefault(parts, parts)
        self._forget(digest)
        if self._alone and self.in_memory + bits.numel() <= self.limit:
            self._insert(digest, Kept(update, setting, parts, bits))
        elif self._folder is not None:
            try:
                self._insert(digest, self._written(digest, update, setting, parts, bits))
            except OSError as error:
                self._warn(f"{self._folder} takes no more kept regions ({error}); these examples are not kept")
        else:
            self._warn(
                f"{self.in_memory / 2**30:.2f} GB of kept regions are all that may be in memory, and there is no "
                "folder for more; further examples are not kept (give store_folder, or raise store_gb)"
            )

    def _written(self, digest: bytes, update: int, setting: Setting, parts: Parts, bits: Tensor) -> Kept:
        if self._own is None:
            self._own = RegionFile.create(self._folder, self.epoch, self._rank, self.fingerprint)
            self._files[self._own.path] = self._own
        record = self._own.append(digest, update, setting, parts, bits)
        return Kept(update, setting, parts, None, self._own, record)

    def _warn(self, what: str) -> None:
        """Say why examples are not kept, once."""
        if not self._warned:
            self._warned = True
            logger.warning(f"ad_drop: {what}")

    def _insert(self, digest: bytes, kept: Kept) -> None:
        self._kept[digest] = kept
        if kept.file is None:
            self.in_memory += kept.bits.numel()
        else:
            self._used[kept.file.path] += 1

    def _forget(self, digest: bytes) -> None:
        old = self._kept.pop(digest, None)
        if old is None:
            return
        if old.file is None:
            self.in_memory -= old.bits.numel()
        else:
            self._used[old.file.path] -= 1

    # -- files ------------------------------------------------------------------------------------------------------

    def open(self, folder: Path | None, rank: int, world: int, resumed: int | None) -> None:
        """Begin to use a folder, or go on with what is in it.

        Args:
            folder: for files; None keeps all in memory.
            rank: this process's.
            world: processes of the training; several always use files.
            resumed: the updates made so far, where training goes on from a checkpoint; None begins anew.

        Raises:
            ValueError: the files are another model's.
        """
        self._folder, self._rank, self._world, self._alone = folder, rank, world, world == 1 or folder is None
        if folder is None:
            return
        for path, _, owner in files_in(folder):
            if not self._owns(owner):
                continue
            if resumed is None:
                path.unlink(missing_ok=True)
            else:
                self._read(path, resumed)

    def _read(self, path: Path, before: int | None) -> None:
        """Take in what is new in a file, where it is newer than what is known.

        Args:
            before: leave out, and cut off, what was made in this update or later; None reads another rank's.
        """
        file = self._files.get(path)
        if file is None:
            try:
                file = RegionFile.open(path, self.fingerprint)
            except FileNotFoundError:  # its owner has removed it: nobody needs it
                return
            if file is None:
                logger.warning(f"{path} is damaged and left out: its examples are kept again")
                if before is not None:
                    path.unlink()
                return
            self._files[path] = file
        damaged = file.damaged
        for record in file.records(before):
            known = self._kept.get(record.digest)
            if known is None or self._age(known) <= (record.update, -file.rank):
                self._forget(record.digest)
                parts = self._interned.setdefault(record.parts, record.parts)
                self._insert(record.digest, Kept(record.update, record.setting, parts, None, file, record))
        if before is not None:
            file.cut()
        if file.damaged > damaged:
            logger.warning(f"{path} is damaged in {file.damaged - damaged} places: these examples are kept again")

    def _owns(self, owner: int) -> bool:
        """Whether files of a rank are this process's affair; the first one sees to those of ranks that are no more."""
        return owner == self._rank or (self._rank == 0 and owner >= self._world)

    def _age(self, kept: Kept) -> tuple[int, int]:
        """Later is larger; of what two ranks kept in the same update, every rank takes the lower one's."""
        return kept.update, -(self._rank if kept.file is None else kept.file.rank)

    def begin_epoch(self, epoch: int, saved: int | None) -> None:
        """Read what the other ranks have kept in the epochs before, and remove files that nobody needs.

        Args:
            epoch: the one that begins; every rank has written those before.
            saved: in which epoch the last checkpoint was made, or which began with it; None if there is none.
        """
        self.epoch, self._own = epoch, None
        if self._folder is None:
            return
        self._own = self._files.get(file_name(self._folder, epoch, self._rank))
        for path, written, rank in files_in(self._folder):
            if written < epoch and rank != self._rank:
                self._read(path, None)
        used = {path for path, number in self._used.items() if number > 0}
        self._used_at[epoch] = used
        for path, file in list(self._files.items()):
            needed = path in used or file is self._own
            if saved is not None:  # whoever continues from that checkpoint may need what was used in its epoch
                needed = needed or file.epoch >= saved or path in self._used_at.get(saved, {path})
            if not needed:
                del self._files[path], self._used[path]
                file.remove() if self._owns(file.rank) else file.close()
        self._used_at = {at: paths for at, paths in self._used_at.items() if saved is None or at >= saved}

    def close(self) -> None:
        """Close the files; what is in memory stays."""
        for file in self._files.values():
            file.close()
        self._files, self._own, self._folder = {}, None, None
        self._kept = {digest: kept for digest, kept in self._kept.items() if kept.file is None}
        self._used.clear()

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is in memory, as numbers and tensors; and how many examples are kept in all."""
        held = {digest: kept for digest, kept in self._kept.items() if kept.bits is not None}
        shapes = {parts: i for i, parts in enumerate(dict.fromkeys(kept.parts for kept in held.values()))}
        bits = [kept.bits for kept in held.values()]
        return {
            "fingerprint": dict(self.fingerprint),
            "examples": len(self),
            "digests": torch.tensor([list(digest) for digest in held], dtype=torch.uint8).view(-1, 16),
            "updates": torch.tensor([kept.update for kept in held.values()], dtype=torch.int64),
            "settings": [list(kept.setting) for kept in held.values()],
            "shapes": [[list(part) for part in parts] for parts in shapes],
            "shape": torch.tensor([shapes[kept.parts] for kept in held.values()], dtype=torch.int64),
            "sizes": torch.tensor([one.numel() for one in bits], dtype=torch.int64),
            "bits": torch.cat(bits) if bits else torch.empty(0, dtype=torch.uint8),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take in what `state` gave, in place of all that is in memory.

        Raises:
            ValueError: it is of another model, tokenizer or version, or damaged.
        """
        try:
            check_fingerprint("the checkpoint", state["fingerprint"], self.fingerprint)
            loaded = dict(_unpacked(state))
        except (KeyError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise ValueError(f"the kept regions are damaged ({type(error).__name__}: {error})") from None
        self.close()
        self._kept, self.in_memory = {}, 0
        for digest, kept in loaded.items():
            self._insert(digest, kept)


def _unpacked(state: Mapping[str, Any]) -> Iterator[tuple[bytes, Kept]]:
    """The examples of a store's state."""
    shapes = [tuple(tuple(part) for part in parts) for parts in state["shapes"]]
    bits = state["bits"].split(state["sizes"].tolist())
    columns = (state["digests"].tolist(), state["updates"].tolist(), state["settings"], state["shape"].tolist(), bits)
    for digest, update, (p, direction), shape, packed in zip(*columns, strict=True):
        yield bytes(digest), Kept(update, Setting(p, direction), shapes[shape], packed.clone())
