"""Attaching and detaching: exceptions leave nothing, refusals change nothing, and masks act in training only."""

from __future__ import annotations

import pytest
import torch

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import REGISTRY, build
from tests.regularizers.trainings import BATCH, equal, footprint, step
from tests.regularizers.trainings import translator as a_translator

ALWAYS = {"p": 1.0, "q": 1.0, "sites": "*", "cross_tuning": "off"}


class Broken(Exception):
    pass


def broken(*_):
    raise Broken


@pytest.mark.parametrize("attribution", ["gradient", "integrated", "attention"])
@pytest.mark.parametrize("place", ["the objective", "a method that has asked", "the forward after the probe"])
def test_an_exception_in_a_forward_leaves_nothing(place, attribution):
    model = a_translator()
    before, regularizer = footprint(model), ADDrop(attribution=attribution, probe_dropout=False, **ALWAYS)
    regularizer.attach(model)
    attached = footprint(model)
    with pytest.MonkeyPatch.context() as patch:
        if place == "the objective":
            patch.setattr(regularizer, "objective", broken)
        elif place == "a method that has asked":
            act = regularizer.before_forward
            patch.setattr(regularizer, "before_forward", lambda forward: broken(act(forward)))
        for _ in range(2):
            # the method's own hooks have run when this one is called
            last = model.register_forward_pre_hook(broken) if place == "the forward after the probe" else None
            with pytest.raises(Broken):
                model(*BATCH)
            if last is not None:
                last.remove()
            assert footprint(model) == attached
            assert last is not None or not any(site.active for site in regularizer.attached_sites)
    step(model)
    regularizer.detach()
    model.zero_grad()
    assert footprint(model) == before and equal(step(model), step(a_translator()))


def test_masks_stay_until_the_next_forward_but_act_in_training_only(translator, batch):
    expected, calls = translator.eval()(*batch), []
    objective = lambda outputs, inputs: calls.append(1) or outputs.sum()  # noqa: E731
    with ADDrop(objective=objective, **ALWAYS).attach(translator) as regularizer:
        assert translator(*batch).equal(expected) and regularizer.statistics.take() == {} and not calls
        assert not translator.train()(*batch).allclose(expected)
        before = [site.keep for site in regularizer.attached_sites]
        assert translator.eval()(*batch).equal(expected)
        with torch.no_grad():
            assert translator.train()(*batch).equal(expected)
        assert all(site.keep is not None for site in regularizer.attached_sites), "a backward may still recompute"
        assert len(calls) == 1
        translator(*batch)
        assert all(site.keep is not keep for site, keep in zip(regularizer.attached_sites, before, strict=True))


def test_what_cannot_be_attached_is_refused_and_nothing_stays(translator):
    before, regularizer = footprint(translator), ADDrop(sites="decoder.cross[7]")
    with pytest.raises(ValueError, match=r"^site pattern 'decoder.cross\[7\]' matches nothing .*: encoder.self\[0\] "):
        regularizer.attach(translator)
    assert footprint(translator) == before
    regularizer.sites = "decoder"
    for _ in range(2):
        assert len(regularizer.attach(translator).sites) == 4
        with pytest.raises(ValueError, match=r"^ad_drop is attached already; detach\(\) it first$"):
            regularizer.attach(translator)
        regularizer.detach()
    with pytest.raises(ValueError, match=f"^unknown method 'addrop'; the methods are: {', '.join(sorted(REGISTRY))}$"):
        build("addrop")


def test_a_wholly_frozen_model_is_still_probed(translator, batch):
    translator.requires_grad_(False)
    with ADDrop(**ALWAYS).attach(translator) as regularizer:
        translator(*batch)
        assert regularizer.statistics.take()["dropped/encoder.self[0]"] > 0
    assert not any(p.requires_grad for p in translator.parameters())
