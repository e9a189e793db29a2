"""Mixout against literal evaluations: the weights that a forward sees, their gradients, and whose weights are left."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.mixout import mixed_parameters, mixout
from tests.attention.tiny_model import loss_of, training_step
from tests.regularizers.test_weight_methods import IDS, LABELS, classifier, update

pytestmark = pytest.mark.usefixtures("one_thread")


def test_mixout_of_each_element():
    weight, pretrained = torch.randn(50, 40, dtype=torch.double), torch.randn(50, 40, dtype=torch.double)
    for p in (0.1, 0.7, 0.95):
        mask = torch.rand(50, 40) < p
        expected = ((mask * pretrained + ~mask * weight) - p * pretrained) / (1 - p)
        assert torch.allclose(mixout(weight, pretrained, mask, p), expected)
    mean = sum(mixout(weight, pretrained, torch.rand(50, 40) < 0.5, 0.5) for _ in range(4000)) / 4000
    assert (mean - weight).abs().max() < 0.4 and (mean - weight).abs().mean() < 0.04, "its expectation is the weight"
    assert mixout(pretrained, pretrained, torch.rand(50, 40) < 0.5, 0.5).equal(pretrained)


class Moved:
    """A classifier that is some updates away from where it began."""

    def __init__(self, **options):
        self.model, self.regularizer = classifier(), build("mixout", **options)
        self.begun = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        optimizer = torch.optim.SGD(self.model.parameters(), 0.5)
        self.regularizer.attach(self.model)
        for _ in range(2):
            update(self.model, self.regularizer, optimizer)


@pytest.mark.parametrize("weights", ["linear", "all"])
def test_the_forward_and_the_gradient_are_those_of_the_mixed_weights(weights):
    moved = Moved(p=0.5, weights=weights)
    model, names = moved.model, dict(mixed_parameters(moved.model, weights))
    state = torch.get_rng_state()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    seen = {}
    handle = model.output.register_forward_hook(
        lambda *_: seen.update({name: model.get_submodule(name.rpartition(".")[0])._parameters[name.rpartition(".")[2]]
                                for name in before})
    )  # fmt: skip
    loss = F.cross_entropy(model(IDS), LABELS)
    loss.backward()
    handle.remove()
    assert all(weight.equal(before[name]) for name, weight in model.named_parameters()), "the weights are back"
    reference = classifier()
    reference.load_state_dict({name: tensor.detach() for name, tensor in seen.items()})
    torch.set_rng_state(state)
    expected = F.cross_entropy(reference(IDS), LABELS)
    expected.backward()
    assert loss.equal(expected)
    replaced = 0
    for name, weight in model.named_parameters():
        theirs, u, w = reference.get_parameter(name), moved.begun[name], before[name]
        if name not in names:
            assert seen[name] is weight and weight.grad.equal(theirs.grad)
            continue
        away = ~w.isclose(u, atol=1e-5)  # where it can be told which of both it is
        own = seen[name].detach().isclose(u, atol=1e-6) & away
        mixed = seen[name].detach().isclose((w - 0.5 * u) / 0.5, atol=1e-5)
        assert (own | mixed | ~away).all()
        torch.testing.assert_close(weight.grad[away], (theirs.grad * ~own / 0.5)[away], rtol=1e-4, atol=1e-6)
        replaced += int(own.sum())
    changed = sum(int((~before[name].isclose(moved.begun[name], atol=1e-5)).sum()) for name in names)
    assert 0.4 < replaced / changed < 0.6
    assert ("encoder.embedding.weight" in names) == (weights == "all") and "output.weight" in names


def test_of_the_weights_linear_takes_the_maps():
    model, tables = torch.nn.Module(), {"cls_token": (1, 1, 4), "position_embeddings": (1, 3, 4), "r_w_bias": (2, 4)}
    for name, shape in {**tables, "q": (4, 2, 2)}.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    model.patches, model.words, model.norm = torch.nn.Conv1d(4, 4, 2), torch.nn.Embedding(5, 4), torch.nn.LayerNorm(4)
    model.attention, model.head = torch.nn.MultiheadAttention(4, 1), torch.nn.Linear(4, 1)
    maps = ["q", "patches.weight", "attention.in_proj_weight", "attention.out_proj.weight", "head.weight"]
    assert [name for name, _ in mixed_parameters(model, "linear")] == maps
    assert len(dict(mixed_parameters(model, "all"))) == len(list(model.parameters()))


@dataclass(slots=True)
class Held:
    """A model's outputs in an object of its own."""

    logits: torch.Tensor


def in_a_namespace(logits):
    """The same in a list in a namespace that holds itself."""
    held = SimpleNamespace(logits=[logits])
    held.self = held
    return held


@pytest.mark.parametrize("held", [None, Held, in_a_namespace])
def test_activation_checkpointing_recomputes_with_the_mixed_weights(dropping_translator, batch, held):
    results = []
    for checkpointed in (False, True):
        model = copy.deepcopy(dropping_translator)
        model.encoder.checkpointed = model.decoder.checkpointed = checkpointed
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        torch.manual_seed(1)
        if held is not None:
            model.register_forward_hook(lambda module, args, logits: held(logits))
        with build("mixout", p=0.5).attach(model) as regularizer:
            for _ in range(3):
                optimizer.zero_grad()
                outputs = model(*batch)
                logits = getattr(outputs, "logits", outputs)
                loss_of(logits[0] if isinstance(logits, list) else logits, batch[1]).backward()
                assert all(isinstance(w, torch.nn.Parameter) for m in model.modules() for w in m._parameters.values())
                optimizer.step()
                regularizer.end_update()
        results.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(plain, again, rtol=1e-4, atol=1e-6)


def test_an_exception_in_the_forward_gives_the_weights_back(translator, batch):
    before = dict(translator.named_parameters())
    regularizer = build("mixout")
    with regularizer.attach(translator):
        with pytest.raises(TypeError):
            translator("no tokens")
        with pytest.raises((TypeError, AttributeError)):
            translator(batch[0], None)
        assert all(weight is before[name] for name, weight in translator.named_parameters())
        copied = copy.deepcopy(translator)
        assert copied.eval()(*batch).equal(translator.eval()(*batch))
    assert list(translator.state_dict()) == list(before)


def test_ctrl_c_in_a_forward_leaves_no_mixed_weights(batch, translator):
    regularizer = build("mixout")
    with regularizer.attach(translator):
        training_step(translator, batch)
        for parameter in translator.parameters():
            parameter.data.add_(0.1)  # so that mixed weights are others
        moved = copy.deepcopy(translator.state_dict())
        for look in (translator.state_dict, lambda: translator.eval()(*batch)):
            interrupt = translator.decoder.register_forward_pre_hook(interrupted)
            with pytest.raises(KeyboardInterrupt):
                translator.train()(*batch)
            interrupt.remove()
            assert not isinstance(mixed_weight(translator), torch.nn.Parameter)
            look()
            assert isinstance(mixed_weight(translator), torch.nn.Parameter)
        assert all(value.equal(moved[name]) for name, value in translator.state_dict().items())


def test_a_copy_gets_its_own_weights_back(batch, translator):
    with build("mixout").attach(translator):
        training_step(translator, batch)
        twin = copy.deepcopy(translator).train()
        interrupt = twin.decoder.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            twin(*batch)
        interrupt.remove()
        assert not isinstance(mixed_weight(twin), torch.nn.Parameter)
        twin.state_dict()
        assert isinstance(mixed_weight(twin), torch.nn.Parameter)


def interrupted(module, args):
    raise KeyboardInterrupt


def mixed_weight(model):
    return next(weight for name, weight in model.named_parameters() if "feed_forward.0.weight" in name)
