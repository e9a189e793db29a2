"""AD-DROP's candidates against a literal evaluation, row by row, and how they are dropped."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_reg_plugin import candidate_region, drop_candidates
from attn_reg_plugin.attention.masks import candidate_counts, dropped_fraction, pack_bits, sample_keep, unpack_bits
from tests.attention.literal import causal, check_region, loop_candidates, padding

pytestmark = pytest.mark.usefixtures("one_thread")

RATIOS = [i / 10 for i in range(11)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = [9, 4, 1, 0]
MASKS = {
    "none": None,
    "padding": padding(LENGTHS, 9),
    "causal": causal(9),
    "both": padding(LENGTHS, 9) & causal(9),
    "left padding": padding(LENGTHS, 9).flip(-1) & causal(9),
    "per head": torch.rand(4, 2, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.6,
    "per key": torch.arange(9) % 3 != 1,
    "per query": (torch.arange(9) % 4 != 1)[:, None],
    "per query and head": torch.tensor([True, False])[None, :, None, None],
}


def distinct(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers of which no two in a row are equal, in any dtype."""
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return noise.argsort(-1).float() - shape[-1] / 2


@pytest.mark.parametrize("direction", ["high", "low"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("p", RATIOS)
def test_region_is_the_literal_one(p, mask, direction):
    attribution, valid = distinct(4, 2, 9, 9), MASKS[mask]
    region = candidate_region(attribution, valid, p, direction)
    assert region.equal(loop_candidates(attribution, valid, p, direction))
    assert sample_keep(attribution, valid, p, 1.0, direction).equal(
        ~region if valid is None else ~region & valid.expand(region.shape)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_region_in_every_dtype(dtype):
    generator = torch.Generator().manual_seed(2)
    attribution = torch.randn(2, 2, 5, 12, generator=generator).to(dtype)
    valid = padding([12, 7], 12)
    for p in (0.1, 0.35, 0.5, 0.9):
        check_region(candidate_region(attribution, valid, p), attribution, valid, p)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_region_of_any_row(data):
    keys = data.draw(st.integers(1, 12))
    scores = data.draw(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 2.0]), min_size=keys, max_size=keys))
    valid = data.draw(st.lists(st.booleans(), min_size=keys, max_size=keys))
    p = data.draw(st.integers(0, 1000)) / 1000
    direction = data.draw(st.sampled_from(["high", "low"]))
    attribution, exists = torch.tensor(scores).view(1, 1, 1, -1), torch.tensor(valid).view(1, 1, 1, -1)
    region = candidate_region(attribution, exists, p, direction)
    check_region(region, attribution, exists, p, direction)
    keep = sample_keep(attribution, exists, p, 1.0, direction)
    check_region(exists & ~keep, attribution, exists, p, direction)


@pytest.mark.parametrize("valid", [None, torch.ones(1, 1, 1, 10, dtype=torch.bool)])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.9, 1.0])
def test_constant_row_loses_only_what_the_rank_gives(p, valid):
    region = candidate_region(torch.zeros(2, 2, 3, 10), valid, p)
    assert (region.sum(-1) == round(10 * p)).all()


@pytest.mark.parametrize("p", RATIOS)
def test_one_key_and_no_key(p):
    one = candidate_region(torch.randn(1, 1, 1, 1), None, p)
    assert one.shape == (1, 1, 1, 1)
    assert bool(one) == (p > 0)  # int(1 · (1 - p)) = 0 for every p > 0
    padded = candidate_region(torch.randn(2, 1, 3, 4), padding([1, 0], 4), p)
    assert padded[0, :, :, 0].eq(p > 0).all()
    assert not padded[0, :, :, 1:].any()
    assert not padded[1].any()
    assert not sample_keep(torch.randn(2, 1, 3, 4), padding([1, 0], 4), p, 0.5)[1].any()


def test_counts_are_exact_for_every_length():
    for percent in range(101):
        p = percent / 100
        counts = candidate_counts(torch.arange(300), p).tolist()
        assert counts == [n - int(n * (1 - Fraction(str(p)))) for n in range(300)]


def test_round_off_is_guarded():
    assert 10 * (1 - 0.9) < 1  # what the guard is for
    assert int(candidate_counts(torch.tensor(10), 0.9)) == 9


def test_padding_never_matters():
    attribution, valid = distinct(3, 2, 6, 6), padding([6, 4, 2], 6) & causal(6)
    region = candidate_region(attribution, valid, 0.4)
    for junk in (1e30, -1e30, float("inf"), float("-inf"), float("nan")):
        changed = torch.where(valid, attribution, torch.tensor(junk))
        assert candidate_region(changed, valid, 0.4).equal(region)
    shorter = candidate_region(attribution[1:2, :, :4, :4], causal(4), 0.4)
    assert region[1:2, :, :4, :4].equal(shorter)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), float("-inf")])
def test_ratios_outside_the_unit_interval_are_refused(value):
    attribution = torch.randn(1, 1, 2, 2)
    message = rf"^{{}} is {value}, but must lie in \[0, 1\]$"
    with pytest.raises(ValueError, match=message.format("p")):
        candidate_region(attribution, None, value)
    with pytest.raises(ValueError, match=message.format("p")):
        sample_keep(attribution, None, value, 0.5)
    with pytest.raises(ValueError, match=message.format("q")):
        drop_candidates(torch.ones(1, 1, 2, 2, dtype=torch.bool), None, value)
    with pytest.raises(ValueError, match=message.format("q")):
        sample_keep(attribution, None, 0.5, value)


@pytest.mark.parametrize("draw", [candidate_region, lambda b, v, p, d: sample_keep(b, v, p, 0.5, d)])
def test_unknown_directions_are_refused(draw):
    with pytest.raises(ValueError, match="direction is 'up', but must be one of high, low"):
        draw(torch.randn(1, 1, 2, 2), None, 0.5, "up")


def test_dropped_fraction_counts_every_head_and_query():
    for valid in MASKS.values():
        keep = sample_keep(distinct(4, 2, 9, 9), valid, 0.5, 0.5)
        exists = torch.ones(4, 2, 9, 9, dtype=torch.bool) if valid is None else valid.expand(4, 2, 9, 9)
        dropped, total = dropped_fraction(keep, valid)
        assert (int(dropped), int(total)) == (int((exists & ~keep).sum()), int(exists.sum()))


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (2, 3, 5, 60), (2, 1, 4, 64), (0, 3)])
def test_masks_survive_packing(shape):
    mask = torch.rand((2, *shape), generator=torch.Generator().manual_seed(1)) > 0.5
    for one in (mask[1], mask.transpose(0, -1), mask.view(-1)[1:9]):  # offsets and strides too
        packed = pack_bits(one)
        assert packed.dtype == torch.uint8 and packed.shape == (*one.shape[:-1], math.ceil(one.size(-1) / 8))
        assert torch.equal(unpack_bits(packed, one.size(-1)), one)


def test_a_bit_of_a_position_stays_where_it_was():
    """Checkpoints hold packed masks: position i is bit i mod 8 of byte i div 8."""
    mask = torch.zeros(19, dtype=torch.bool)
    mask[[0, 3, 9, 18]] = True
    assert pack_bits(mask).tolist() == [0b1001, 0b10, 0b100]


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
