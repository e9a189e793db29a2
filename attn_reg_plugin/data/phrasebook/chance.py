"""Reproducible chance: every choice comes from ``random.Random.random``, whose sequence Python guarantees.

``choice`` and ``shuffle`` are not guaranteed to stay the same from one Python to the next.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Chance:
    """A seeded source of choices."""

    def __init__(self, seed: int) -> None:
        """Start from ``seed``; the same seed always makes the same choices."""
        digest = hashlib.sha256(f"phrasebook:{seed}".encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big")).random

    def happens(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items, each as likely."""
        return items[int(self._random() * len(items))]

    def weighted(self, items: Sequence[tuple[Item, float]]) -> Item:
        """One of the items, each as likely as its weight says."""
        point = self._random() * sum(weight for _, weight in items)
        for item, weight in items:
            point -= weight
            if point < 0:
                return item
        return items[-1][0]
