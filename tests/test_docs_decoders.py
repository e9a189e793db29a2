"""The programs of docs/decoders.md run as they are, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

CAUSAL, ADAPTERS, COMPILED = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "decoders.md").read_text("utf-8"), re.DOTALL
)
pytestmark = pytest.mark.usefixtures("one_thread")


def run(*programs: str) -> dict:
    """The names that the programs leave; their regularizer dropped something at every site."""
    world: dict = {}
    for program in programs:
        exec(program, world)
    dropped = {key: float(value) for key, value in world["regularizer"].statistics.take().items() if "dropped/" in key}
    assert len(dropped) == 2 and all(dropped.values())
    return world


def test_a_causal_language_model() -> None:
    assert run(CAUSAL)["regularizer"].updates == 4


def test_layers_that_are_compiled() -> None:
    world = run(CAUSAL, COMPILED.replace("layer.compile()", 'layer.compile(backend="eager")'))
    torch.compiler.reset()
    assert world["epoch"] == world["regularizer"].epoch == 2


@pytest.mark.clients
def test_adapters() -> None:
    pytest.importorskip("peft")
    model = run(CAUSAL, ADAPTERS)["adapted"]
    assert all((p.grad is not None) is p.requires_grad for p in model.parameters())
