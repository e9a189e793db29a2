"""Scheduled dropout: how a schedule is written, which curve holds where, and the masks that are drawn from it."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from attn_reg_plugin import find_sites
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers import ScheduledDropout, build
from attn_reg_plugin.regularizers.base.schedule import Curve
from attn_reg_plugin.regularizers.scheduled_dropout import PAPER, Schedule
from tests.attention.tiny_model import drawn, tokens, valid_of


def test_later_entries_override_earlier_ones_and_sites_without_a_curve_are_plain(translator):
    schedule = "drop encoder.self: 0:0.5; drop decoder.self: 0:0.25; drop encoder.self[1]: 0:0.75"
    with ScheduledDropout(schedule=schedule, sites="*").attach(translator) as regularizer:
        drop = regularizer.drop_probabilities()
    expected = {"encoder.self[0]": 0.5, "encoder.self[1]": 0.75, "decoder.self[0]": 0.25, "decoder.self[1]": 0.25}
    assert drop == {**expected, "decoder.cross[0]": 0.0, "decoder.cross[1]": 0.0}


@pytest.mark.parametrize("pattern", ["decoder.cross", "encoder.self[2]"])
def test_an_entry_that_fits_no_regularized_site_is_refused_and_nothing_stays_attached(translator, pattern):
    regularizer = ScheduledDropout(schedule=f"drop encoder.self: 0:0.5; drop {pattern}: 0:0.5")
    with pytest.raises(ValueError, match=r"does not fit the regularized sites, which are: encoder\.self\[0\]"):
        regularizer.attach(translator)
    assert regularizer.attached_sites == [] and not translator._forward_pre_hooks


def test_updates_count_from_zero_and_epochs_from_one(classifier):
    with ScheduledDropout(schedule="drop *: 0:0.8 4:0.0").attach(classifier) as regularizer:
        for update in range(7):
            assert list(regularizer.drop_probabilities().values()) == pytest.approx([max(0.8 - 0.2 * update, 0)] * 2)
            assert regularizer.due() == (update < 4)
            regularizer.end_update()
        regularizer.begin_update(1)
        assert regularizer.drop_probabilities()["encoder.self[1]"] == pytest.approx(0.6)
    with ScheduledDropout(schedule="drop *: 1:0.2 3:0.6", unit="epoch").attach(classifier) as regularizer:
        with pytest.raises(RuntimeError, match="begin_epoch"):
            classifier(tokens([4, 3], 4))
        for epoch, drop in ((1, 0.2), (2, 0.4), (3, 0.6), (9, 0.6)):
            regularizer.begin_epoch(epoch)
            regularizer.end_update()
            assert regularizer.drop_probabilities()["encoder.self[0]"] == pytest.approx(drop)


def test_masks_have_the_rate_of_their_curve_independently_of_place(translator):
    """χ² of how often each position is kept, over the examples of a batch; nothing on padding or the future."""
    batch = tokens([8] * 150 + [5] * 150, 8, seed=1), tokens([8] * 150 + [3] * 150, 8, seed=2)
    wanted = {"encoder.self[0]": 0.6, "encoder.self[1]": 0.75, "decoder.self[1]": 0.3, "decoder.cross[0]": 0.9}
    schedule = "drop encoder.self[0]: 1:0.4; drop encoder.self[1]: 1:0.25; drop decoder.cross[0]: 1:0.1"
    regularizer = ScheduledDropout(schedule=f"{schedule}; drop decoder.self[1]: 0:0.9 2:0.5", sites="*")
    regularizer.begin_update(1)
    torch.manual_seed(11)
    valids, masks = valid_of(batch), {}
    with regularizer.attach(translator):
        translator(*batch)
        sums = regularizer.statistics.take()
        for site in regularizer.attached_sites:
            asked = site.request.sampler
            masks[site.name] = (
                None if asked is None else drawn(asked, site.calls.made[0], (300, 2, 8, 8), valids[site.name])
            )
    for name, p in wanted.items():
        keep, valid = masks[name], valids[name]
        assert keep.shape == (300, 1, 8, 8), "shared by all heads"
        assert not (keep & ~valid).any()
        valid = valid.expand(keep.shape)
        n = valid.sum(0).double()
        cells = n > 0
        kept = (keep & valid).sum(0).double()
        chi_square = ((kept - n * p)[cells] ** 2 / (n * p * (1 - p))[cells]).sum()
        freedom = int(cells.sum())
        assert abs(float(chi_square) - freedom) < 5 * math.sqrt(2 * freedom), name
        rate = float(sums[f"dropped/{name}"] / sums[f"valid/{name}"])
        assert rate == pytest.approx(float(1 - kept.sum() / n.sum()), abs=1e-6)
        assert sums[f"valid/{name}"] == n.sum()
    assert all(masks[name] is None for name in ("decoder.self[0]", "decoder.cross[1]"))
    pair = torch.stack([masks[f"encoder.self[{layer}]"][:150].flatten().double() for layer in (0, 1)])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(pair.size(1)), "layers draw for themselves"


LAYERS = {"encoder": 12, "decoder": 3}
QNLI = Path(__file__).parents[2] / "examples" / "scheduled_dropout" / "qnli.txt"


def literal(points, position):
    """The interpolation, segment by segment."""
    if position <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= position <= x1:
            return y0 * (x1 - position) / (x1 - x0) + y1 * (position - x0) / (x1 - x0)
    return points[-1][1]


@pytest.mark.parametrize(
    "points", [[(0, 0.6), (1000, 0.9)], [(10, 0.2), (20, 1.0), (25.5, 0.0), (100, 0.4)], [(7, 0.3)]], ids=str
)
def test_a_curve_is_linear_between_its_points_and_constant_outside(points):
    curve = Curve(tuple(points))
    for position in [0, 5, 7, 10, 11, 15, 20, 23, 25.5, 60, 100, 500, 999, 1000, 10**6]:
        assert curve(position) == pytest.approx(literal(points, position), abs=1e-12)
    for position, keep in points:
        assert curve(position) == keep, "exactly"
    assert all(Curve(((0, 1.0), (7, 1.0), (10, 0.3)))(t) == 1.0 for t in range(8))


SAME = [
    "drop encoder.self: 0:0.6 1000:0.1; drop decoder.cross[0,2-3]: 5:1",
    "drop encoder.self:0:0.6 1000:0.1;drop   decoder.cross[0,2-3]:5:1;",
    "\n        drop encoder.self: 0:0.6 1e3:0.10  # a comment\n        drop decoder.cross[0,2-3]: 5:1.0\n        ",
    "# a comment\ndrop encoder.self: 0:0.6 1000:0.1  # another\n\ndrop decoder.cross[0,2-3]: 5:1\n",
]
SAME_FILES = [SAME[-1], "drop encoder.self: 0:0.6 1000:0.1\r\ndrop decoder.cross[0,2-3]: 5:1\r\n"]


@pytest.mark.parametrize("file, source", [*((False, text) for text in SAME), *((True, text) for text in SAME_FILES)])
def test_every_way_to_write_a_schedule_means_the_same(file, source, tmp_path):
    if file:
        path = tmp_path / "schedule.txt"
        path.write_bytes(source.encode())
        source = str(path)
    entries = Schedule.read(source).entries
    assert [selector.pattern for selector, _ in entries] == ["encoder.self", "decoder.cross[0,2-3]"]
    assert [curve.points for _, curve in entries] == [((0, 0.6), (1000, 0.1)), ((5, 1),)]


def test_a_schedule_is_written_as_it_is_read():
    text = "drop *: 0:0.25 7:1\ndrop encoder.self[1]: 3:0.125\n"
    assert str(Schedule.parse(text)) == text


BAD_POINTS = ["", "0.6", "0:0.6 x:0.9", "{0: 0.6}", "'0:0.6", "0:0.1..0.2..0.3", "0:0.1.."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule is empty; write for example 'drop encoder.self: 0:0.6 1000:0.1', or the path of a .txt"),
        (" ;\n# nothing\n", "the schedule is empty"),
        ("drop encoder.self", "schedule entry 'drop encoder.self' is not understood; write for example"),
        *((f"drop encoder.self: {points}", "is not understood") for points in BAD_POINTS),
        ("drop encoder.self[0: 0:0.6", "site pattern .* is not understood"),
        ("drop encoder.self: 0:1.6", r"entry 'drop encoder.self: 0:1.6': drop probability is 1.6, but must lie in \[0"),
        ("drop encoder.self: 0:nan", r"drop probability is nan, but must lie in \[0, 1\]"),
        ("drop encoder.self: -1:0.5", "position is -1, but must be a number from 0"),
        ("drop encoder.self: 10:0.5 10:0.6", "position 10 follows 10, but positions must increase"),
        ("drop encodr.self: 0:0.5", "site pattern 'encodr.self' is not understood"),
        ("lose encoder.self: 0:0.5", "schedule entry 'lose encoder.self: 0:0.5' is not understood"),
        ("drop: 0:0.5", "site pattern is empty"),
        ("drop *: 0:0.1..1.2", "drop probability is 1.2, but must lie in"),
    ],
)
def test_a_malformed_schedule_is_refused_in_a_sentence(text, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        ScheduledDropout(schedule=text)
    assert "\n" not in str(error.value)
    if text.strip():
        path = tmp_path / "bad.txt"
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^{path}: .*"):
            ScheduledDropout(schedule=str(path))


def test_a_schedule_file_that_cannot_be_read_is_refused(tmp_path, translator):
    """A file that is missing is refused on attaching only: a checkpoint is read without it."""
    path, latin = tmp_path / "absent.txt", tmp_path / "latin.txt"
    regularizer = ScheduledDropout(schedule=str(path))
    with pytest.raises(ValueError, match=r"^the schedule file .*absent.txt cannot be read \(No such file or directory"):
        regularizer.attach(translator)
    assert not any(site.attached for site in find_sites(translator, "*"))
    path.write_text("\ufeffdrop encoder.self: 0:0.5\n", encoding="utf-8")  # with a byte order mark
    with regularizer.attach(translator):
        assert regularizer.drop_probabilities()["encoder.self[0]"] == 0.5
    latin.write_bytes(b"drop encoder.self: 0:0.5 # \xe9t\xe9\n")
    with pytest.raises(ValueError, match=r"^the schedule file .*latin.txt is not UTF-8 text$"):
        ScheduledDropout(schedule=str(latin))


def test_a_point_beyond_the_training_is_refused():
    with pytest.raises(ValueError, match=r"^the schedule has a point at 9, but unit is progress, which ends at 1, w"):
        build("scheduled_dropout", schedule="drop *: 0:0.5 1:0.4; drop *: 9:0.5", unit="progress")


def test_first_and_last_layer_name_the_others():
    """The paper's row on twelve layers is qnli.txt, update by update."""
    encoder, decoder = ([AttentionSite(stack, "self", i) for i in range(n)] for stack, n in LAYERS.items())
    by_share, by_update = Schedule.parse(PAPER).assign(encoder), Schedule.read(str(QNLI)).assign(encoder)
    for name in by_update:
        for update in (0, 1000, 9822, 20000):
            assert by_share[name](min(1, update / 9822)) == pytest.approx(by_update[name](update)), name
    keeping = Schedule.parse("drop *: 0:0..0.6; drop decoder.self[2]: 0:0.5")
    found = [curve(0) for curve in keeping.assign(encoder + decoder).values()]
    assert found[:12:11] == [0, 0.6] and found[12:] == pytest.approx([0, 0.3, 0.5]), "each stack by its own layers"
    assert Schedule.parse("drop *: 0:0.2..0.9").assign(encoder[5:6]) == {"encoder.self[5]": Curve(((0, 0.2),))}
    assert Schedule.parse(str(keeping)) == keeping and "0..0.6" in str(keeping)


def test_the_example_drops_as_the_paper_says():
    """All layers start at 0.6, the first stays near 0.55, the fourth falls faster, lower layers drop more."""
    entries = Schedule.read(str(QNLI)).entries
    assert [selector.pattern for selector, _ in entries] == [f"encoder.self[{layer}]" for layer in range(12)]
    curves = [curve for _, curve in entries]
    assert all(curve(0) == 0.6 for curve in curves)
    assert all(0.54 <= curves[0](t) <= 0.6 for t in range(0, 20_000, 100))
    for t in (1000, 5000, 9822):
        assert curves[0](t) - curves[3](t) > 0.01 * t / 1000
        assert all(lower(t) > higher(t) for lower, higher in pairwise(curves))
