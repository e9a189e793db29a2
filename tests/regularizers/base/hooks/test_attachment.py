"""Attaching and detaching: exceptions leave nothing, refusals change nothing, and masks act in training only."""

import pytest
import torch

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import REGISTRY, Regularizer, build
from tests.attention.tiny_model import TinyClassifier, tokens
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


#: one regularizer over several models, such as folds or seeds: with each it is as a new one
IDS = tokens([6, 3, 5], 6, seed=4)
PROGRESS = {"schedule": "drop encoder.self: 0:0.6 1:0", "unit": "progress"}
METHODS = {
    "scheduled_dropout": PROGRESS,
    "head_drop": {"p": 0.5, "turn": 0.5, "end": 0.9, "unit": "progress"},
    "ad_drop": {"cross_tuning": "update:3"},
    "ad_drop+r_drop": {"ad_drop": {"cross_tuning": "update:3"}},
    "scheduled_dropout+head_drop": {"scheduled_dropout": PROGRESS},
}


def outputs(regularizer: Regularizer, model: torch.nn.Module, announced: bool = True) -> list[torch.Tensor]:
    """Outputs of four updates."""
    torch.manual_seed(1)
    if announced:
        regularizer.begin_training(4)
        regularizer.begin_epoch(1)
    made = []
    for _ in range(4):
        made.append(regularizer.loss(lambda batch: model(batch).logsumexp(-1).mean(), IDS).detach())
        regularizer.end_update()
    return made


def model() -> torch.nn.Module:
    """The same weights each time."""
    torch.manual_seed(5)
    return TinyClassifier(0.0).train()


@pytest.mark.parametrize("name", METHODS)
def test_its_schedule_begins_anew(name: str) -> None:
    """And so does the length of the training; on the same model it goes on, also where another is refused."""
    regularizer, seen = build(name, **METHODS[name]), []
    for _ in range(2):
        with regularizer.attach(kept := model()):
            seen.append(outputs(regularizer, kept))
    assert torch.stack(seen[0]).equal(torch.stack(seen[1])) and len(set(map(float, seen[0]))) > 1
    with pytest.raises(ValueError, match="no attention"):
        regularizer.attach(torch.nn.Linear(3, 3))
    with regularizer.attach(kept):
        assert all((part.updates, part.epoch) == (4, 1) for part in (regularizer, *regularizer.parts))
    if name == "scheduled_dropout":
        said = r"call regularizer\.begin_training"
        with regularizer.attach(other := model()), pytest.raises(RuntimeError, match=said):
            outputs(regularizer, other, announced=False)


@pytest.mark.parametrize("name", ["ad_drop", "ad_drop+r_drop"])
def test_a_loaded_state_is_continued(name: str) -> None:
    regularizer = build(name, **METHODS[name])
    with regularizer.attach(first := model()):
        outputs(regularizer, first)
        state = regularizer.state_dict()
    regularizer.load_state_dict({**state, "updates": 7})
    with regularizer.attach(model()):
        assert regularizer.attached_sites  # to look at a model's sites loses nothing
    with regularizer.attach(model()):
        assert (regularizer.updates, regularizer.epoch) == (7, 1)
        regularizer.resume({**state, "updates": 8})
        assert regularizer.updates == 8
    with regularizer.attach(model()):
        assert (regularizer.updates, regularizer.epoch) == (0, None), "that state was of the model before"
        assert all((part.updates, part.epoch) == (0, None) for part in regularizer.parts)
