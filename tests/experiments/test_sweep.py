"""`attn-reg sweep`: what its file may say, the runs of its trials, and what it reports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pandas
import pytest
from optuna.distributions import IntDistribution
from scipy.stats import ttest_ind

from attn_reg_plugin import cli
from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.running import run as runs
from attn_reg_plugin.experiments.running.executor import RunError
from attn_reg_plugin.experiments.running.training_log import read_log
from attn_reg_plugin.experiments.steps import from_arguments, plan
from attn_reg_plugin.experiments.sweep.report import frame_of, gain
from attn_reg_plugin.experiments.sweep.search import open_study
from attn_reg_plugin.experiments.sweep.settings import TRIAL, Arm, Sweep
from tests.loading import example
from tests.models.hf_folders import make_encoder, make_rte

pytestmark = pytest.mark.usefixtures("one_thread")
BASE = "{task: rte, data: data, model: encoder, epochs: 2, max_length: 32, cpu: true}"
HUGE = "{" + ", ".join(f"{key}: [{', '.join(str(i / 300) for i in range(300))}]" for key in ("p", "q", "lr")) + "}"


def sweep(tmp_path: Path, text: str, *words: str) -> Sweep:
    path = tmp_path / "s.yaml"
    path.write_text(text, encoding="utf-8")
    return from_arguments(Sweep, cli._parsed("sweep", [str(path), *words]))


def of_space(space: str, more: str = "") -> str:
    return f"out: out\nfinetune: {BASE}\nspace: {space}\n{more}"


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "examples" / "sweep").glob("*.yaml")), ids=str)
def test_the_examples_are_accepted(path: Path) -> None:
    """Nothing is run."""
    *_, found = [step.settings for step in plan(path, [])]
    assert len(found.arms[0].trials) == len(found.arms[1].trials) >= 9
    assert {"p", "q"} <= set(found.choices)


# -- the space --------------------------------------------------------------------------------------------------------


def test_a_grid_and_as_many_plain_seeds(tmp_path: Path) -> None:
    text = of_space("{p: [0.1, 0.5], cross_tuning: [epoch, off], lr: [1e-5, 3e-5]}", "seeds: 1,7")
    method, plain = sweep(tmp_path, text).arms
    assert len(method.trials) == len(plain.trials) == 16 and len({seed for seed, _ in plain.trials}) == 16
    assert method.trials[0] == (1, {"p": 0.1, "cross_tuning": "epoch", "lr": 1e-5})
    assert method.trials[7] == (7, {"p": 0.1, "cross_tuning": "off", "lr": 3e-5}), "YAML's bare off is a text"
    assert [seed for seed, _ in plain.trials[:4]] == [1, 7, 8, 9]
    # the learning rate is searched for plain training too, p isn't
    assert [values for _, values in plain.trials] == [{"lr": values["lr"]} for _, values in method.trials]


def test_drawn_trials_take_the_seeds_in_turn(tmp_path: Path) -> None:
    text = of_space("{p: {uniform: [0.1, 0.9]}, lr: {log: [1e-5, 1e-4]}, batch_size: {int: [4, 9]}}", "seeds: 1,2")
    method, plain = sweep(tmp_path, text, "--trials", "5").arms
    assert method.trials == [(seed, {}) for seed in (1, 2, 1, 2, 1)]
    assert list(plain.space) == ["lr", "batch_size"] and plain.trials == [(seed, {}) for seed in (1, 2, 3, 4, 5)]
    (alone,) = sweep(tmp_path, of_space("{lr: [1e-5, 3e-5]}", "method: plain")).arms
    assert alone.trials == [(1, {"lr": 1e-5}), (2, {"lr": 3e-5})]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ("{p: [0.1, 1.5]}", "space: p is 1.5, but must lie in [0, 1]"),
        ("{lr: {log: [0.1, inf]}}\ntrials: 2", "space: lr is inf, but must"),
        ("{batch_size: {int: [1.5, 3]}}\ntrials: 2", "space: batch_size is 1.5, but must be a whole number"),
        ("{attribution: [gradient, magic]}", "space: attribution is 'magic', but must be one of"),
        ("{magic: [1]}", "space: unknown key 'magic'; the keys are: sites, unit, p, q, cross_tuning"),
        ("{task: [rte, cola]}", "space: unknown key 'task'; the keys are: "),
        ("{metric: [accuracy, f1]}", "space: unknown key 'metric'; the keys are: "),
        ("{p: 0.3}", "space: p is 0.3, but must be a list of values, or {log: [low, high]}"),
        ("{p: []}", "space: p is []: The `choices` must contain one or more elements"),
        ("{p: {uniform: [0.9, 0.1]}}\ntrials: 2", "space: p is {'uniform': [0.9, 0.1]}: "),
        ("{p: {uniform: [0.1, 0.3, 0.5]}}\ntrials: 2", "space: p is {'uniform': [0.1, 0.3, 0.5]}: "),
        ("{weight_decay: {log: [0, 1]}}\ntrials: 2", "space: weight_decay is {'log': [0, 1]}: "),
        ("{p: {uniform: [0, 1]}}", "trials is 0, but must say how many, since p has a range in space"),
        (HUGE, "space has 27,000,000 trials in its grid, but at most 5,000 are possible; take fewer values, or say"),
        (f"{HUGE}\ntrials: 100000", "trials is 100000, but must lie in [0, 5000]"),
        ("{}", "space is {}, but must be a mapping"),
        ("{p: [0.1]}\nmethod: magic", "method: unknown method 'magic'; the methods are: "),
        ("{p: [0.1]}\nmethod: {p: 0.3}", "method is {'p': 0.3}, but must be a name, or {like: NAME"),
        ("{p: [0.1]}\nseeds: 1,1", "finetune: --seeds wants distinct whole numbers with commas, given '1,1'"),
        ("{p: [0.1]}\nstorage: 'sqlite:///x'", "unknown setting 'storage'; the settings are: out, finetune"),
        ("{p: [0.1]}\ncompare: {data: d}", "give one of the sections finetune and compare, given 2"),
        ("{p: [0.1]}\nfinetune: 5", "finetune is 5, but must be a mapping of settings"),
        ("{p: [0.1]}\nfinetune: {task: rte}", "finetune: DATA is missing"),
        ("{p: [0.1]}\nfinetune: {task: rte, data: d, seeds: 1}", "finetune: seeds is decided by the sweep"),
        ("{heads: [8, 3]}\nfinetune:\ncompare: {data: d}", "space: --heads 3 does not divide --embed-dim 512"),
    ],
)
def test_refusals_name_the_file_and_the_key(
    space: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = "" if "\nfinetune:" in space else f"finetune: {BASE}\n"
    (tmp_path / "s.yaml").write_text(f"out: out\n{base}space: {space}\n", encoding="utf-8")
    assert main(["sweep", "s.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attn-reg sweep: s.yaml: ") and said in error
    assert error.count("\n") == error.count("s.yaml") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_it_is_a_step_and_its_keys_are_no_flags(tmp_path: Path) -> None:
    text = "task: rte\nsweep:\n  out: o/${task}\n  finetune: {task: '${task}', data: d}\n  space: {p: [0.1]}\n"
    (tmp_path / "s.yaml").write_text(f"{text}  method: {{like: attend_out}}\n")
    (step,) = plan(tmp_path / "s.yaml", ["--task", "cola", "--jobs", "2", "--method", "ad_drop"])
    found = step.settings
    assert (found.finetune["task"], found.out, found.comparison().jobs) == ("cola", Path("o/cola"), 2)
    assert found.method == "ad_drop"
    with pytest.raises(SystemExit):
        main(["sweep", str(tmp_path / "s.yaml"), "--space", "{}"])


# -- the runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def rte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with made-up data and a tiny encoder, in which the test works."""
    make_encoder(tmp_path / "encoder")
    make_rte(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretend(accuracy: Callable[[str], float], told: list[str]) -> Callable[..., None]:
    """A stand-in for a training: a log of two epochs."""

    def execute(command: list[str], path: Path, what: str, lock: int, watch: Any, *_: Any) -> None:
        told.append(what)
        if accuracy(what) < 0:
            raise RunError(f"the {what} ended with exit status 1")
        for epoch in (1, 2):
            figures = {"epoch": epoch, "valid_num_updates": 6 * epoch, "valid_accuracy": accuracy(what) - 1 + epoch}
            with path.open("a") as file:
                file.write(json.dumps(figures) + "\n")
                file.write(json.dumps({"epoch": epoch, "train_train_wall": "3"}) + "\n")
            watch(read_log(path))

    return execute


def test_a_sweep_from_end_to_end(
    rte: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    broken = "ad_drop p 0.9, q 0.3"

    def accuracy(what: str) -> float:
        gain = {"ad_drop p 0.1, q 0.3": 5.0, broken: -100.0}
        name, seed = what.removeprefix("training of ").split(", seed ")
        return 60.0 + (gain.get(name, 1.0) if "ad_drop" in name else int(seed))

    (rte / "s.yaml").write_text(of_space("{p: [0.1, 0.9], q: [0.1, 0.3]}"))
    monkeypatch.setattr(runs, "execute", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(["sweep", "s.yaml"]) == 130 and "the same command goes on" in capsys.readouterr().out
    monkeypatch.setattr(runs, "execute", pretend(accuracy, told))
    assert main(["sweep", "s.yaml", "--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert f"failed: the training of {broken}" in printed and "plain" in printed
    content = json.loads((rte / "out" / "results.json").read_text())
    assert content["gain"]["best"] == 1 and content["gain"]["mean"] == pytest.approx(190 / 3 - 63.5)
    assert sorted((one["arm"], one["trial"]) for one in content["trials"]) == [
        (arm, number) for arm in ("ad_drop", "plain") for number in range(4)
    ]
    assert [one["value"] for one in content["trials"]] == [66, 62, 62, None, 65, 64, 63, 62]
    example("sweep/pictures.py").main([str(rte / "out")])
    for name in ("distribution.png", "values.png", "gain.png"):
        assert (rte / "out" / name).read_bytes().startswith(b"\x89PNG")
    table = (rte / "out" / "results.md").read_text()
    assert "66.000" in table and "p 0.1, q 0.3, seed 1" in table and "63.333 ± 2.309" in table
    run = rte / "out" / "trial-001-seed1"
    assert json.loads((run / "result.json").read_text())["training"]["figures"]["accuracy"] == 66.0
    assert json.loads((run / "run.json").read_text())["flags"]["ad-drop-q"] == 0.3 and len(told) == 8

    monkeypatch.setattr(runs, "execute", pretend(lambda what: 60.0, told))
    assert main(["sweep", "s.yaml"]) == 0, "the one that failed is tried again, and nothing else"
    assert len(told) == 9 and broken in told[8] and "failed:" not in capsys.readouterr().out
    (rte / "out").rename(rte / "moved")
    assert main(["sweep", "s.yaml", "--out", "moved"]) == 0 and len(told) == 9, "a sweep may be moved"
    (rte / "s.yaml").write_text(of_space("{p: [0.1, 0.9], q: [0.1, 0.3]}").replace("epochs: 2", "epochs: 3"))
    assert main(["sweep", "s.yaml", "--out", "moved"]) == 2
    error = capsys.readouterr().err
    assert "other settings (" in error and "--max-epoch: 2 there, 3 asked for); give another --out" in error


def test_a_trial_goes_on_where_it_was_with_all_its_epochs(rte: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial keeps the values that were drawn, and the epochs before the interruption count."""
    (rte / "s.yaml").write_text(of_space("{p: {uniform: [0.1, 0.9]}}", "trials: 1"))

    def begin(command: list[str], path: Path, *_: Any) -> None:
        path.write_text(json.dumps({"epoch": 1, "valid_num_updates": 6, "valid_accuracy": 90.0}) + "\n")
        raise KeyboardInterrupt

    def go_on(command: list[str], path: Path, what: str, lock: int, watch: Any, *_: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"epoch": 2, "valid_num_updates": 12, "valid_accuracy": 70.0}) + "\n")

    monkeypatch.setattr(runs, "execute", begin)
    assert main(["sweep", "s.yaml"]) == 130
    (before,) = (path.read_text() for path in rte.glob("out/trial-*/run.json"))
    monkeypatch.setattr(runs, "execute", go_on)
    assert main(["sweep", "s.yaml"]) == 0
    (after,) = (path.read_text() for path in rte.glob("out/trial-*/run.json"))
    trials = json.loads((rte / "out" / "results.json").read_text())["trials"]
    assert before == after and {one["arm"]: one["value"] for one in trials} == {"ad_drop": 90.0, "plain": 70.0}
    study = open_study(rte / "out", "ad_drop")
    assert study.trials[-1].intermediate_values == {1: 90.0}


def test_what_only_a_try_shows_leaves_nothing_behind(rte: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = sorted(rte.rglob("*"))
    for text, said in (
        (of_space("{p: [0.1], sites: ['*', 'encoder.self[7]']}"), "sites encoder.self[7]: --attn-sites 'enc"),
        (of_space("{p: [0.1]}").replace("data: data", "data: gone"), "gone"),
    ):
        (rte / "s.yaml").write_text(text)
        assert main(["sweep", "s.yaml"]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
        (rte / "s.yaml").unlink()
        assert sorted(rte.rglob("*")) == there


def test_epochs_that_were_drawn_are_one_column_of_the_table(tmp_path: Path) -> None:
    trial = {"arm": "ad_drop", "trial": 0, "seed": 1, "values": {"epochs": 7}, "value": 60.0, "epochs": 5}
    others = {"plain-seed1": {**trial, "arm": "plain"}, "trial-001-seed1": {**trial, "trial": 1}}  # of a longer sweep
    for folder, about in {"trial-000-seed1": trial, **others}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / TRIAL).write_text(json.dumps(about))
    frame = frame_of(tmp_path, Arm("ad_drop", {"epochs": IntDistribution(3, 9)}, [(1, {})]), True)
    assert list(frame.columns) == ["arm", "trial", "value", "epochs", "seed", "folder", "error", "state"]
    assert frame[["arm", "value", "epochs"]].values.tolist() == [["ad_drop", 60.0, 7]]


def test_the_interval_is_that_of_scipy_and_of_equal_values_it_has_no_width() -> None:
    values, others = [3.0, 4.0, 5.0, 4.5], [1.0, 2.0, 1.5]
    found = gain(pandas.Series(values), pandas.Series(others))
    assert found["interval"] == pytest.approx(list(ttest_ind(values, others, equal_var=False).confidence_interval()))
    assert gain(pandas.Series([1.0] * 3), pandas.Series([0.5] * 4))["interval"] == [0.5, 0.5]
    assert gain(pandas.Series([1.0, 2.0]), pandas.Series(others))["interval"] is None
