"""DropHead: how many heads are kept, never none, and the V of its schedule."""

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


@pytest.mark.parametrize("updates", [1, 10, 48])
@pytest.mark.parametrize(("unit", "turn", "end"), [("update", 10, 50), ("epoch", 3, 10), ("progress", 0.25, 1.0)])
def test_the_schedule_is_a_v_over_updates_epochs_from_one_or_the_training(unit, turn, end, updates):
    regularizer, scale, start = HeadDrop(p=0.4, turn=turn, end=end, unit=unit), 1, int(unit == "epoch")
    if unit != "update":
        waits = r"begin_training\(updates\), with" if unit == "progress" else "call regularizer.begin_epoch"
        with pytest.raises(RuntimeError, match=f"^unit='{unit}' counts .*{waits}"):
            regularizer.due()
    if unit == "progress":
        for length, said in (
            (None, "^unit='progress' needs the number of updates "),
            (0, "^the number of updates is 0, but must be at least 1"),
        ):
            with pytest.raises(ValueError, match=said):
                regularizer.begin_training(length)
        regularizer.begin_training(updates)
        scale = updates
    else:
        regularizer.begin_training(None)
    for count in range(start, 61):
        (regularizer.begin_epoch if unit == "epoch" else regularizer.begin_update)(count)
        reached = min(count, updates) if unit == "progress" else count
        expected = literal_v(0.4, start, turn * scale, end * scale, reached)
        assert regularizer.drop_probability() == pytest.approx(expected)
        assert regularizer.due() == (expected != 0)


def test_parts_of_a_combination_hear_of_the_length_and_p_throughout_does_without():
    HeadDrop(unit="progress").begin_training(None)
    together = build("head_drop+r_drop", head_drop={"turn": 0.5, "end": 1, "unit": "progress"})
    together.begin_training(8)
    together.begin_update(4)
    (dropping,) = (part for part in together.parts if part.name == "head_drop")
    assert dropping.drop_probability() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"turn": 0.5, "end": 2, "unit": "progress"}, "end is 2, but progress ends at 1, with the training$"),
        *(
            (options, r"turn is \d and end is \d, but a V-shaped schedule that counts (up|ep|pr)")
            for options in ({"turn": 5}, {"end": 5}, {"turn": 5, "end": 5}, {"turn": 1, "end": 5, "unit": "epoch"})
        ),
        (
            {"turn": 5, "end": 1, "unit": "progress"},
            r"turn is \d and end is \d, but a V-shaped schedule that counts pr",
        ),
    ],
)
def test_a_v_that_does_not_turn_is_refused(options, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        build("head_drop", **options)
