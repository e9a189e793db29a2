"""Dropping the candidates: each with probability q, independently, from torch's own random numbers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from attn_reg_plugin import candidate_region, drop_candidates
from attn_reg_plugin.attention.masks import sample_keep
from tests.attention.literal import padding

pytestmark = pytest.mark.usefixtures("one_thread")

RATIOS = [i / 10 for i in range(11)]
#: the quantile at 0.9999 of the chi-square distribution with 7 and with 15 degrees of freedom
LIMITS = {7: 29.88, 15: 44.26}


def composed(attribution, valid, p, q, **options):
    """The two public functions one after the other."""
    return drop_candidates(candidate_region(attribution, valid, p, **options), valid, q)


def chi_square(outcomes: torch.Tensor, q: float) -> float:
    """Of N rows of K booleans (True = dropped), against K independent draws with probability q."""
    number, width = outcomes.shape
    codes = (outcomes.long() * 2 ** torch.arange(width)).sum(-1)
    observed = codes.bincount(minlength=2**width).tolist()
    statistic = 0.0
    for code, count in enumerate(observed):
        ones = bin(code).count("1")
        expected = number * q**ones * (1 - q) ** (width - ones)
        statistic += (count - expected) ** 2 / expected
    return statistic


@pytest.mark.parametrize("draw", [composed, sample_keep])
@pytest.mark.parametrize("q", RATIOS)
def test_rate_of_dropped_candidates(q, draw):
    torch.manual_seed(int(100 * q))
    attribution, valid = torch.rand(40, 2, 25, 10), padding([10, 5] * 20, 10)
    region = candidate_region(attribution, valid, 0.4)
    keep = draw(attribution, valid, 0.4, q)
    exists = valid.expand(keep.shape)
    assert not (keep & ~exists).any()
    assert (keep | region | ~exists).all(), "only candidates may be dropped"
    candidates, dropped = int(region.sum()), int((region & ~keep).sum())
    assert candidates == 20 * 2 * 25 * (4 + 2)
    deviation = (candidates * q * (1 - q)) ** 0.5
    assert abs(dropped - candidates * q) <= 4 * deviation


@pytest.mark.parametrize("draw", [composed, sample_keep])
@pytest.mark.parametrize("q", [0.3, 0.7])
@pytest.mark.parametrize("mask", [False, True])
def test_candidates_are_dropped_independently(q, draw, mask):
    torch.manual_seed(7)
    attribution = torch.tensor([0.0, 3.0, 1.0, 5.0, 4.0, 2.0]).expand(10_000, 1, 1, 6)
    valid = torch.ones(10_000, 1, 1, 6, dtype=torch.bool) if mask else None
    keep = draw(attribution, valid, 0.5, q)
    assert keep[..., [0, 2, 5]].all()
    assert chi_square(~keep[:, 0, 0, [1, 3, 4]], q) < LIMITS[7]


@pytest.mark.parametrize("draw", [composed, sample_keep])
def test_rows_and_heads_are_drawn_apart(draw):
    torch.manual_seed(8)
    keep = draw(torch.zeros(10_000, 2, 2, 1), None, 1.0, 0.4)
    assert chi_square(~keep.view(-1, 4), 0.4) < LIMITS[15]


@pytest.mark.parametrize("draw", [composed, sample_keep])
@pytest.mark.parametrize("p, q", [(0.0, 0.5), (0.0, 1.0), (0.5, 0.0), (0.5, 1.0), (1.0, 1.0)])
def test_limits(p, q, draw):
    attribution, valid = torch.randn(3, 2, 4, 6), padding([6, 3, 0], 6)
    state = torch.get_rng_state()
    keep = draw(attribution, valid, p, q)
    exists = valid.expand(keep.shape)
    if p == 0 or q == 0:
        assert keep.equal(exists)
    else:
        assert keep.equal(exists & ~candidate_region(attribution, valid, p))
    if q in (0.0, 1.0):
        assert torch.get_rng_state().equal(state), "what is certain draws nothing"


@pytest.mark.parametrize("draw", [composed, sample_keep])
def test_drawn_from_the_global_generator(draw):
    attribution = torch.randn(2, 2, 5, 8)
    torch.manual_seed(11)
    first, second = (draw(attribution, None, 0.5, 0.5) for _ in range(2))
    torch.manual_seed(11)
    again = draw(attribution, None, 0.5, 0.5)
    assert first.equal(again)
    assert not first.equal(second)


def test_low_direction_drops_the_other_end():
    attribution = torch.arange(10.0).view(1, 1, 1, 10)
    high, low = (sample_keep(attribution, None, 0.3, 1.0, direction) for direction in ("high", "low"))
    assert high.flatten().tolist() == [True] * 7 + [False] * 3
    assert low.flatten().tolist() == [False] * 3 + [True] * 7


def test_enabled():
    torch.manual_seed(12)
    attribution, valid = torch.randn(2, 2, 5, 8), padding([8, 3], 8)
    off = sample_keep(attribution, valid, 0.5, 0.5, enabled=torch.tensor(False))
    assert off.equal(valid.expand(off.shape))
    assert sample_keep(attribution, None, 0.5, 1.0, enabled=torch.tensor(False)).all()
    torch.manual_seed(13)
    on = sample_keep(attribution, valid, 0.5, 0.5, enabled=torch.tensor(True))
    torch.manual_seed(13)
    assert on.equal(sample_keep(attribution, valid, 0.5, 0.5))


def test_generator():
    attribution = torch.randn(2, 2, 5, 8)
    state = torch.get_rng_state()
    one, same, other = (
        sample_keep(attribution, None, 0.5, 0.5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert one.equal(same)
    assert not one.equal(other)
    assert torch.get_rng_state().equal(state), "the global generator is left alone"


def test_non_finite_attributions_keep_the_shape_of_a_mask():
    attribution = torch.full((2, 1, 3, 4), float("nan"))
    keep = sample_keep(attribution, padding([4, 2], 4), 0.5, 1.0)
    assert (keep.sum(-1).flatten().tolist()) == [2, 2, 2, 1, 1, 1]


def test_whole_grid_expects_p_times_q():
    torch.manual_seed(14)
    attribution = torch.randn(20, 2, 10, 20)
    for p, q in product((0.1, 0.5, 0.9), (0.2, 0.8)):
        rate = 1 - sample_keep(attribution, None, p, q).float().mean().item()
        assert abs(rate - p * q) < 4 * (q * (1 - q) / (8000 * p)) ** 0.5 * p + 1e-9
