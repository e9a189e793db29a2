"""CONTRIBUTING's method and backend work; every command, table and page has the method from the registry alone."""

import argparse
import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from attn_reg_plugin import ADDrop
from attn_reg_plugin.attention import selection
from attn_reg_plugin.bench.benchmark import benchmark
from attn_reg_plugin.bench.families import Settings
from attn_reg_plugin.bench.rows import select_rows
from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.fine_tuning import FineTuning
from attn_reg_plugin.experiments.methods import known_methods, select_methods
from attn_reg_plugin.experiments.translation import TranslationComparison
from attn_reg_plugin.regularizers.base import REGISTRY, Regularizer
from tests.loading import ROOT, load

NAME = "key_drop"


def added(path: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diff = re.search(rf"\+\+\+ b/{re.escape(path)}\n@@ -0,0 \+1,(\d+) @@\n((?:\+.*\n)+)", text)
    lines = [line[1:] for line in diff[2].splitlines()]
    assert len(lines) == int(diff[1])
    return "\n".join(lines) + "\n"


TESTS = added("tests/regularizers/test_key_drop.py")


@pytest.fixture(params=[False, True], ids=["no preset", "preset"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Regularizer]:
    """The method, with a preset of its own or without."""
    module = types.ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setitem(REGISTRY, NAME, None)
    exec(added(f"attn_reg_plugin/regularizers/{NAME}.py"), vars(module))
    if not request.param:
        monkeypatch.setattr(module.KeyDrop, "presets", ())
    return module.KeyDrop


@pytest.mark.parametrize("name", re.findall(r"def (test_\w+)", TESTS))
def test_it_passes_its_tests(method: type[Regularizer], name: str, request: pytest.FixtureRequest) -> None:
    assert "assert " in TESTS.partition(f"def {name}(")[2].partition("\ndef ")[0], "it can fail"
    world: dict = {}
    exec(TESTS, world)
    world[name](*map(request.getfixturevalue, inspect.signature(world[name]).parameters))


def test_the_comparisons_have_it(method: type[Regularizer], capsys: pytest.CaptureFixture[str]) -> None:
    for settings in (TranslationComparison, FineTuning):
        (found,) = select_methods(NAME, (), known_methods(settings.without))
        preset = {"key-drop-p": 0.2} if method.presets else {}
        assert found.title == NAME and found.flags == {"attn-reg": NAME, **preset}
    (own,) = select_methods({"mine": {"like": NAME, "p": 1}})
    assert (own.name, own.title, own.flags["key-drop-p"]) == ("mine", "mine", 1)
    for command in ("compare", "finetune", "bench"):
        with pytest.raises(SystemExit):
            main([command, "--list-methods"])
        assert f"\n{NAME}" in capsys.readouterr().out


def test_fairseq_has_its_flags(method: type[Regularizer]) -> None:
    from fairseq.dataclass import FairseqDataclass
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from attn_reg_plugin.tasks.flags import regularizer_from, with_attn_reg

    parser = argparse.ArgumentParser()
    gen_parser_from_dataclass(parser, with_attn_reg(FairseqDataclass)())
    regularizer = regularizer_from(parser.parse_args(["--attn-reg", NAME, "--key-drop-p", "0.75"]))
    assert isinstance(regularizer, method) and regularizer.p == 0.75


def test_the_bench_measures_it(method: type[Regularizer], one_thread: None) -> None:
    rows = select_rows([NAME], "fairseq", "float32")
    settings = Settings(size="tiny", batch=2, length=4, shortest=0.5, vocabulary=20, threads=1, repeats=1, warmup=0)
    (plain, found), _ = benchmark(rows, settings)
    assert (plain["name"], found["name"]) == ("plain", NAME) and found["method"] == NAME and found["seconds"]


def test_the_pages_show_it(method: type[Regularizer]) -> None:
    assert f"| `{NAME}` | `KeyDrop` | Drop each key with probability p. |" in load("scripts/flags.py").methods_table()
    assert (
        "| `--key-drop-p` | `0.1` | [0, 1] | probability of dropping a key |"
        in load("scripts/flags.py").flags_of_methods()
    )


@pytest.mark.usefixtures("one_thread")
def test_the_tests_of_all_methods_take_it_from_the_registry(method: type[Regularizer], tmp_path: Path) -> None:
    """None of their lists asks for it."""
    from tests.regularizers import test_contract, trainings

    case = trainings.others()[NAME]
    assert case.options == ({"p": 0.2} if method.presets else {})
    test_contract.test_evaluation_and_forwards_without_gradients_are_plain_between_updates(case)
    test_contract.test_detaching_leaves_the_model_as_it_was(case)
    test_contract.test_it_goes_on_exactly_from_a_checkpoint(case, 3, tmp_path)
    if method.presets:  # once is enough
        from tests.experiments import test_papers

        test_papers.test_all_rivals_are_compared_under_the_same_rules()


class TheirAttention(nn.Module):
    """Attention in a class that cannot be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 2, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (h.unflatten(-1, (2, -1)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        weights = (query @ key.transpose(-1, -2) / 2).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Theirs(nn.Module):
    """Two of them, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.classify = nn.ModuleList([TheirAttention(), TheirAttention()]), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return self.classify(x.mean(1))


def test_a_class_that_cannot_be_changed_is_reached(monkeypatch):
    monkeypatch.setattr(selection, "_BACKENDS", list(selection._BACKENDS))
    monkeypatch.setitem(sys.modules, "their_package", sys.modules[__name__])
    names = {"TheirAttention": TheirAttention}
    exec(added("attn_reg_plugin/backends/their_package.py"), names)
    selection.register_backend("their_package", names["BACKEND"])  # as backends/__init__.py does
    torch.manual_seed(0)
    model, x, mask = Theirs(), torch.randn(2, 5, 8), torch.tensor([True, True, True, True, False])
    plain, before = model(x, mask), [list(vars(layer)) for layer in model.layers]
    regularizer = ADDrop(p=0.5, q=1.0, cross_tuning="off")
    with regularizer.attach(model):
        assert [site.name for site in regularizer.attached_sites] == ["encoder.self[0]", "encoder.self[1]"]
        assert not torch.allclose(model(x, mask), plain)
        assert all(site.keep.shape == (2, 2, 5, 5) and not site.keep.all() for site in regularizer.attached_sites)
        with pytest.raises(ValueError, match="regularized already"):
            ADDrop().attach(model)
        assert torch.equal(model.eval()(x, mask), plain)
    assert [list(vars(layer)) for layer in model.layers] == before
