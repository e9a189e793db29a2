"""torch.compile: regularized as without it; an idle regularizer adds neither graphs nor breaks.

`aot_eager` compiles forward and backward together, as inductor does: what a probe reads inside such a graph would have
no gradient.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from attn_reg_plugin import ADDrop
from attn_reg_plugin.attention.graphs import REASON
from attn_reg_plugin.regularizers import Regularizer
from tests.backends.huggingface_models import batch, build


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Start the compiler and its counters anew for each test."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module, way: str, backend: Any, **options: Any) -> nn.Module:
    """The module to call; `way` is `blocks`, the layers of BERT or Llama, `model`, or empty."""
    if way == "blocks":
        for block in model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers:
            block.compile(backend=backend, **options)
    return torch.compile(model, backend=backend, **options) if way == "model" else model


class Training:
    """A tiny model, compiled or not, and the steps of a training.

    Attributes:
        graphs: the number of compiled graphs after each step.
    """

    def __init__(self, name: str, way: str, backend: str = "aot_eager", layers: int = 1) -> None:
        self.model, self.inputs = build(name, 0.1, num_hidden_layers=layers), batch(name)
        self.counter = CompileCounterWithBackend(backend)
        self.called = compiled(self.model, way, self.counter)
        self.graphs: list[int] = []

    def step(self, epoch: int) -> list[Tensor]:
        """Loss and gradients; zeros where there is none."""
        torch.manual_seed(5 + epoch)
        self.model.zero_grad()
        loss = self.called(**self.inputs).loss
        loss.backward()
        self.graphs.append(self.counter.frame_count)
        return [loss.detach(), *(p.new_zeros(p.shape) if p.grad is None else p.grad for p in self.model.parameters())]

    def run(self, regularizer: Regularizer | None, epochs: int = 4) -> list[list[Tensor]]:
        """A step an epoch; a model that is compiled as a whole is attached as such."""
        if regularizer is None:
            return [self.step(epoch) for epoch in range(1, epochs + 1)]
        results = []
        with regularizer.attach(self.called):
            for epoch in range(1, epochs + 1):
                regularizer.begin_epoch(epoch)
                results.append(self.step(epoch))
                regularizer.end_update()
        return results


@pytest.mark.parametrize(
    ("name", "way", "layers", "options"),
    [("llama", "blocks", 2, {}), ("bert", "blocks", 1, {}), ("bert", "model", 1, {"cross_tuning": "off"})],
)
def test_a_compiled_model_trains_as_without_compiling(
    name: str, way: str, layers: int, options: dict[str, Any]
) -> None:
    """Plain and regularized epochs in turn, or the latter only; from the third on nothing is compiled anew."""
    plain, ours = (ADDrop(p=0.5, q=0.5, sites="*", **options) for _ in range(2))
    training = Training(name, way, layers=layers)
    found, expected = training.run(ours), Training(name, "", layers=layers).run(plain)
    if "cross_tuning" not in options:
        assert not torch.allclose(expected[0][0], expected[1][0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    counts = [regularizer.statistics.take() for regularizer in (ours, plain)]
    drops = [{key: float(value) for key, value in count.items() if "dropped/" in key} for count in counts]
    assert drops[0] == drops[1] and all(drops[0].values())
    assert training.graphs[-1] == training.graphs[2] > 0


@pytest.mark.parametrize("way", ["blocks", "model"])
def test_an_idle_regularizer_adds_no_graph(way: str) -> None:
    """As many graphs as without it, no breaks, nothing compiled anew, and the same numbers."""
    graphs, results = [], []
    for regularizer in (None, ADDrop(p=0.0, sites="*")):
        torch.compiler.reset()
        training = Training("bert", way, "eager", 2 if way == "blocks" else 1)
        results.append(training.run(regularizer, 3))
        graphs.append(training.graphs)
        assert not counters["graph_break"], dict(counters["graph_break"])
    assert graphs[0] == graphs[1]
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def test_one_graph_without_breaks_is_for_idle_models_only() -> None:
    """`fullgraph=True` says why not otherwise, and what to do."""
    model, inputs = build("bert"), batch("bert")
    compiled(model, "blocks", "eager", fullgraph=True)
    with ADDrop(p=0.0, sites="*", cross_tuning="off").attach(model):
        model(**inputs)
    with ADDrop(p=0.5, sites="*", cross_tuning="off").attach(model), pytest.raises(Exception, match=REASON[:60]):
        model(**inputs)
