"""`attn-reg report curves`: known curves come back from a log, as a schedule that scheduled dropout reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from attn_reg_plugin.cli import _parsed
from attn_reg_plugin.commands.of_settings import Command
from attn_reg_plugin.experiments.report.drop_rates import Rates, fit_curve, read_rates
from attn_reg_plugin.regularizers.scheduled_dropout import Curve, Schedule

DROP = {
    "encoder.self[0]": Curve(((0, 0.6), (300, 0.9), (999, 0.8))),
    "encoder.self[1]": Curve(((0, 0.5), (999, 0.9))),
    "encoder.self[10]": Curve(((0, 0.7),)),
    "decoder.cross[0]": Curve(((0, 1.0), (500, 0.2), (999, 1.0))),
}


def line(tag: str, record: Mapping[str, object]) -> str:
    """A line as fairseq logs it: numbers are text."""
    return f"2026-01-01 00:00:00 | INFO | {tag} | {json.dumps(record)}\n"


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


def report(*arguments: object) -> int:
    """`attn-reg report curves` with these arguments."""
    return Command("report curves").run(_parsed("report curves", [str(argument) for argument in arguments]))


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "train.log"
    path.parent.mkdir()
    path.write_text(log(), encoding="utf-8")
    return path


@pytest.mark.parametrize(("length", "noise"), [(1, 0.0), (10, 0.0), (50, 0.0), (2, 0.02)])
def test_known_curves_come_back(tmp_path: Path, length: int, noise: float) -> None:
    """However many updates a line covers, since a rate is understood as a mean over them; noise is averaged."""
    path, out = tmp_path / "train.log", tmp_path / "out" / "learned.yaml"
    path.write_text(log(length, noise=noise), encoding="utf-8")
    assert report(path, "--out", out, "--knots", "11") == 0
    entries = Schedule.read(str(out)).entries
    assert [selector.pattern for selector, _ in entries] == list(DROP)
    for (_, found), true in zip(entries, DROP.values(), strict=True):
        assert [found(t) for t in range(0, 1000, 37)] == pytest.approx([true(t) for t in range(0, 1000, 37)], abs=0.02)
    for series in read_rates(path).values():
        assert fit_curve(series, 11).error == pytest.approx(noise, rel=0.2, abs=0.01)


def test_the_values_at_fixed_knots_are_the_least_squares_solution() -> None:
    """With two knots the fit is the regression line, each stretch weighing as much as it has updates."""
    generator = np.random.default_rng(1)
    ends = np.cumsum(generator.integers(1, 20, 40))
    starts = np.concatenate([[0], ends[:-1]])
    drops = generator.uniform(0.3, 0.6, 40)
    fit = fit_curve(Rates(starts, ends, drops), knots=2)
    line = np.poly1d(np.polyfit((starts + ends - 1) / 2, drops, 1, w=np.sqrt(ends - starts)))
    assert [x for x, _ in fit.curve.points] == [0, ends[-1] - 1]
    for position, drop in fit.curve.points:
        assert drop == pytest.approx(line(position), abs=6e-5)
    error = np.sqrt(np.mean((line((starts + ends - 1) / 2) - drops) ** 2))
    assert fit.error == pytest.approx(error, abs=1e-4)


def test_the_curve_of_a_log_with_a_single_line_is_constant(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(inner(100, 100, {"encoder.self[0]": Curve(((0, 0.75),))}), encoding="utf-8")
    assert fit_curve(read_rates(path)["encoder.self[0]"]).curve == Curve(((0, 0.75),))


HALF, QUARTER = ({"encoder.self[0]": Curve(((0, drop),))} for drop in (0.5, 0.25))
EPOCHS = [
    line("train", {"epoch": e, "train_drop_encoder.self[0]": str(0.6 - e / 10), "train_num_updates": str(100 * e)})
    for e in (1, 2, 3)
]
BROKEN = line("train_inner", {"num_updates": "30", "drop_encoder.self[0]": "nan"})
GAP = line("train_inner", {"num_updates": "20", "drop_encoder.self[0]": None, "drop_encoder.self[1]": "0.5"})


@pytest.mark.parametrize(
    ("lines", "starts", "ends", "drops"),
    [
        (EPOCHS, [0, 100, 200], [100, 200, 300], [0.5, 0.4, 0.3]),
        (
            [inner(10, 10, HALF), inner(20, 10, HALF), BROKEN, inner(20, 10, QUARTER), '{"drop_enc'],
            [0, 10],
            [10, 20],
            [0.5, 0.25],
        ),
        ([inner(10, 10, HALF), GAP, inner(30, 10, HALF)], [0, 20], [10, 30], [0.5, 0.5]),
        ([inner(510, 10, HALF), inner(520, 10, HALF)], [500, 510], [510, 520], [0.5, 0.5]),
    ],
    ids=["epochs alone", "repeated updates and broken lines", "a site without a rate", "a log from the middle"],
)
def test_stretches_of_logs(
    tmp_path: Path, lines: list[str], starts: list[int], ends: list[int], drops: list[float]
) -> None:
    (path := tmp_path / "train.log").write_text("".join(lines), encoding="utf-8")
    rates = read_rates(path)["encoder.self[0]"]
    assert rates.starts.tolist() == starts and rates.ends.tolist() == ends and rates.drops == pytest.approx(drops)


def test_a_folder_stands_for_the_log_in_it(log_file: Path) -> None:
    (log_file.parent / "other.log").write_text("S-0\tdrop_ nothing\n", encoding="utf-8")
    assert list(read_rates(log_file.parent)) == list(DROP)


def test_of_an_output_folder_of_trainer_the_last_checkpoint_is_read(tmp_path: Path) -> None:
    for step in (100, 20):
        history = [{"step": step // 2, "drop_encoder.self[0]": 0.3}, {"step": step, "drop_encoder.self[0]": 0.2}]
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.parent.mkdir()
        state.write_text(json.dumps({"log_history": history}), encoding="utf-8")
    assert read_rates(tmp_path)["encoder.self[0]"].ends.tolist() == [50, 100]
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"checkpoint-100/trainer_state.json holds no drop rates; give the log of a f"):
        read_rates(tmp_path)


def test_what_cannot_be_reported_is_refused(tmp_path: Path, log_file: Path) -> None:
    out, empty = tmp_path / "schedule.yaml", tmp_path / "empty"
    (empty / "inner").mkdir(parents=True)
    (empty / "inner" / "train.log").write_text("nothing\n", encoding="utf-8")
    for place, more, said in (
        (tmp_path / "absent", [], r"there is no run .*absent"),
        (log_file, ["--out", tmp_path / "s.txt"], r"--out is .*s.txt, but its name must end in .yaml or .yml"),
        (log_file, ["--knots", "1"], "--knots is 1, but must be at least 2"),
        (empty, [], r"empty holds no drop rates"),
        (empty / "inner" / "train.log", [], r"train.log holds no drop rates; give the log of a fairseq"),
        (log_file, ["--plot", tmp_path / "p.xyz"], r"p.xyz must end in one of .avif"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            report(place, "--out", out, *more)
    with pytest.raises(ValueError, match=r"unrecognized arguments: .*train\.log"):
        report(log_file, log_file, "--out", out)
    assert not out.exists()


def test_the_plot_needs_matplotlib_before_anything_is_written(
    tmp_path: Path, log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, figure = tmp_path / "schedule.yaml", tmp_path / "figures" / "rates.png"
    with monkeypatch.context() as patch:
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=r"^a plot needs matplotlib, which is not installed"):
            report(log_file, "--out", out, "--plot", figure)
        assert not out.exists()
        assert report(log_file, "--out", out) == 0
    pytest.importorskip("matplotlib")
    assert report(log_file, "--out", out, "--plot", figure) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_it_prints_how_to_train_with_the_schedule(
    tmp_path: Path, log_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "schedule.yaml"
    report(log_file, "--out", out)
    *sites, flags = capsys.readouterr().out.splitlines()
    assert [site.partition(":")[0] for site in sites] == list(DROP)
    assert flags.endswith(f"--scheduled-dropout-schedule {out} --attn-sites 'encoder.self[0,1,10] decoder.cross[0]'")


def test_what_attend_out_learned_is_a_schedule_to_train_with(tmp_path: Path) -> None:
    """The log of AttendOut gives a file with which fairseq-train drops as much."""
    pytest.importorskip("fairseq")
    from tests.tasks.fairseq_runs import make_corpus, train

    data, size = make_corpus(tmp_path / "corpus"), ["--max-update", "20", "--batch-size", "16", "--no-save"]
    size.append("--attn-rates-by-site")
    learned = ["--attn-reg", "attend_out", "--attend-out-steps", "2", "--attend-out-generator-lr", "0.1"]
    train(data, tmp_path / "attend_out", *learned, *size).check()
    out = tmp_path / "schedule.yaml"
    assert report(tmp_path / "attend_out", "--out", out) == 0
    cheap = ["--attn-reg", "scheduled_dropout", "--scheduled-dropout-schedule", str(out)]
    train(data, tmp_path / "scheduled", *cheap, *size).check()
    expensive, repeated = (read_rates(tmp_path / name) for name in ("attend_out", "scheduled"))
    assert list(repeated) == list(expensive) == ["encoder.self[0]", "encoder.self[1]"]
    for site, rates in repeated.items():
        assert abs(rates.drops.mean() - expensive[site].drops.mean()) < 0.05, site
