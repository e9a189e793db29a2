"""Attaching and detaching: what a regularizer leaves of a model, and when it does nothing at all."""

from __future__ import annotations

import copy

import pytest
import torch

from attn_reg_plugin import ADDrop, find_sites
from attn_reg_plugin.regularizers import REGISTRY, Regularizer, build, options_of
from tests.attention.tiny_model import TinyClassifier, attentions, loss_of, tokens


def footprint(model):
    """Everything about a model that attaching could change, but for where its sites say they are."""
    return {
        path: (type(module), {k: describe(v) for k, v in vars(module).items() if k not in ("site", "attend")})
        for path, module in model.named_modules()
    }


def describe(value):
    if isinstance(value, dict):
        return {key: describe(held) for key, held in value.items()}
    if isinstance(value, torch.nn.Parameter):
        return value.tolist(), value.requires_grad, value.grad is None
    return id(value) if isinstance(value, torch.nn.Module) else value


def gradients(model, batch, seed=1):
    """Loss, gradients and the state of the random numbers after one training step."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = loss_of(model(*batch), batch[1])
    loss.backward()
    return loss, [p.grad.clone() for p in model.parameters()], torch.get_rng_state()


def assert_identical(first, second):
    assert first[0].equal(second[0])
    assert all(a.equal(b) for a, b in zip(first[1], second[1], strict=True))
    assert first[2].equal(second[2])


@pytest.mark.parametrize("attribution", ["gradient", "integrated", "attention", "random"])
def test_attached_model_is_the_same_model(dropping_translator, batch, attribution):
    model = dropping_translator
    before, keys = copy.deepcopy(model.state_dict()), list(model.state_dict())
    expected = model.eval()(*batch)
    regularizer = ADDrop(sites="*", cross_tuning="off", attribution=attribution, integrated_steps=2)
    with regularizer.attach(model):
        assert list(model.state_dict()) == keys
        for _ in range(2):
            model.train()(*batch)
            assert model.eval()(*batch).equal(expected)
        with torch.no_grad():
            assert model(*batch).equal(expected)
        assert all(value.equal(before[key]) for key, value in model.state_dict().items())
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model(*batch).equal(expected)


def test_detach_restores_everything(dropping_translator, batch):
    model = dropping_translator
    find_sites(model, "*")
    before, plain = footprint(model), gradients(model, batch)
    model.zero_grad()
    with ADDrop(sites="*", cross_tuning="off").attach(model) as regularizer:
        assert footprint(model) != before  # the comparison sees a hook
        gradients(model, batch)
    model.zero_grad()
    assert footprint(model) == before
    assert regularizer.attached_sites == []
    assert not any(site.active for site in find_sites(model, "*"))
    assert_identical(gradients(model, batch), plain)


class Broken(Exception):
    pass


def broken(outputs, inputs):
    raise Broken


@pytest.mark.parametrize("attribution", ["gradient", "integrated", "attention"])
def test_an_exception_in_the_probe_restores_everything(dropping_translator, batch, attribution):
    model = dropping_translator
    model.output.bias.requires_grad_(False)
    find_sites(model, "*")
    before = footprint(model)
    regularizer = ADDrop(sites="*", cross_tuning="off", attribution=attribution, objective=broken, probe_dropout=False)
    regularizer.attach(model)
    attached = footprint(model)
    for _ in range(2):
        with pytest.raises(Broken):
            model(*batch)
        assert not any(site.active for site in regularizer.attached_sites)
        assert [p.requires_grad for p in model.parameters()] == [True] * (len(list(model.parameters())) - 1) + [False]
        assert footprint(model) == attached
    regularizer.objective = lambda outputs, inputs: outputs.sum()
    model(*batch)
    regularizer.detach()
    assert footprint(model) == before


class Halfway(Regularizer):
    """A method that fails when half of its sites are masked."""

    def before_forward(self, forward):
        self.attached_sites[0].ask(uniform=lambda call: True)
        raise Broken


def test_an_exception_of_a_method_leaves_no_masks(translator, batch):
    regularizer = Halfway()
    with regularizer.attach(translator):
        with pytest.raises(Broken):
            translator(*batch)
        assert not any(site.active for site in regularizer.attached_sites)


def test_an_exception_in_the_loop_detaches(translator, batch):
    find_sites(translator, "*")
    before = footprint(translator)
    with pytest.raises(Broken), ADDrop(sites="*", cross_tuning="off").attach(translator):
        translator(*batch)
        raise Broken
    assert footprint(translator) == before
    assert not any(site.active for site in find_sites(translator, "*"))


def test_an_exception_in_the_forward_after_the_probe(translator, batch):
    find_sites(translator, "*")
    before = footprint(translator)
    calls = []

    def fail_after_the_probe(module, args):
        calls.append(module)
        if len(calls) == 2:
            raise Broken

    with ADDrop(sites="*", cross_tuning="off").attach(translator) as regularizer:
        handle = translator.output.register_forward_pre_hook(fail_after_the_probe)
        with pytest.raises(Broken):
            translator(*batch)
        handle.remove()
        assert all(p.requires_grad for p in translator.parameters())
        translator(*batch)
        regularizer.detach()
        regularizer.detach()  # nothing is attached: nothing happens
    assert footprint(translator) == before


@pytest.mark.parametrize("attribution", ["gradient", "integrated", "attention", "random"])
@pytest.mark.parametrize("ratios", [{"p": 0.0}, {"q": 0.0}, {"p": 0, "q": 0}])
def test_nothing_to_drop_is_plain_training_bit_for_bit(dropping_translator, batch, ratios, attribution):
    plain = gradients(dropping_translator, batch)
    with ADDrop(sites="*", cross_tuning="off", attribution=attribution, **ratios).attach(dropping_translator):
        assert_identical(gradients(dropping_translator, batch), plain)


def test_plain_epochs_are_plain_training_bit_for_bit(dropping_translator, batch):
    plain = gradients(dropping_translator, batch)
    regularizer = ADDrop(sites="*", p=0.5, q=0.5)
    with regularizer.attach(dropping_translator):
        for epoch in (2, 3, 4, 5):
            regularizer.begin_epoch(epoch)
            step = gradients(dropping_translator, batch)
            if epoch % 2:
                assert_identical(step, plain)
            else:
                assert not step[0].equal(plain[0])


def test_evaluation_and_no_grad_never_call_the_objective(translator, batch):
    calls = []
    regularizer = ADDrop(cross_tuning="off", objective=lambda o, i: calls.append(1) or o.sum())
    with regularizer.attach(translator):
        with torch.no_grad():
            translator(*batch)
        with torch.inference_mode():
            translator(*batch)
        translator.eval()(*batch)
        assert not calls
        assert regularizer.statistics.take() == {}
        translator.train()(*batch)
        assert len(calls) == 1


def test_masks_stay_until_the_next_forward_but_act_in_training_only(translator, batch):
    expected = translator.eval()(*batch)
    with ADDrop(sites="*", p=1.0, q=1.0, cross_tuning="off").attach(translator) as regularizer:
        masked = translator.train()(*batch)
        assert not masked.allclose(expected)
        assert all(site.keep is not None for site in regularizer.attached_sites)
        assert translator.eval()(*batch).equal(expected)
        translator.train()
        with torch.no_grad():
            assert translator(*batch).equal(expected)
        assert all(site.keep is not None for site in regularizer.attached_sites), "a backward may still recompute"
        before = [site.keep for site in regularizer.attached_sites]
        translator(*batch)
        assert all(site.keep is not keep for site, keep in zip(regularizer.attached_sites, before, strict=True))


def test_attaching_twice_is_refused(translator):
    regularizer = ADDrop()
    regularizer.attach(translator)
    with pytest.raises(ValueError, match=r"^ad_drop is attached already; detach\(\) it first$"):
        regularizer.attach(translator)
    regularizer.detach()
    regularizer.attach(translator)


def test_a_failed_attach_leaves_nothing(translator):
    find_sites(translator, "*")
    before = footprint(translator)
    regularizer = ADDrop(sites="decoder.cross[7]")
    with pytest.raises(ValueError, match=r"^site pattern 'decoder.cross\[7\]' matches nothing .*: encoder.self\[0\] "):
        regularizer.attach(translator)
    with pytest.raises(ValueError, match="no attention site found in Linear"):
        regularizer.attach(torch.nn.Linear(2, 2))
    assert footprint(translator) == before
    regularizer.sites = "decoder"
    assert len(regularizer.attach(translator).sites) == 4


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("name", ["p", "q"])
def test_ratios_are_refused_before_training(name, ratio):
    with pytest.raises(ValueError, match=rf"^{name} is {ratio}, but must lie in \[0, 1\]$"):
        ADDrop(**{name: ratio})


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"attribution": "saliency"},
            "attribution is 'saliency', but must be one of gradient, integrated, attention, ",
        ),
        ({"labels": "silver"}, "labels is 'silver', but must be one of pseudo, gold"),
        ({"direction": "up"}, "direction is 'up', but must be one of high, low"),
        ({"probe_dtype": "int8"}, "probe_dtype is 'int8', but must be one of same, bfloat16"),
        ({"integrated_steps": 0}, "integrated_steps is 0, but must be at least 1"),
        ({"integrated_nodes": "simpson"}, "integrated_nodes is 'simpson', but must be one of uniform, gauss-legendre"),
        ({"integrated_path": "all"}, "integrated_path is 'all', but must be one of site, joint"),
        ({"sites": "enc.self"}, "site pattern 'enc.self' is not understood; write for example "),
        ({"sites": ""}, "the site pattern is empty; write for example "),
    ],
)
def test_options_are_refused_before_training(options, message):
    with pytest.raises(ValueError) as refused:
        build("ad_drop", **options)
    assert str(refused.value).startswith(message)


def test_registry():
    assert REGISTRY["ad_drop"] is ADDrop
    assert isinstance(build("ad_drop", p=0.2), ADDrop)
    with pytest.raises(ValueError, match=f"^unknown method 'addrop'; the methods are: {', '.join(sorted(REGISTRY))}$"):
        build("addrop")
    documented = {entry.name: entry.metadata["help"] for entry in options_of(ADDrop)}
    assert {"p", "q", "sites", "cross_tuning", "attribution", "labels"} <= documented.keys()
    assert "schedule" not in documented
    assert all(documented.values())


def test_a_module_left_in_evaluation_mode_is_left_alone(batch, one_thread):
    torch.manual_seed(2)
    model = TinyClassifier().train()
    ids = tokens([5, 3], 5)
    plain = model(ids)
    with ADDrop(p=1.0, q=1.0, cross_tuning="off", sites="encoder.self").attach(model) as regularizer:
        frozen_layer = attentions(model)["encoder.self[0]"].eval()
        masked = model(ids)
        assert frozen_layer.site.keep is None
        assert regularizer.attached_sites[1].keep is not None
        assert not masked.allclose(plain)
        model.encoder.eval()
        assert model(ids).equal(plain)
