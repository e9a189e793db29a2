"""`examples/scheduled_dropout/fit_schedule.py`: known curves come back from a log, as a schedule."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from attn_reg_plugin.regularizers.base.schedule import Curve
from attn_reg_plugin.regularizers.scheduled_dropout import Schedule
from tests.experiments.report.run_folders import log_line as line
from tests.loading import example

DROP = {
    "encoder.self[0]": Curve(((0, 0.6), (300, 0.9), (999, 0.8))),
    "encoder.self[1]": Curve(((0, 0.5), (999, 0.9))),
    "encoder.self[10]": Curve(((0, 0.7),)),
    "decoder.cross[0]": Curve(((0, 1.0), (500, 0.2), (999, 1.0))),
}


def inner(end: int, length: int, drop: Mapping[str, Callable[[float], float]] = DROP, noise: float = 0.0) -> str:
    """The line after `end` updates: the mean drop rate of the last `length` of them."""
    generator = np.random.default_rng(end)
    rates = {
        f"drop_{site}": str(round(np.mean([curve(t) for t in range(end - length, end)]) + noise * draw, 4))
        for (site, curve), draw in zip(drop.items(), generator.standard_normal(len(drop)), strict=True)
    }
    return line("train_inner", {"epoch": 1, "update": 0.5, "loss": "4.2", "num_updates": str(end), **rates})


def log(length: int = 10, updates: int = 1000, noise: float = 0.0) -> str:
    """A whole log, with lines that say nothing of drop rates."""
    lines = [inner(end, length, noise=noise) for end in range(length, updates + 1, length)]
    valid = line("valid", {"epoch": 1, "valid_loss": "3", "valid_num_updates": "500"})
    return "".join([f"INFO | namespace {{'drop_': 1}}\n{valid}", *lines, "done drop_encoder.self[0] {\n"])


fitting = example("scheduled_dropout/fit_schedule.py")


def run(*arguments: object) -> None:
    """The example's command."""
    fitting.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(("length", "noise"), [(1, 0.0), (10, 0.0), (50, 0.0), (2, 0.02)])
def test_known_curves_come_back(tmp_path: Path, length: int, noise: float) -> None:
    """However many updates a line covers, since a rate is understood as a mean over them; noise is averaged."""
    path, out = tmp_path / "train.log", tmp_path / "learned.txt"
    path.write_text(log(length, noise=noise), encoding="utf-8")
    run(path, "--out", out, "--knots", "11")
    entries = Schedule.read(str(out)).entries
    assert [selector.pattern for selector, _ in entries] == list(DROP)
    for (_, found), true in zip(entries, DROP.values(), strict=True):
        assert [found(t) for t in range(0, 1000, 37)] == pytest.approx([true(t) for t in range(0, 1000, 37)], abs=0.02)
    for series in fitting.read_rates(path).values():
        assert fitting.fit(series, 11)[1] == pytest.approx(noise, rel=0.2, abs=0.01)


def test_the_values_at_fixed_knots_are_the_least_squares_solution() -> None:
    """With two knots the fit is the regression line, each stretch weighing as much as it has updates."""
    generator = np.random.default_rng(1)
    ends = np.cumsum(generator.integers(1, 20, 40))
    starts = np.concatenate([[0], ends[:-1]])
    drops = generator.uniform(0.3, 0.6, 40)
    curve, found = fitting.fit(fitting.Rates(starts, ends, drops), knots=2)
    line = np.poly1d(np.polyfit((starts + ends - 1) / 2, drops, 1, w=np.sqrt(ends - starts)))
    assert [x for x, _ in curve.points] == [0, ends[-1] - 1]
    for position, drop in curve.points:
        assert drop == pytest.approx(line(position), abs=6e-5)
    error = np.sqrt(np.mean((line((starts + ends - 1) / 2) - drops) ** 2))
    assert found == pytest.approx(error, abs=1e-4)


def test_the_curve_of_a_log_with_a_single_line_is_constant(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(inner(100, 100, {"encoder.self[0]": Curve(((0, 0.75),))}), encoding="utf-8")
    assert fitting.fit(fitting.read_rates(path)["encoder.self[0]"], 9)[0] == Curve(((0, 0.75),))


HALF, QUARTER = ({"encoder.self[0]": Curve(((0, drop),))} for drop in (0.5, 0.25))
EPOCHS = [
    line("train", {"epoch": e, "train_drop_encoder.self[0]": str(0.6 - e / 10), "train_num_updates": str(100 * e)})
    for e in (1, 2, 3)
]
BROKEN = line("train_inner", {"num_updates": "30", "drop_encoder.self[0]": "nan"})
REPEATED = [inner(10, 10, HALF), inner(20, 10, HALF), BROKEN, inner(20, 10, QUARTER), '{"drop_enc']
GAP = line("train_inner", {"num_updates": "20", "drop_encoder.self[0]": None, "drop_encoder.self[1]": "0.5"})


@pytest.mark.parametrize(
    ("lines", "starts", "ends", "drops"),
    [
        (EPOCHS, [0, 100, 200], [100, 200, 300], [0.5, 0.4, 0.3]),
        (REPEATED, [0, 10], [10, 20], [0.5, 0.25]),
        ([inner(10, 10, HALF), GAP, inner(30, 10, HALF)], [0, 20], [10, 30], [0.5, 0.5]),
        ([inner(510, 10, HALF), inner(520, 10, HALF)], [500, 510], [510, 520], [0.5, 0.5]),
    ],
    ids=["epochs alone", "repeated updates and broken lines", "a site without a rate", "a log from the middle"],
)
def test_stretches_of_logs(
    tmp_path: Path, lines: list[str], starts: list[int], ends: list[int], drops: list[float]
) -> None:
    (path := tmp_path / "train.log").write_text("".join(lines), encoding="utf-8")
    rates = fitting.read_rates(path)["encoder.self[0]"]
    assert rates.starts.tolist() == starts and rates.ends.tolist() == ends and rates.drops == pytest.approx(drops)


def test_of_trainer_the_history_is_read_also_of_a_tower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = [{"step": step, **{f"drop_encoder.self[{n}]@text": 0.3 for n in (0, 1)}} for step in (50, 100)]
    (state := tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    run(state, "--out", tmp_path / "schedule.txt")
    assert Schedule.read(str(tmp_path / "schedule.txt")).entries[0][1] == Curve(((0, 0.3), (99, 0.3)))
    assert "--attn-sites 'encoder.self[0,1]@text'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe{}",
        b'{"drop_encoder.self[0]": "x", "num_updates": 3}',
        b'{"drop_encoder.self[0]": NaN, "num_updates": 3}',
        b'{"drop_encoder.self[0]": 0.5, "num_updates": Infinity}',
        b'{"drop_' + b"[" * 5000 + b"}",
    ],
)
def test_what_is_no_log_has_no_rates(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "log", "--out", tmp_path / "x.yaml")
    assert f"{tmp_path / 'log'} holds no drop rates" in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()


def test_it_draws_and_prints_how_to_train_with_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figure = tmp_path / "schedule.txt", tmp_path / "rates.png"
    (tmp_path / "train.log").write_text(log(), encoding="utf-8")
    run(tmp_path / "train.log", "--out", out, "--plot", figure)
    *sites, flags = capsys.readouterr().out.splitlines()
    assert [site.partition(":")[0] for site in sites] == list(DROP)
    assert flags.endswith(f"--scheduled-dropout-schedule {out} --attn-sites 'encoder.self[0,1,10] decoder.cross[0]'")
    assert figure.read_bytes().startswith(b"\x89PNG")
