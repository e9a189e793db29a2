"""A method of ten lines, registered here: every command, table and page has it from the registry alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from attn_reg_plugin.bench.benchmark import benchmark
from attn_reg_plugin.bench.families import Settings
from attn_reg_plugin.bench.rows import select_rows
from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.fine_tuning import FineTuning
from attn_reg_plugin.experiments.methods import known_methods, select_methods
from attn_reg_plugin.experiments.translation import TranslationComparison
from attn_reg_plugin.regularizers.base import REGISTRY, Preset, Regularizer, register
from attn_reg_plugin.regularizers.base.options import option
from docs import hooks

NAME = "last_key_drop"


@pytest.fixture(params=[False, True], ids=["no preset", "preset"])
def method(request: pytest.FixtureRequest) -> Iterator[type[Regularizer]]:
    """The method, with a preset of its own or without."""

    @register(NAME)
    @dataclass(eq=False)
    class LastKeyDrop(Regularizer):
        """Drop the last key, sometimes."""

        rate: float = option(0.5, "probability of dropping the last key, in [0, 1]", within="[0, 1]")

        def before_forward(self, forward):
            for site in self.attached_sites:
                site.ask(
                    sampler=lambda call, shape, valid, device: torch.arange(shape[-1], device=device) < shape[-1] - 1
                )

    if request.param:
        LastKeyDrop.presets = (Preset(NAME, "last key drop", {"sites": "*", "rate": 0.25}),)
    yield LastKeyDrop
    del REGISTRY[NAME]


def test_the_comparisons_have_it(method: type[Regularizer], capsys: pytest.CaptureFixture[str]) -> None:
    for settings in (TranslationComparison, FineTuning):
        (found,) = select_methods(NAME, (), known_methods(settings.without))
        preset = {"attn-sites": "*", "last-key-drop-rate": 0.25} if method.presets else {}
        assert found.title == NAME and found.flags == {"attn-reg": NAME, **preset}
    (own,) = select_methods({"mine": {"like": NAME, "rate": 1}})
    assert (own.name, own.title, own.flags["last-key-drop-rate"]) == ("mine", "mine", 1)
    for command in ("compare", "finetune", "bench"):
        with pytest.raises(SystemExit):
            main([command, "--list-methods"])
        assert f"\n{NAME}" in capsys.readouterr().out


def test_fairseq_has_its_flags(method: type[Regularizer]) -> None:
    import argparse

    from fairseq.dataclass import FairseqDataclass
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from attn_reg_plugin.tasks.flags import regularizer_from, with_attn_reg

    parser = argparse.ArgumentParser()
    gen_parser_from_dataclass(parser, with_attn_reg(FairseqDataclass)())
    regularizer = regularizer_from(parser.parse_args(["--attn-reg", NAME, "--last-key-drop-rate", "0.75"]))
    assert isinstance(regularizer, method) and regularizer.rate == 0.75


def test_the_bench_measures_it(method: type[Regularizer], one_thread: None) -> None:
    rows = select_rows([NAME], "fairseq", "float32")
    settings = Settings(size="tiny", batch=2, length=4, shortest=0.5, vocabulary=20, threads=1, repeats=1, warmup=0)
    (plain, found), _ = benchmark(rows, settings)
    assert (plain["name"], found["name"]) == ("plain", NAME) and found["method"] == NAME and found["seconds"]


def test_the_pages_show_it(method: type[Regularizer]) -> None:
    assert f"| `{NAME}` | `LastKeyDrop` | Drop the last key, sometimes. |" in hooks.methods_table()
    assert "| `--last-key-drop-rate` | `0.5` | probability of dropping the last key" in hooks.flags_of_methods()


@pytest.mark.usefixtures("one_thread")
def test_the_tests_of_all_methods_take_it_from_the_registry(method: type[Regularizer], tmp_path: Path) -> None:
    """None of their lists asks for it."""
    from tests import test_readme
    from tests.regularizers import test_contract, trainings

    case = trainings.others()[NAME]
    assert case.options == ({"sites": "*", "rate": 0.25} if method.presets else {})
    test_contract.test_evaluation_and_forwards_without_gradients_are_plain_between_updates(case)
    test_contract.test_detaching_leaves_the_model_as_it_was(case)
    test_contract.test_it_goes_on_exactly_from_a_checkpoint(case, tmp_path)
    test_readme.test_its_methods_are_registered_ones()
    if method.presets:  # once is enough
        from tests.experiments import test_papers

        test_papers.test_all_rivals_are_compared_under_the_same_rules()
