"""transformers models, attached but idle: the model is the stock one, bit for bit."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_reg_plugin import ADDrop
from attn_reg_plugin.backends.huggingface import HuggingFaceBackend
from tests.backends.huggingface_models import FAMILIES, FORMS, batch, build, ids

GENERATING = [name for name, family in FAMILIES.items() if family.stacks != "encoder"]


def step(model: nn.Module, inputs: dict[str, Tensor], seed: int = 5) -> list[Tensor]:
    """Outputs, gradients and the state of the random numbers after a training step."""
    model.zero_grad()
    torch.manual_seed(seed)
    outputs = model(**inputs)
    outputs.loss.backward()
    gradients = [p.grad.clone() if p.grad is not None else torch.zeros(()) for p in model.parameters()]
    return [outputs.loss.detach(), outputs.logits.detach(), *gradients, torch.get_rng_state()]


def assert_identical(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("full", [False, True], ids=["padded", "full"])
@pytest.mark.parametrize("name, attention", FORMS)
def test_an_idle_model_is_the_stock_model(name: str, full: bool, attention: str) -> None:
    """In evaluation and, with dropout on, in training: outputs, gradients and random draws (p = 0 and plain epochs)."""
    model = build(name, dropout=0.2, attention=attention)
    left = FAMILIES[name].stacks == "decoder"
    inputs = batch(name, full=full, left=left)
    trained = step(model, inputs)
    model.eval()
    evaluated = model(**inputs).logits
    for options in ({"p": 0.0, "cross_tuning": "off"}, {"p": 0.5, "q": 0.5}):
        regularizer = ADDrop(sites="*", **options)
        with regularizer.attach(model):
            regularizer.begin_epoch(1)
            named = FAMILIES[name].interface and name != "t5"
            assert model.config._attn_implementation.startswith("attn_reg") or not named
            assert torch.equal(model(**inputs).logits, evaluated)
            assert_identical(step(model.train(), inputs), trained)
            model.eval()
            assert_identical([model(**inputs).logits], [evaluated])
    regularizer = ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off")
    with regularizer.attach(model.train()):
        regularized = step(model, inputs)
        assert not torch.equal(regularized[0], trained[0])
        assert torch.equal(model.eval()(**inputs).logits, evaluated)
        with torch.no_grad():
            torch.manual_seed(5)
            assert torch.equal(model.train()(**inputs).logits, trained[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", GENERATING)
def test_generation_is_the_stock_models(name: str, attention: str) -> None:
    """Beam search and sampling with a cache, and greedy search without."""
    model = build(name, attention=attention).eval()
    tokens, mask = ids([6, 3], 6, 7, left=FAMILIES[name].stacks == "decoder")
    searches: list[dict[str, Any]] = [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 0},
        {"use_cache": False},
    ]

    def generate() -> list[Tensor]:
        found = []
        for search in searches:
            torch.manual_seed(3)
            found.append(
                model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=7, min_new_tokens=4, **search)
            )
        return found

    expected = generate()
    with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(model):
        step(model.train(), batch(name))
        model.eval()
        assert_identical(generate(), expected)
    model.eval()
    assert_identical(generate(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.checkpointing])
def test_activation_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    """The recomputed layers find their masks; the probe never runs PyTorch's reentrant form."""
    if name == "deberta_v3" and reentrant:
        pytest.skip("transformers' own layers fail: they share the normalized embeddings of positions")
    inputs, results = batch(name), []
    for checkpointing in (False, True):
        model = build(name, dropout=0.1, use_cache=False) if "distil" not in name else build(name, dropout=0.1)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            functions = [vars(m).get("_gradient_checkpointing_func") for m in model.modules()]
        with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(model) as regularizer:
            results.append(step(model, inputs))
            assert all(site.keep is not None and not site.keep.all() for site in regularizer.attached_sites)
    assert functions == [vars(m).get("_gradient_checkpointing_func") for m in model.modules()]
    assert torch.equal(results[0][0], results[1][0])
    for plain, recomputed in zip(results[0][2:-1], results[1][2:-1], strict=True):
        torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-4)


def test_checkpointing_that_names_no_form_is_pytorchs_reentrant_one() -> None:
    """Also PyTorch's function as it is. A function of somebody else's stays."""
    model = build("bert")
    model.activation_checkpointing_enable({"preserve_rng_state": True})
    first, second = model.bert.encoder.layer
    second._gradient_checkpointing_func = checkpoint
    with HuggingFaceBackend().probing(model):
        chosen = [layer._gradient_checkpointing_func.keywords for layer in (first, second)]
        assert chosen == [{"preserve_rng_state": True, "use_reentrant": False}, {"use_reentrant": False}]
    assert second._gradient_checkpointing_func is checkpoint
    second._gradient_checkpointing_func = own = partial(step)
    with HuggingFaceBackend().probing(model):
        assert second._gradient_checkpointing_func is own
    second._gradient_checkpointing_func = checkpoint
    with ADDrop(p=0.5, q=0.5, cross_tuning="off").attach(model) as regularizer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, batch("bert"))
        assert not any(site.keep.all() for site in regularizer.attached_sites)
