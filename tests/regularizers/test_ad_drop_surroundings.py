"""AD-DROP among what training code does: checkpointing, accumulation, frozen parameters, copies, other regularizers."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from attn_reg_plugin import ADDrop, find_sites
from attn_reg_plugin.regularizers.base.statistics import Statistics
from tests.attention.tiny_model import attentions, loss_of, tokens

ATTRIBUTIONS = ["gradient", "integrated", "attention", "random"]


def step(model, batch, seed=1):
    """Loss and gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = loss_of(model(*batch), batch[1])
    loss.backward()
    return loss, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_close(first, second):
    torch.testing.assert_close(first[0], second[0])
    for a, b in zip(first[1], second[1], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
@pytest.mark.parametrize("sites", ["*", "encoder.self[1] decoder.cross[0]"])
def test_activation_checkpointing_changes_nothing(dropping_translator, batch, attribution, sites):
    model = dropping_translator
    regularizer = ADDrop(p=0.5, q=0.5, sites=sites, cross_tuning="off", attribution=attribution, integrated_steps=2)
    with regularizer.attach(model):
        plain = step(model, batch)
        model.encoder.checkpointed = model.decoder.checkpointed = True
        recomputed = step(model, batch)
    assert_close(recomputed, plain)


def test_activation_checkpointing_recomputes_with_the_mask(translator, batch):
    translator.encoder.checkpointed = translator.decoder.checkpointed = True
    regularizer = ADDrop(p=1.0, q=1.0, sites="*", cross_tuning="off")
    with regularizer.attach(translator):
        masked = step(translator, batch)
    assert not step(translator, batch)[0].allclose(masked[0])


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
def test_gradient_accumulation(translator, batch, attribution):
    """Two small batches one after the other add up to the sum of two steps, each with the masks of its own forward."""
    other = tokens([4, 6], 6, seed=5), tokens([2, 5], 5, seed=6)
    options = {"attribution": attribution, "integrated_steps": 2}
    with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off", **options).attach(translator) as regularizer:
        torch.manual_seed(3)
        for part in (batch, other):
            loss_of(translator(*part), part[1]).backward()
        accumulated = [p.grad.clone() for p in translator.parameters()]
        assert regularizer.statistics.take()["regularized"] == 2
        torch.manual_seed(3)
        separate = []
        for part in (batch, other):
            translator.zero_grad()
            loss_of(translator(*part), part[1]).backward()
            separate.append([p.grad.clone() for p in translator.parameters()])
    for total, first, second in zip(accumulated, *separate, strict=True):
        torch.testing.assert_close(total, first + second)


def test_accumulated_gradients_survive_the_probe(translator, batch):
    loss_of(translator(*batch), batch[1]).backward()
    before = [p.grad.clone() for p in translator.parameters()]
    for attribution in ATTRIBUTIONS:
        with ADDrop(sites="*", cross_tuning="off", attribution=attribution, integrated_steps=1).attach(translator):
            translator(*batch)
    assert all(p.grad.equal(gradient) for p, gradient in zip(translator.parameters(), before, strict=True))


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
def test_frozen_parameters_stay_frozen(translator, batch, attribution):
    translator.encoder.requires_grad_(False)
    flags = [p.requires_grad for p in translator.parameters()]
    assert True in flags
    assert False in flags
    options = {"attribution": attribution, "integrated_steps": 1}
    with ADDrop(p=0.5, q=1.0, sites="*", cross_tuning="off", **options).attach(translator) as regularizer:
        loss, gradients = step(translator, batch)
        assert [p.requires_grad for p in translator.parameters()] == flags
        assert [gradient is not None for gradient in gradients] == flags
        assert regularizer.statistics.take()["dropped/encoder.self[0]"] > 0
    assert loss.isfinite()


def test_a_wholly_frozen_model_is_still_probed(translator, batch):
    translator.requires_grad_(False)
    with ADDrop(p=0.5, q=1.0, sites="*", cross_tuning="off").attach(translator) as regularizer:
        translator(*batch)
        assert regularizer.statistics.take()["dropped/encoder.self[0]"] > 0
    assert not any(p.requires_grad for p in translator.parameters())


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_made_before_attaching_and_after_detaching_are_plain(translator, batch, twin_of):
    before = twin_of(translator)
    with ADDrop(p=0.5, q=1.0, sites="*", cross_tuning="off").attach(translator):
        masked = step(translator, batch)
    after = twin_of(translator)
    plain = step(translator, batch)
    assert not plain[0].allclose(masked[0])
    for twin in (before, after):
        assert step(twin, batch)[0].equal(plain[0])
        with ADDrop(p=0.5, q=1.0, sites="*", cross_tuning="off").attach(twin):
            assert_close(step(twin, batch), masked)
            assert step(translator, batch)[0].equal(plain[0]), "the original is another model"


def test_a_copy_made_while_attached_is_regularized_by_a_copy_of_the_regularizer(translator, batch):
    regularizer = ADDrop(p=0.5, q=1.0, sites="*", cross_tuning="off")
    with regularizer.attach(translator):
        masked = step(translator, batch)
        twin = copy.deepcopy(translator)
        regularizer.statistics.take()
        assert_close(step(twin, batch), masked)
        assert regularizer.statistics.take() == {}, "the copy reports to a regularizer of its own"
        kept = {name: module.site.keep for name, module in attentions(twin).items()}
    assert all(module.site.keep.equal(kept[name]) for name, module in attentions(twin).items())
    assert not any(site.active for site in find_sites(translator, "*"))
    assert_close(step(twin, batch), masked)


def test_a_copy_leaves_out_what_a_device_has_not_finished():
    """Events of a GPU cannot be copied; a lock stands for one."""
    statistics = Statistics()
    statistics.add("forwards", 1.0)
    statistics._running.append(("step_seconds", threading.Lock(), threading.Lock()))
    for twin in (copy.deepcopy(statistics), pickle.loads(pickle.dumps(statistics))):
        twin.add("forwards", 2.0)
        assert twin.take() == {"forwards": 3.0}
    assert statistics._sums == {"forwards": 1.0} and len(statistics._running) == 1


def test_state_dicts_move_between_attached_and_plain_models(translator, batch):
    twin = copy.deepcopy(translator)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    with ADDrop(sites="*", cross_tuning="off").attach(translator):
        translator(*batch)
        twin.load_state_dict(translator.state_dict())
        translator.load_state_dict(twin.state_dict())
    assert twin.eval()(*batch).equal(translator.eval()(*batch))


def test_two_regularizers_of_different_sites(translator, batch):
    """The second probes the model as the first has masked it; both leave it as it was."""
    options = {"p": 0.5, "q": 1.0, "cross_tuning": "off"}
    plain = step(translator, batch)
    with ADDrop(sites="encoder.self", **options).attach(translator) as first:
        alone = step(translator, batch)
        expected = [site.keep.clone() for site in first.attached_sites]
    first, second = ADDrop(sites="encoder.self", **options), ADDrop(sites="decoder.cross", **options)
    with first.attach(translator), second.attach(translator):
        both = step(translator, batch)
        assert all(s.keep.equal(keep) for s, keep in zip(first.attached_sites, expected, strict=True))
        assert all(site.keep is not None for site in second.attached_sites)
    assert not both[0].allclose(alone[0])
    assert step(translator, batch)[0].equal(plain[0])


def test_training_overfits_with_and_without(translator, batch):
    """A few steps with the regularizer on still learn, and stepping the optimizer in between disturbs nothing."""
    optimizer = torch.optim.Adam(translator.parameters(), 1e-2)
    regularizer = ADDrop(p=0.3, q=0.3, sites="*", cross_tuning="update:1")
    torch.manual_seed(1)
    losses = []
    with regularizer.attach(translator):
        for _ in range(30):
            loss = loss_of(translator(*batch), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            regularizer.end_update()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    taken = regularizer.statistics.take()
    assert (taken["forwards"], taken["regularized"], taken["fallbacks"]) == (30, 15, 0)
