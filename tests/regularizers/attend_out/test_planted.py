"""A planted problem: the generator learns to drop the position that only training data make useful."""

import pytest

from tests.loading import example

pytestmark = pytest.mark.slow
planted = example("attend_out/planted.py")


@pytest.mark.parametrize("seed", [1, 2])
def test_the_spurious_position_is_dropped_by_0_2_more_than_the_others(seed: int) -> None:
    _, gap, rates = planted.play("round", seed, updates=1200, points=1)[-1]
    assert gap >= 0.2 and max(rates) == rates[planted.SPURIOUS]


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_not_with_shuffled_rewards(seed: int) -> None:
    _, gap, _ = planted.play("shuffled", seed, updates=1200, points=1)[-1]
    assert gap < 0.2
