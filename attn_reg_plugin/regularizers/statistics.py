"""Running sums of what a method does, kept on their devices until somebody reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Statistics:
    """Named sums of numbers and scalar tensors; reading them is what synchronizes, not adding."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._running: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: the sums so far, without what is still running on a device."""
        return {"_sums": self._sums, "_running": []}

    def add(self, key: str, value: float | Tensor) -> None:
        """Add `value` to the sum `key`."""
        self._sums[key] = self._sums.get(key, 0.0) + value

    @contextmanager
    def seconds(self, key: str, device: torch.device) -> Iterator[None]:
        """Add the time spent inside to `key`: of the host on CPU, of the device on CUDA (counted once it is over)."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self.add(key, time.perf_counter() - start)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._running.append((key, begin, end))
        self._collect()

    def take(self, *keys: str) -> dict[str, Any]:
        """The sums since the last call, all or those of `keys`: numbers, or scalar tensors on their device."""
        self._collect()
        chosen = [key for key in keys if key in self._sums] if keys else list(self._sums)
        return {key: self._sums.pop(key) for key in chosen}

    def _collect(self) -> None:
        """Add what is over on the device."""
        while self._running and self._running[0][2].query():
            key, begin, end = self._running.pop(0)
            self.add(key, begin.elapsed_time(end) / 1000.0)
