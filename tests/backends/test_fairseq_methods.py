"""Methods that draw at random on fairseq's Transformer: against fairseq's own dropout, and without the layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("fairseq")

from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.layer_drop import Layer
from tests.backends.fairseq_models import batch, transformer

pytestmark = pytest.mark.usefixtures("one_thread")


def train(
    model: nn.Module, inputs: dict[str, torch.Tensor], seed: int = 2
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A number of the outputs, and the gradients."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model.train()(**inputs)[0].float().log_softmax(-1)[..., 5].mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_weights_dropout_is_fairseqs_own() -> None:
    """fairseq's kernel draws the same numbers, whether `--attention-dropout` asks for them or a site."""
    own, ours, inputs = transformer(attention_dropout=0.3), transformer(attention_dropout=0.1), batch()
    ours.load_state_dict(own.state_dict())
    expected = train(own, inputs)
    # 0.1 is there: 1 - 0.9 (1 - p) is 0.3
    with build("attention_dropout", p=1 - 0.7 / 0.9, sites="*").attach(ours):
        torch.testing.assert_close(train(ours, inputs), expected)
    assert not train(ours, inputs)[0].allclose(expected[0])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layer_drop_is_the_model_without_the_layers(checkpointing: bool) -> None:
    model, inputs = transformer(checkpoint_activations=checkpointing), batch()
    plain = copy.deepcopy(model)
    with torch.no_grad():
        evaluated = model.eval()(**inputs)[0]
    regularizer, seen = build("layer_drop", p=0.5, sites="*"), set()
    for seed in range(3):
        rest = copy.deepcopy(plain)
        with regularizer.attach(model):
            loss, gradients = train(model, inputs, seed)
            layers = [handle for handle in regularizer._attachment.handles if isinstance(handle, Layer)]
            gone = [layer.path for layer in layers if layer.calls[0].uniform]
            with torch.no_grad():
                assert model.eval()(**inputs)[0].equal(evaluated)
        for path in reversed(gone):
            del rest.get_submodule(path.rpartition(".")[0])[int(path.rpartition(".")[2])]
        seen.add(len(gone))
        expected, theirs = train(rest, inputs, seed)
        torch.testing.assert_close(loss, expected)
        assert len(gradients) == len(theirs)
        assert not any(name.startswith(tuple(f"{path}." for path in gone)) for name in gradients)
    assert len(layers) == 4 and len(seen) > 1


def test_a_model_that_was_trained_is_exported() -> None:
    """By TorchScript, as fairseq's Transformer supports it, once the regularizer is detached."""
    model, inputs = transformer(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with build("ad_drop", sites="*", cross_tuning="off").attach(model) as regularizer:
        for _ in range(2):
            model(**inputs)[0].log_softmax(-1)[..., 5].mean().backward()
            optimizer.step()
        assert regularizer.statistics.take()["regularized"] == 2
    scripted = torch.jit.script(model).eval()
    torch.testing.assert_close(scripted(**inputs)[0], model.eval()(**inputs)[0], atol=1e-5, rtol=0)
