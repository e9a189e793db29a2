"""Tables that scripts write into pages: they are those of what was tried or counted, and leave nothing out."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of scripts/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


def test_the_page_of_architectures_is_that_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    architectures = script("architectures", monkeypatch)
    result, page = json.loads(architectures.RESULT.read_text(encoding="utf-8")), architectures.PAGE
    assert architectures.filled(page.read_text(encoding="utf-8"), architectures.table(result)) == page.read_text()
    tried = [(row["task"], row["arch"]) for row in result["rows"]]
    assert tried == [(row.task, row.arch) for row in architectures.ROWS]
    works = {row["task"] for row in result["rows"] if row["ad_drop"] == "works"}
    assert works >= {"translation", "translation_multi_simple_epoch", "speech_to_text", "online_backtranslation"}


def test_every_architecture_and_task_of_fairseq_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fairseq")
    from fairseq.models import MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    architectures = script("architectures", monkeypatch)
    result = json.loads(architectures.RESULT.read_text(encoding="utf-8"))
    models = {row["model"] for row in result["rows"]} | set(result["untried"]["models"])
    tasks = {row["task"] for row in result["rows"]} | set(result["untried"]["tasks"])
    for known, registry in ((models, MODEL_REGISTRY), (tasks, TASK_REGISTRY)):
        assert {name for name, owner in registry.items() if owner.__module__.startswith("fairseq.")} - known == set()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", ["plain", "AD-DROP"])
@pytest.mark.usefixtures("one_thread")
def test_the_formulas_of_the_costs_are_what_is_counted(
    name: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = script("cost_model", monkeypatch)
    shape = replace(costs.SMALL, length=24, recomputes=recomputes)
    assert costs.count_operations(shape, name) == costs.STEPS[name](shape)


@pytest.mark.usefixtures("one_thread")
def test_the_memory_of_the_costs_is_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = script("cost_model", monkeypatch)
    assert costs.count_ranking(costs.Shape(heads=4, length=256)) == pytest.approx(costs.RANKING, abs=0.1)
    page = costs.PAGE.read_text(encoding="utf-8")
    assert costs.filled(page, costs.tables(costs.Shape())) == page
