"""AD-DROP's candidates against a literal evaluation, row by row, and how they are dropped."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attn_reg_plugin import candidate_region, drop_candidates
from attn_reg_plugin.attention.masks import (
    dropped_fraction,
    pack_bits,
    sample_keep,
    scores_of,
    unpack_bits,
)
from tests.attention.literal import causal, check_region, loop_candidates, padding

RATIOS = [i / 10 for i in range(11)]
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


def distinct(*shape: int) -> torch.Tensor:
    """Random numbers of which no two in a row are equal, in any dtype."""
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 2.0]), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 1000),
    st.sampled_from(["high", "low"]),
)
@example([(0.0, True)] * 10, 300, "high")  # a constant row loses only what the rank gives
@example([(0.5, True)], 0, "high")
@example([(0.5, True)], 1, "high")  # int(1 · (1 - p)) = 0 for every p > 0
@example([(0.5, False)], 1000, "low")
def test_region_of_any_row(row, permille, direction):
    scores, valid = (torch.tensor(values).view(1, 1, 1, -1) for values in zip(*row, strict=True))
    region = candidate_region(scores, valid, permille / 1000, direction)
    check_region(region, scores, valid, permille / 1000, direction)
    keep = sample_keep(scores, valid, permille / 1000, 1.0, direction)
    check_region(valid & ~keep, scores, valid, permille / 1000, direction)


def test_counts_are_exact_for_every_length():
    """Guarded against round-off: 10 · (1 - 0.9) is below 1."""
    for percent in range(101):
        p = percent / 100
        region = candidate_region(torch.zeros(1, 1, 300, 300), torch.ones(300, 300).tril(-1).bool(), p)
        assert region.sum(-1).flatten().tolist() == [n - int(n * (1 - Fraction(str(p)))) for n in range(300)]


def test_padding_never_matters():
    attribution, valid = distinct(3, 2, 6, 6), padding([6, 4, 2], 6) & causal(6)
    region = candidate_region(attribution, valid, 0.4)
    for junk in (1e30, -1e30, float("inf"), float("-inf"), float("nan")):
        changed = torch.where(valid, attribution, torch.tensor(junk))
        assert candidate_region(changed, valid, 0.4).equal(region)
    shorter = candidate_region(attribution[1:2, :, :4, :4], causal(4), 0.4)
    assert region[1:2, :, :4, :4].equal(shorter)


ROWS = torch.randn(1, 1, 2, 2)


@pytest.mark.parametrize(
    "draw, said",
    [
        *(
            (draw, rf"^{name} is {{}}, but must lie in \[0, 1\]$")
            for name, draw in (
                ("p", lambda value: candidate_region(ROWS, None, value)),
                ("p", lambda value: sample_keep(ROWS, None, value, 0.5)),
                ("q", lambda value: drop_candidates(ROWS > 0, None, value)),
                ("q", lambda value: sample_keep(ROWS, None, 0.5, value)),
            )
        ),
        (lambda value: candidate_region(ROWS, None, 0.5, str(value)), "^direction is '{}', but must be one of high"),
        (lambda value: sample_keep(ROWS, None, 0.5, 0.5, str(value)), "^direction is '{}', but must be one of high"),
    ],
)
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), float("-inf")])
def test_ratios_outside_the_unit_interval_and_unknown_directions_are_refused(draw, said, value):
    with pytest.raises(ValueError, match=said.format(value)):
        draw(value)


def test_dropped_fraction_counts_every_head_and_query():
    assert [int(number) for number in dropped_fraction(*2 * [torch.ones(0, 2, 9, 9, dtype=torch.bool)])] == [0, 0]
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


def test_what_a_mask_adds_to_scores_is_made_once_until_the_mask_changes():
    mask = torch.tensor([True, False, True])
    scores = scores_of(mask, torch.float32)
    assert scores.tolist() == [0, -math.inf, 0] and scores_of(mask, torch.float32) is scores
    assert scores_of(mask, torch.float64).dtype == torch.float64
    mask[0] = False
    assert scores_of(mask, torch.float32).tolist() == [-math.inf, -math.inf, 0]
    with torch.inference_mode():
        assert scores_of(~mask, torch.float32).tolist() == [0, 0, -math.inf]
        scores_of(mask, torch.float16)
    assert not scores_of(mask, torch.float16).is_inference()  # else autograd would refuse it


def test_a_bit_of_a_position_stays_where_it_was():
    """Checkpoints hold packed masks: position i is bit i mod 8 of byte i div 8."""
    mask = torch.zeros(19, dtype=torch.bool)
    mask[[0, 3, 9, 18]] = True
    assert pack_bits(mask).tolist() == [0b1001, 0b10, 0b100]


def composed(attribution, valid, p, q, **options):
    """The two public functions one after the other."""
    return drop_candidates(candidate_region(attribution, valid, p), valid, q, **options)


EACH_WAY = pytest.mark.parametrize("draw", [composed, sample_keep])


def chi_square(outcomes: torch.Tensor, q: float) -> float:
    """Compare N rows of K booleans (True = dropped) with K independent draws with probability q."""
    number, width = outcomes.shape
    codes = (outcomes.long() * 2 ** torch.arange(width)).sum(-1)
    statistic = 0.0
    for code, count in enumerate(codes.bincount(minlength=2**width).tolist()):
        ones = bin(code).count("1")
        expected = number * q**ones * (1 - q) ** (width - ones)
        statistic += (count - expected) ** 2 / expected
    return statistic


@EACH_WAY
@pytest.mark.parametrize("q", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("mask", [False, True])
def test_candidates_are_dropped_independently_with_probability_q(q, draw, mask):
    """Within a row, and over rows and heads; the quantiles are those of χ² at 0.9999."""
    torch.manual_seed(7)
    attribution = torch.tensor([0.0, 3.0, 1.0, 5.0, 4.0, 2.0]).expand(10_000, 1, 1, 6)
    valid = torch.ones(10_000, 1, 1, 6, dtype=torch.bool) if mask else None
    keep = draw(attribution, valid, 0.5, q)
    assert keep[..., [0, 2, 5]].all()
    assert chi_square(~keep[:, 0, 0, [1, 3, 4]], q) < 29.88  # 7 degrees of freedom
    keep = draw(torch.zeros(10_000, 2, 2, 1), None, 1.0, q)
    assert chi_square(~keep.view(-1, 4), q) < 44.26  # 15


@EACH_WAY
@pytest.mark.parametrize("p, q", [(0.0, 0.5), (0.0, 1.0), (0.5, 0.0), (0.5, 0.5), (0.5, 1.0), (1.0, 1.0)])
def test_limits(p, q, draw):
    """Only candidates are dropped, and what is certain draws nothing."""
    attribution, valid = torch.randn(3, 2, 4, 6), padding([6, 3, 0], 6)
    state = torch.get_rng_state()
    keep = draw(attribution, valid, p, q)
    least = valid & ~candidate_region(attribution, valid, p)
    assert not (least & ~keep).any() and not (keep & ~valid).any()
    if q in (0.0, 1.0) or p == 0:
        assert keep.equal(least if q == 1 else valid.expand(keep.shape))
        assert (p == 0 and q == 0.5) or torch.get_rng_state().equal(state)


@EACH_WAY
def test_the_source_of_the_draws(draw):
    """The global generator, or one that is given, which leaves that alone."""
    attribution = torch.randn(2, 2, 5, 8)

    def drawn(seed, own=False):
        generator = torch.Generator().manual_seed(seed) if own else None
        if not own:
            torch.manual_seed(seed)
        return draw(attribution, None, 0.5, 0.5, generator=generator)

    assert drawn(11).equal(first := drawn(11)) and not first.equal(drawn(12))
    state = torch.get_rng_state()
    assert drawn(1, own=True).equal(first := drawn(1, own=True)) and not first.equal(drawn(2, own=True))
    assert torch.get_rng_state().equal(state)


def test_enabled():
    attribution, valid = torch.randn(2, 2, 5, 8), padding([8, 3], 8)
    off = sample_keep(attribution, valid, 0.5, 0.5, enabled=torch.tensor(False))
    assert off.equal(valid.expand(off.shape))
    assert sample_keep(attribution, None, 0.5, 1.0, enabled=torch.tensor(False)).all()
    torch.manual_seed(13)
    on = sample_keep(attribution, valid, 0.5, 0.5, enabled=torch.tensor(True))
    torch.manual_seed(13)
    assert on.equal(sample_keep(attribution, valid, 0.5, 0.5))


def test_non_finite_attributions_keep_the_shape_of_a_mask():
    attribution = torch.full((2, 1, 3, 4), float("nan"))
    keep = sample_keep(attribution, padding([4, 2], 4), 0.5, 1.0)
    assert (keep.sum(-1).flatten().tolist()) == [2, 2, 2, 1, 1, 1]
