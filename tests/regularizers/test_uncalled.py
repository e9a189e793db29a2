"""Selected attention that no forward calls is named once, and has no drop rate; masks are freed after the update."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from attn_reg_plugin import ADDrop, AttentionSite
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.base.statistics import summary
from attn_reg_plugin.regularizers.base.unreached import PATIENCE
from tests.attention.tiny_model import PAD, TinyClassifier, TinyTranslator, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = tokens([5, 3], 5)
METHODS = {
    "gradients": ("ad_drop", {"q": 1.0, "cross_tuning": "off"}),
    "integrated": ("ad_drop", {"attribution": "integrated", "integrated_steps": 2, "cross_tuning": "off"}),
    "attention": ("ad_drop", {"attribution": "attention", "cross_tuning": "off"}),
    "random": ("ad_drop", {"attribution": "random", "cross_tuning": "off"}),
    "scores": ("attention_dropout", {"p": 0.5, "where": "scores"}),
    "weights": ("attention_dropout", {"p": 0.5}),
    "heads": ("head_drop", {"p": 0.5}),
    "layers": ("attention_layer_drop", {"p": 0.5}),
}
NEVER = "an update was made, but nothing was regularized; never called: encoder.self[0], encoder.self[1]; an attention"


@pytest.fixture(autouse=True)
def warnings_only(caplog):
    """What is logged beside warnings depends on who set the level."""
    caplog.set_level(logging.WARNING)


class GivenMemory(TinyTranslator):
    """A translator whose encoder's outputs are computed beforehand."""

    def forward(self, source, target):
        memory, there = self.encoder.embedding(source), source.ne(PAD)[:, None, None, :]
        return self.output(
            self.decoder(target, torch.ones(target.size(1), target.size(1)).tril().bool(), memory, there)
        )


def update(model, regularizer, *inputs):
    loss = model(*(inputs or (IDS,))).logsumexp(-1).sum()
    loss.backward()
    regularizer.end_update()
    return loss.detach()


@pytest.mark.parametrize(("method", "options"), METHODS.values(), ids=METHODS)
def test_attention_that_is_never_called_is_named_at_once(caplog, method, options):
    model = GivenMemory().train()
    plain = model(IDS, IDS).logsumexp(-1).sum()
    regularizer = build(method, **options)
    with regularizer.attach(model):
        assert update(model, regularizer, IDS, IDS).equal(plain)
        (message,) = caplog.messages
        assert message.startswith(f"{method}: {NEVER}")
        update(model, regularizer, IDS, IDS)
        shown = summary(regularizer.quantities, regularizer.statistics.take())
    assert len(caplog.messages) == 1
    assert shown["regularized"].value == 1
    assert not [title for title in shown if title.startswith("drop_")]


@pytest.mark.parametrize(("method", "options"), METHODS.values(), ids=METHODS)
def test_attention_that_runs_is_not_named(caplog, method, options):
    """Whatever leaves it out now and then: the rate counts the calls that come."""
    model = TinyClassifier().train()
    model.encoder.checkpointed = True
    with build(method, **options).attach(model) as regularizer:
        for skipped in ({1}, {0}, {0, 1}, set(), {1}):
            model.encoder.skip = skipped
            update(model, regularizer)
        sums = regularizer.statistics.take()
    assert not caplog.messages
    if method in ("attention_dropout", "attention_layer_drop") and options.get("where") != "scores":
        assert [sums[f"valid/encoder.self[{layer}]"] for layer in (0, 1)] == [3, 2]


@pytest.mark.parametrize(("called", "said"), [(None, PATIENCE), (3, None), (PATIENCE - 1, None)])
def test_a_part_that_is_never_called_has_some_updates_to_come(caplog, called, said):
    model = TinyClassifier().train()
    with build("attention_dropout", p=0.5).attach(model) as regularizer:
        for made in range(1, PATIENCE + 3):
            model.encoder.skip = set() if made == called else {1}
            update(model, regularizer)
            assert len(caplog.messages) == (said is not None and made >= said)
        shown = summary(regularizer.quantities, regularizer.statistics.take())
    assert ("drop_encoder.self[1]" in shown) == (called is not None)
    for message in caplog.messages:
        assert f"{PATIENCE} updates were made, but part of the selected attention was not regul" in message
        assert "never called: encoder.self[1]; " in message


@pytest.mark.parametrize("holds", ["model", "configuration"])
def test_with_layerdrop_all_of_it_has_some_updates_to_come(caplog, holds):
    model = TinyClassifier().train()
    if holds == "model":
        model.encoder.encoder_layerdrop = 0.5
    else:
        model.config = nn.Module()
        model.config.layerdrop = 0.5
    model.encoder.skip = {0}
    with build("head_drop", p=0.5, sites="encoder.self[0]").attach(model) as regularizer:
        for made in range(1, PATIENCE + 1):
            update(model, regularizer)
            assert len(caplog.messages) == (made == PATIENCE)


def test_plain_epochs_and_what_is_not_trained_are_not_waited_for(caplog):
    model = TinyClassifier().train()
    with ADDrop(sites="encoder.self[1]").attach(model) as regularizer:
        model.encoder.skip = {1}
        for epoch in (1, 2):
            regularizer.begin_epoch(epoch)
            update(model, regularizer)
            assert len(caplog.messages) == epoch - 1
    caplog.clear()
    model.encoder.layers[1].eval()
    with build("head_drop", p=0.5).attach(model) as regularizer:
        for _ in range(PATIENCE + 1):
            update(model, regularizer)
    assert not caplog.messages


class Elsewhere(nn.Module):
    """Attention whose weights other code uses, or that has a site and does not give it on."""

    def __init__(self, torchs):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        if not torchs:
            self.attention, self.site = nn.Linear(4, 12), AttentionSite("encoder", "self", 0)

    def forward(self, states):
        weights = getattr(self.attention, "in_proj_weight", None)
        projected = nn.functional.linear(states, self.attention.weight if weights is None else weights)
        return nn.functional.scaled_dot_product_attention(*projected.chunk(3, -1))


@pytest.mark.parametrize("torchs", [False, True])
def test_weights_that_are_used_elsewhere(caplog, torchs):
    model = Elsewhere(torchs).train()
    with build("attention_dropout", p=0.5, sites="*").attach(model) as regularizer:
        update(model, regularizer, torch.randn(2, 3, 4))
    assert ["never called: encoder.self[0]; " in message for message in caplog.messages] == [True]


# -- masks, once the update is over -----------------------------------------------------------------------------------


@pytest.mark.parametrize("forwards", [1, 2])
def test_masks_are_freed_after_the_update(forwards):
    model = TinyClassifier().train()
    with ADDrop(cross_tuning="off").attach(model) as regularizer:
        for _ in range(forwards):
            loss = model(IDS).logsumexp(-1).sum()
            assert all(site.keep is not None for site in regularizer.attached_sites)
            loss.backward()
        regularizer.end_update()
        assert all(site.keep is None and not site.calls.made for site in regularizer.attached_sites)
        assert model.encoder(IDS, IDS.ne(PAD)[:, None, None, :]).isfinite().all()
        update(model, regularizer)


def test_a_backward_after_the_update_does_not_recompute_without_masks():
    model = TinyClassifier().train()
    model.encoder.checkpointed = True
    with build("attention_dropout", p=0.5, where="scores").attach(model) as regularizer:
        loss = model(IDS).logsumexp(-1).sum()
        regularizer.end_update()
        with pytest.raises(
            RuntimeError, match=r"^attention_dropout freed its masks at the end of the update, and acti"
        ):
            loss.backward()
        update(model, regularizer)
