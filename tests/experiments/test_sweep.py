"""`attn-reg sweep`: what its file may say, the runs of its trials, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("optuna")

from attn_reg_plugin import configuration
from attn_reg_plugin.cli import build_parser, main
from attn_reg_plugin.experiments.steps import plan
from attn_reg_plugin.experiments.sweep.settings import Sweep

pytestmark = pytest.mark.usefixtures("one_thread")
BASE = "{task: rte, data: data, model: encoder, epochs: 2, max_length: 32, cpu: true}"
HUGE = "{" + ", ".join(f"{key}: [{', '.join(str(i / 300) for i in range(300))}]" for key in ("p", "q", "lr")) + "}"


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
    assert len(found.arms[0].trials) == len(found.arms[1].trials) >= 9
    assert {"p", "q"} <= set(found.distributions), "a heat map"


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
    assert not sweep(tmp_path, of_space("{p: {uniform: [0.1, 0.9]}}", "trials: 3")).arms[1].space


def test_plain_training_alone(tmp_path: Path) -> None:
    (plain,) = sweep(tmp_path, of_space("{lr: [1e-5, 3e-5]}", "method: plain")).arms
    assert plain.trials == [(1, {"lr": 1e-5}), (2, {"lr": 3e-5})]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (of_space("{p: [0.1, 1.5]}"), "space: p is 1.5, but must lie in [0, 1]"),
        (of_space("{lr: [0.1, -1]}"), "space: lr is -1.0, but must be above 0"),
        (of_space("{lr: {log: [0.1, inf]}}", "trials: 2"), "space: lr is inf, but must"),
        (of_space("{batch_size: [8, many]}"), "space: batch_size is 'many', but must be a whole number"),
        (of_space("{batch_size: {uniform: [1.5, 2]}}", "trials: 2"), "space: batch_size is 1.5, but must be a whole"),
        (of_space("{attribution: [gradient, magic]}"), "space: attribution is 'magic', but must be one of"),
        (of_space("{magic: [1]}"), "space: unknown key 'magic'; the keys are: sites, p, q, cross_tuning"),
        (of_space("{task: [rte, cola]}"), "space: unknown key 'task'; the keys are: "),
        (of_space("{p: 0.3}"), "space: p is 0.3, but must be a list of values, {log: [low, high]}"),
        (of_space("{p: []}"), "space: p is [], but must be a list of values"),
        (of_space("{p: [0.1, 0.10]}"), "space: p is [0.1, 0.1], but must not have a value twice"),
        (of_space("{p: {normal: [0, 1]}}"), "space: p is {'normal': [0, 1]}, but must be a list of values"),
        (of_space("{p: {uniform: [0.9, 0.1]}}", "trials: 2"), "space: p: uniform is [0.9, 0.1], but must be two num"),
        (of_space("{p: {uniform: [0.1]}}", "trials: 2"), "space: p: uniform is [0.1], but must be two numbers"),
        (of_space("{p: {uniform: 0.1}}", "trials: 2"), "space: p is {'uniform': 0.1}, but must be a list of values, or"),
        (of_space("{p: {uniform: [0, 1], log: [0, 1]}}", "trials: 2"), "but must be a list of values, or {log: [low"),
        (of_space("{sites: {uniform: [a, b]}}", "trials: 2"), "space: sites: uniform is ['a', 'b'], but must be two n"),
        (of_space("{weight_decay: {log: [0, 1]}}", "trials: 2"), "space: weight_decay: log is [0, 1], but must be two"),
        (of_space("{batch_size: {int: [1.5, 3]}}", "trials: 2"), "space: batch_size is 1.5, but must be a whole"),
        (of_space(HUGE), "space has 27,000,000 trials in its grid, but at most 10,000 are possible; take fewer values,"),
        (of_space("{p: [0.1]}", "trials: 100000"), "trials is 100000, but must lie in [0, 10000]"),
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
    assert found.comparison().jobs == 2
    assert sweep(tmp_path, text).out == Path("o/rte")
    with pytest.raises(SystemExit):
        main(["sweep", str(tmp_path / "s.yaml"), "--space", "{}"])


