"""A planted problem: the generator learns to drop the position that only training data make useful."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[3] / "examples" / "attend_out" / "planted.py"


@pytest.fixture(scope="module")
def planted() -> ModuleType:
    specification = importlib.util.spec_from_file_location("planted", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [1, 2])
def test_the_spurious_position_is_dropped_by_0_2_more_than_the_others(planted: ModuleType, seed: int) -> None:
    _, gap, rates = planted.play("round", seed, updates=1200, points=1)[-1]
    assert gap >= 0.2 and max(rates) == rates[planted.SPURIOUS]


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_not_with_shuffled_rewards(planted: ModuleType, seed: int) -> None:
    _, gap, _ = planted.play("shuffled", seed, updates=1200, points=1)[-1]
    assert gap < 0.2
