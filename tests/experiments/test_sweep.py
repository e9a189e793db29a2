"""`attn-reg sweep`: what its file may say, the runs of its trials, and what it reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fairseq")
pytest.importorskip("optuna")

from attn_reg_plugin import configuration
from attn_reg_plugin.cli import build_parser, main
from attn_reg_plugin.experiments import labelled_runs, sweep_plots, sweep_report
from attn_reg_plugin.experiments.executing_before import RunError
from attn_reg_plugin.experiments.steps import plan
from attn_reg_plugin.experiments.sweep_objective import objective_of
from attn_reg_plugin.experiments.sweep_report import Report, interval
from attn_reg_plugin.experiments.sweep_settings import Sweep
from attn_reg_plugin.experiments.sweep_space import Dimension, Slot
from attn_reg_plugin.experiments.sweep_study import COMPLETE, Entry
from attn_reg_plugin.experiments.training_log import TrainingLog
from tests.experiments.sweep_trials import ACCURACY, METHOD, PLAIN
from tests.experiments.sweep_trials import trials as sweep_trials
from tests.experiments.toy_corpus import empty_corpus
from tests.models.hf_folders import make_encoder, make_rte

pytestmark = pytest.mark.usefixtures("one_thread")
BASE = "{task: rte, data: data, model: encoder, epochs: 2, max_length: 32, cpu: true}"


def sweep(tmp_path: Path, text: str, *words: str) -> Sweep:
    path = tmp_path / "s.yaml"
    path.write_text(text, encoding="utf-8")
    arguments = build_parser("sweep").parse_args(["sweep", str(path), *words])
    return configuration.from_arguments(Sweep, arguments)


def of_space(space: str, more: str = "") -> str:
    return f"out: out\nfinetune: {BASE}\nspace: {space}\n{more}"


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "examples" / "sweep").glob("*.yaml")), ids=str)
def test_the_examples_are_accepted(path: Path) -> None:
    """Nothing is run."""
    *_, found = [step.args[1] for step in plan(path, [])]
    assert len(found.arms[0].slots) == len(found.arms[1].slots) >= 9
    assert {"p", "q"} <= {dimension.key for dimension in found.dimensions}, "a heat map"


# -- the space --------------------------------------------------------------------------------------------------------


def test_a_grid_and_as_many_plain_seeds(tmp_path: Path) -> None:
    text = of_space("{p: [0.1, 0.5], cross_tuning: [epoch, off], lr: [1e-5, 3e-5]}", "seeds: 1,7")
    method, plain = sweep(tmp_path, text).arms
    assert len(method.slots) == len(plain.slots) == 16 and len({slot.seed for slot in plain.slots}) == 16
    assert method.slots[0].values == {"p": 0.1, "cross_tuning": "epoch", "lr": 1e-5}
    assert method.slots[7].values == {"p": 0.1, "cross_tuning": "off", "lr": 3e-5}, "YAML's bare off is a text"
    assert [slot.seed for slot in method.slots[:4]] == [1, 7, 1, 7]
    assert [slot.seed for slot in plain.slots[:4]] == [1, 7, 8, 9]
    # the learning rate is searched for plain training too, p isn't
    assert [slot.values for slot in plain.slots] == [{"lr": slot.values["lr"]} for slot in method.slots]


def test_drawn_trials_take_the_seeds_in_turn(tmp_path: Path) -> None:
    text = of_space("{p: {uniform: [0.1, 0.9]}, lr: {log: [1e-5, 1e-4]}, batch_size: {int: [4, 9]}}", "seeds: 1,2")
    method, plain = sweep(tmp_path, text, "--trials", "5").arms
    assert [slot.seed for slot in method.slots] == [1, 2, 1, 2, 1] and method.slots[0].values is None
    assert [one.key for one in plain.dimensions] == ["lr", "batch_size"] and plain.slots[4].values is None
    assert sweep(tmp_path, of_space("{p: {uniform: [0.1, 0.9]}}", "trials: 3")).arms[1].slots[2].values == {}


def test_plain_training_alone(tmp_path: Path) -> None:
    (plain,) = sweep(tmp_path, of_space("{lr: [1e-5, 3e-5]}", "method: plain")).arms
    assert [(slot.seed, slot.values) for slot in plain.slots] == [(1, {"lr": 1e-5}), (2, {"lr": 3e-5})]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (of_space("{p: [0.1, 1.5]}"), "space: p is 1.5, but must lie in [0, 1]"),
        (of_space("{lr: [0.1, -1]}"), "space: lr is -1.0, but must be above 0"),
        (of_space("{lr: {log: [0.1, inf]}}"), "space: lr: log is ['0.1', 'inf']".replace("'0.1'", "0.1")),
        (of_space("{batch_size: [8, many]}"), "space: batch_size is 'many', but must be a whole number"),
        (of_space("{batch_size: {uniform: [1.5, 2]}}", "trials: 2"), "space: batch_size is 1.5, but must be a whole"),
        (of_space("{attribution: [gradient, magic]}"), "space: attribution is 'magic', but must be one of"),
        (of_space("{magic: [1]}"), "space: unknown key 'magic'; the keys are: sites, p, q, cross_tuning"),
        (of_space("{task: [rte, cola]}"), "space: unknown key 'task'; the keys are: "),
        (of_space("{p: 0.3}"), "space: p is 0.3, but must be a list of values, {log: [low, high]}"),
        (of_space("{p: []}"), "space: p is [], but must be a list of values"),
        (of_space("{p: [0.1, 0.10]}"), "space: p is [0.1, 0.1], but must not have a value twice"),
        (of_space("{p: {normal: [0, 1]}}"), "space: p is {'normal': [0, 1]}, but must be a list of values"),
        (of_space("{p: {uniform: [0.9, 0.1]}}"), "the first number must be below the second"),
        (of_space("{p: {uniform: [0.1]}}"), "space: p: uniform is [0.1], but must be two numbers"),
        (of_space("{lr: {log: [0, 1]}}"), "space: lr: log is [0, 1], but both must be above 0"),
        (of_space("{batch_size: {int: [1.5, 3]}}"), "space: batch_size: int is [1.5, 3], but both must be whole"),
        (of_space("{p: {uniform: [0, 1]}}"), "trials is 0, but must say how many, since p has a range in space"),
        (of_space("{}"), "space is {}, but must be a mapping"),
        (of_space("{p: [0.1]}", "method: magic"), "method: unknown method 'magic'; the methods are: "),
        (of_space("{p: [0.1]}", "method: {p: 0.3}"), "method is {'p': 0.3}, but must be a name, or {like: NAME"),
        (of_space("{p: [0.1]}", "method: {like: ad_drop, r: 1}"), "method: unknown setting 'r'; the settings are"),
        (of_space("{p: [0.1]}", "seeds: 1,1"), "seeds is 1,1, but must be distinct whole numbers"),
        (of_space("{p: [0.1]}", "pruner: magic"), "pruner is 'magic', but must be one of none, median"),
        (of_space("{p: [0.1]}", "magic: 1"), "unknown setting 'magic'; the settings are: out, finetune"),
        ("out: o\nspace: {p: [0.1]}", "give one of the sections finetune and compare, given 0"),
        ("out: o\nfinetune: 5\nspace: {p: [0.1]}", "finetune is 5, but must be a mapping of settings"),
        ("out: o\nfinetune: {task: rte}\nspace: {p: [0.1]}", "finetune: DATA is missing"),
        ("out: o\nfinetune: {task: rte, data: d, epoch: 1}\nspace: {p: [0.1]}", "finetune: unknown setting 'epoch'"),
        ("out: o\nfinetune: {task: rte, data: d, seeds: 1}\nspace: {p: [0.1]}", "finetune: seeds is decided by the s"),
        ("out: o\ncompare: {data: d}\nspace: {heads: [8, 3]}", "space: --heads 3 does not divide --embed-dim 512"),
    ],
)
def test_refusals_name_the_file_and_the_key(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(text, encoding="utf-8")
    assert main(["sweep", "s.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attn-reg sweep: s.yaml: ") and said in error
    assert error.count("\n") == error.count("s.yaml") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_it_is_a_step_and_its_keys_are_no_flags(tmp_path: Path) -> None:
    text = "task: rte\nsweep:\n  out: o/${task}\n  finetune: {task: '${task}', data: d}\n  space: {p: [0.1]}\n"
    (tmp_path / "s.yaml").write_text(text)
    (step,) = plan(tmp_path / "s.yaml", ["--task", "cola", "--jobs", "2"])
    found = getattr(step, "__self__", None) or step.args[-1]
    assert (found.finetune["task"], found.out, found.jobs) == ("cola", Path("o/cola"), 2)
    assert found.base().jobs == 2
    assert sweep(tmp_path, text).out == Path("o/rte")
    with pytest.raises(SystemExit):
        main(["sweep", str(tmp_path / "s.yaml"), "--space", "{}"])


# -- the runs ---------------------------------------------------------------------------------------------------------


def test_trials_of_translation_are_ordinary_runs(tmp_path: Path) -> None:
    data = empty_corpus(tmp_path / "data")
    text = f"out: {tmp_path}/out\ncompare: {{data: {data}, cpu: true}}\nspace: {{p: [0.2], dropout: [0.1, 0.3]}}\n"
    found = sweep(tmp_path, text + "method: {like: ad_drop, q: 0.7, title: ours}")
    method, plain = found.arms
    run = found.run_of(method, method.slots[1], method.slots[1].values)
    command = " ".join(run.train_command())
    assert run.folder == tmp_path / "out" / "trial-001-seed1" and run.title == "ours p 0.2, dropout 0.3, seed 1"
    for part in ("--dropout 0.3", "--ad-drop-p 0.2 --ad-drop-q 0.7", "--seed 1 "):
        assert part in command
    other = found.run_of(plain, plain.slots[1], plain.slots[1].values)
    assert other.folder.name == "plain-seed2" and "--attn-reg none" in " ".join(other.train_command())
    objective = objective_of(run, None)
    log = TrainingLog(
        validations={(1, 5): {"nll_loss": 2.0}, (1, 7): {"loss": 3.0}, (2, 9): {"loss": 2.5}, (3, 12): {}}
    )
    log.validations[4, 15], log.validations[4, 16] = {"loss": 9.0}, {"loss": float("nan")}
    assert objective.by_epoch(log) == {1: 2.0, 2: 2.5, 4: 9.0} and objective.best({1: 2.0, 2: float("nan")}) == 2.0
    assert not objective.maximize and objective.gain(2.0, 2.5) == 0.5
    assert objective.of_result({"training": {"best_valid_loss": 4.0}}) == 4.0
    bleu = objective_of(run, "bleu")
    assert bleu.maximize and bleu.by_epoch(TrainingLog(validations={(1, 5): {"bleu": 3.0, "loss": 1.0}})) == {1: 3.0}
    assert bleu.of_result({"training": {"best_valid_loss": 4.0}}) is None


def pretend(accuracy: Callable[[str], float], told: list[str]) -> Callable[..., None]:
    """In the place of a training: a log of two epochs."""

    def execute(command: list[str], path: Path, what: str, lock: int, watch: Any, stop: Any, **_: Any) -> None:
        told.append(what)
        if accuracy(what) < 0:
            raise RunError(f"the {what} ended with exit status 1")
        for epoch in (1, 2):
            figures = {"epoch": epoch, "valid_num_updates": 6 * epoch, "valid_accuracy": accuracy(what) - 1 + epoch}
            with path.open("a") as file:
                file.write(json.dumps(figures) + "\n")
                file.write(json.dumps({"epoch": epoch, "train_train_wall": "3"}) + "\n")

    return execute


@pytest.fixture
def rte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with made-up data and a tiny encoder, in which the test works."""
    make_encoder(tmp_path / "encoder")
    make_rte(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_sweep_from_end_to_end(
    rte: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    broken = "p 0.9, q 0.3"

    def accuracy(what: str) -> float:
        gain = {"p 0.1, q 0.3": 5.0, broken: -100.0}.get(what.partition("AD-DROP ")[2].partition(", seed")[0], 1.0)
        return 60.0 + (gain if "AD-DROP" in what else int(what.rpartition("seed ")[2]))

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (rte / "s.yaml").write_text(of_space("{p: [0.1, 0.9], q: [0.1, 0.3]}"))
    monkeypatch.setattr(labelled_runs, "execute", interrupt)
    assert main(["sweep", "s.yaml"]) == 130 and "the same command goes on" in capsys.readouterr().out
    monkeypatch.setattr(labelled_runs, "execute", pretend(accuracy, told))
    assert main(["sweep", "s.yaml", "--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert f"ad_drop {broken} failed: the training of AD-DROP" in printed and "plain" in printed
    content = json.loads((rte / "out" / "results.json").read_text())
    method, plain = content["arms"]
    assert (method["trials"], method["failed"], method["best"], method["best_values"]) == (
        4,
        1,
        66,
        {"p": 0.1, "q": 0.3},
    )
    assert (plain["trials"], plain["best"], plain["best_seed"], plain["all"]["mean"]) == (4, 65, 4, 63.5)
    assert content["gain"]["best"] == 1 and content["gain"]["mean"] == pytest.approx(190 / 3 - 63.5)
    assert [one["number"] for one in content["trials"]] == [0, 1, 2, 3] * 2
    assert [one["attempts"] for one in content["trials"]] == [2, *[1] * 7], "the first one was interrupted"
    for name in ("distribution.png", "heat_map-p-q.png"):
        assert (rte / "out" / name).read_bytes().startswith(b"\x89PNG")
    table = (rte / "out" / "results.md").read_text()
    assert "| AD-DROP | 4 | 66.000 | p 0.1, q 0.3, seed 1 | 63.333 ± 2.309 | 0 | 1 |" in table
    assert "| AD-DROP | 0.9 | 0.3 | 1 | – | – | failed |" in table
    run = rte / "out" / "trial-001-seed1"
    assert json.loads((run / "result.json").read_text())["training"]["scores"] == {"accuracy": 66.0}
    assert "--ad-drop-q 0.3" in json.loads((run / "run.json").read_text())["flags"] and len(told) == 8

    monkeypatch.setattr(labelled_runs, "execute", pretend(lambda what: 60.0, told))
    assert main(["sweep", "s.yaml"]) == 0, "the one that failed is tried again, and nothing else"
    assert len(told) == 9 and broken in told[8] and "failed:" not in capsys.readouterr().out
    (rte / "s.yaml").write_text(of_space("{p: [0.1, 0.9], q: [0.1, 0.3]}").replace("epochs: 2", "epochs: 3"))
    assert main(["sweep", "s.yaml"]) == 2
    assert "other settings (finetune.epochs: 2 there, 3 asked for); give another --out, " in capsys.readouterr().err


def test_what_only_a_try_shows_is_refused_before_anything_is_written(
    rte: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (rte / "s.yaml").write_text(of_space('{p: [0.1], sites: ["encoder.self", "encoder.self[7]"]}'))
    assert main(["sweep", "s.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attn-reg sweep: s.yaml: space: sites: encoder.self[7]: --attn-sites 'encoder.self[7]'")
    (rte / "s.yaml").write_text(of_space("{p: [0.1]}").replace("data: data", "data: gone"))
    assert main(["sweep", "s.yaml"]) == 2 and "gone" in capsys.readouterr().err
    assert not (rte / "out").exists()


def test_a_sweep_is_found_where_its_folder_was_renamed(tmp_path: Path) -> None:
    """In the SQLite file of its folder, which holds one."""

    def names(out: str, *words: str) -> list[str]:
        found = sweep(tmp_path, of_space("{p: [0.1]}"), "--out", str(tmp_path / out), *words)
        return [one.name for one in found.studies(True)]

    assert names("old") == ["old", "old, plain"]
    (tmp_path / "old").rename(tmp_path / "new")
    assert names("new") == names("new", "--name", "old") == ["old", "old, plain"]
    with pytest.raises(ValueError, match=r"^--name is mine, but .*new holds the trials of old; give another --out$"):
        names("new", "--name", "mine")
    shared = ["--storage", f"sqlite:///{tmp_path / 'shared.db'}"]
    assert names("new", *shared) == ["new", "new, plain"] and names("new", *shared, "--name", "m")[0] == "m"
    sweep_trials(tmp_path / "new", replace(METHOD, name="second"))
    with pytest.raises(ValueError, match=r"sweep\.db holds old and second; say which by --name$"):
        names("new")
    assert names("new", "--name", "second")[0] == "second"
    (tmp_path / "new").rename(tmp_path / "old")
    assert names("old")[0] == "old"


# -- what it reports --------------------------------------------------------------------------------------------------


def entry(slot: Slot, value: float, **values: Any) -> Entry:
    return Entry(slot, COMPLETE, {**(slot.values or {}), **values}, value, {}, {1: value}, 1)


def test_the_interval_of_a_difference() -> None:
    low, high = interval([3.0, 4.0, 5.0, 4.0], [1.0, 2.0, 1.0, 2.0])
    assert 1.0 < low < 2.5 < high < 4.0 and interval([1.0, 2.0], [1.0, 2.0, 3.0]) is None
    assert interval([1.0] * 3, [1.0] * 4) == (0.0, 0.0)


@pytest.mark.parametrize(("trials", "others", "spread"), [(3, 3, 1.0), (3, 8, 1.0), (3, 3, 3.0)])
def test_the_interval_covers_what_it_promises(
    trials: int, others: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of normal values around 0, those of the method with this standard deviation; without the widening 80 % would."""
    monkeypatch.setattr(sweep_report, "RESAMPLES", 300)
    random, covered = np.random.default_rng(1), []
    for seed in range(200):
        drawn = random.normal(0, spread, trials).tolist(), random.normal(size=others).tolist()
        low, high = interval(*drawn, seed)
        covered.append(low <= 0 <= high)
    assert 0.91 < np.mean(covered) < 0.99


def test_cells_are_means_less_plains_and_scaled_by_the_largest() -> None:
    """Twelve combinations of p and lr; plain training has 5.5 on average."""
    report = Report(
        [(arm, [entry(slot, float(slot.number)) for slot in arm.slots]) for arm in (METHOD, PLAIN)], ACCURACY
    )
    x, y = report.axes()
    assert (x.key, y.key) == ("p", "lr")
    cells = report.cells(x, Dimension("p", values=x.values), 5.5)
    assert cells == {(0.1, 0.1): (-4.0, False), (0.2, 0.2): (0.0, False), (0.3, 0.3): (4.0, False)}
    gains = {place: gain for place, (gain, _) in report.cells(x, y, 5.5).items()}
    scaled, largest = sweep_plots.max_abs_scaled(gains)
    assert largest == 5.5 and scaled[0.1, 1.0] == -1.0 and scaled[0.3, 8.0] == 1.0
    assert sweep_plots.max_abs_scaled({1: 0.0}) == ({1: 0.0}, 0.0)
    assert report.difference["best"] == report.difference["mean"] == 0.0


def test_the_distribution_is_split_by_cross_tuning() -> None:
    entries = [entry(slot, 1.0, cross_tuning=("epoch", "off")[slot.number % 2]) for slot in METHOD.slots]
    dimensions = (*METHOD.dimensions, Dimension("cross_tuning", values=("epoch", "off")))
    arm = type(METHOD)(METHOD.name, METHOD.title, dimensions, METHOD.slots)
    groups = Report([(arm, entries), (PLAIN, [entry(slot, 2.0) for slot in PLAIN.slots])], ACCURACY).groups()
    assert {title: len(values) for title, values in groups.items()} == {
        "plain": 12, "AD-DROP\ncross-tuning epoch": 6, "AD-DROP\ncross-tuning off": 6,
    }  # fmt: skip


def test_pictures_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = Report([(arm, [entry(slot, 1.0) for slot in arm.slots]) for arm in (METHOD, PLAIN)], ACCURACY)
    with pytest.raises(ValueError, match="the picture needs matplotlib"):
        report.draw(tmp_path)
