"""DropHead: the outputs of heads against the formula, never all heads, the V of its schedule."""

from __future__ import annotations

import math

import pytest
import torch

from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.head_drop import HeadDrop, heads_kept, rescaled


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
def test_heads_are_dropped_independently_but_never_all(p):
    n, heads = 4000, 4
    keep = heads_kept(p, (n, heads, 5, 6), None, torch.Generator().manual_seed(1))
    assert keep.shape == (n, heads, 1, 1) and keep.dtype == torch.bool
    kept = keep.flatten(1).sum(1)
    assert kept.min() >= 1
    if p in (0.0, 1.0):
        assert (kept == (heads if p == 0 else 1)).all()
    # all heads are dropped in pᴴ of the draws, and one of them, any, is kept then
    expected = 1 - p + p**heads / heads
    assert (keep.float().mean((0, 2, 3)) - expected).abs().max() < 5 * 0.5 / math.sqrt(n)
    torch.testing.assert_close(rescaled(keep).sum(1), torch.full((n, 1, 1), float(heads)))


def literal_v(p, start, turn, end, t):
    """The V, point by point."""
    if t <= turn:
        return p * (1 - (t - start) / (turn - start))
    return p * min(1.0, (t - turn) / (end - turn))


def test_the_schedule_is_a_v_over_updates():
    regularizer = HeadDrop(p=0.4, turn=10, end=50)
    for update in range(0, 61, 5):
        regularizer.begin_update(update)
        assert regularizer.drop_probability() == pytest.approx(literal_v(0.4, 0, 10, 50, update))
        assert regularizer.due() == (update != 10)


def test_the_schedule_counts_epochs_from_one():
    regularizer = HeadDrop(p=0.4, turn=3, end=10, unit="epoch")
    with pytest.raises(RuntimeError, match=r"^unit='epoch' counts epochs: call regularizer.begin_epoch"):
        regularizer.due()
    for epoch in range(1, 13):
        regularizer.begin_epoch(epoch)
        assert regularizer.drop_probability() == pytest.approx(literal_v(0.4, 1, 3, 10, epoch))


@pytest.mark.parametrize("updates", [1, 10, 48])
def test_over_progress_the_v_stretches_over_the_training(updates):
    regularizer = HeadDrop(p=0.4, turn=0.25, end=1.0, unit="progress")
    with pytest.raises(RuntimeError, match=r"^unit='progress' counts the share .*begin_training\(updates\), with"):
        regularizer.due()
    with pytest.raises(ValueError, match=r"^unit='progress' needs the number of updates .*--max-update or --max-epoch"):
        regularizer.begin_training(None)
    with pytest.raises(ValueError, match=r"^the number of updates is 0, but must be at least 1"):
        regularizer.begin_training(0)
    regularizer.begin_training(updates)
    for update in range(updates + 2):
        regularizer.begin_update(update)
        expected = literal_v(0.4, 0, 0.25 * updates, updates, min(update, updates))
        assert regularizer.drop_probability() == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"^end is 2, but progress ends at 1, with the training$"):
        HeadDrop(turn=0.5, end=2, unit="progress")


def test_other_units_do_without_the_length_and_parts_of_a_combination_hear_it():
    for options in ({"unit": "progress"}, {"unit": "epoch", "turn": 3, "end": 10}):
        build("head_drop", **options).begin_training(None)
    together = build("head_drop+r_drop", head_drop={"turn": 0.5, "end": 1, "unit": "progress"})
    together.begin_training(8)
    together.begin_update(4)
    (dropping,) = (part for part in together.parts if part.name == "head_drop")
    assert dropping.drop_probability() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"turn": 5},
        {"end": 5},
        {"turn": 5, "end": 5},
        {"turn": 1, "end": 5, "unit": "epoch"},
        {"turn": 5, "end": 1, "unit": "progress"},
    ],
)
def test_a_v_that_does_not_turn_is_refused(options):
    with pytest.raises(ValueError, match=r"^turn is \d and end is \d, but a V-shaped schedule that counts (up|ep|pr)"):
        build("head_drop", **options)
