"""A regularizer that never acts says so once, and names attention that no forward calls; masks end with the update."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.base.hooks.unreached import PATIENCE, UNANNOUNCED
from attn_reg_plugin.regularizers.base.statistics import summary
from tests.attention.tiny_model import PAD, Around, TinyClassifier, tokens

IDS = tokens([5, 3], 5)
OFF = {"cross_tuning": "off"}
EACH = pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ad_drop", {"q": 1.0, **OFF}),
        ("ad_drop", {"attribution": "integrated", "integrated_steps": 2, **OFF}),
        ("ad_drop", {"attribution": "random", **OFF}),
        ("attention_dropout", {"p": 0.5}),
        ("head_drop", {"p": 0.5}),
        ("attention_layer_drop", {"p": 0.5}),
    ],
)


@pytest.fixture(autouse=True)
def warnings_only(caplog):
    """Keep warnings only: what else is logged depends on who set the level."""
    caplog.set_level(logging.WARNING)


def update(model, regularizer):
    loss = model(IDS).logsumexp(-1).sum()
    loss.backward()
    regularizer.end_update()
    return loss.detach()


@pytest.mark.parametrize(
    "attached, called, reason",
    [
        (lambda m: m.model.eval(), lambda m: m.model, "TinyClassifier is in evaluation mode: call its train() "),
        (lambda m: m, lambda m: m.model, "the forward of Around was never called with gradients: attach to the "),
        (lambda m: m.model.eval() and m, lambda m: m, "the attention of Around is in evaluation mode: call train() o"),
    ],
    ids=["left in evaluation mode", "a wrapper that is never called", "the part with attention in evaluation mode"],
)
@pytest.mark.parametrize("announced", [True, False])
def test_nothing_was_regularized_is_said_once(caplog, attached, called, reason, announced):
    model = Around(TinyClassifier()).train()
    with ADDrop(**OFF).attach(attached(model)) as regularizer:
        for _ in range(2):
            called(model)(IDS).sum().backward()
            if announced:
                regularizer.end_update()
        assert len(caplog.messages) == announced
    (record,) = caplog.records
    event = "an update was made" if announced else "its attention ran with gradients"
    assert record.getMessage().startswith(f"ad_drop: {event}, but nothing was regularized; {reason}")
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_model_left_in_evaluation_mode_after_a_validation_is_said_once(caplog, left, epoch):
    """Nothing is said of plain epochs, of evaluation, and of a loop that attaches anew."""
    model, regularizer = TinyClassifier().train(), ADDrop()
    for _ in range(1 if left else 2):
        with regularizer.attach(model):
            regularizer.begin_epoch(epoch)
            for _ in range(3):
                update(model, regularizer)
                model.eval()(IDS)  # a validation, with gradients
                model.train(not left)
            assert len(caplog.messages) == left
    with regularizer.attach(model), torch.no_grad():
        model.eval()(IDS)
    assert len(caplog.messages) == left
    assert all("TinyClassifier is in evaluation mode: call its train()" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("accumulated", "announced", "said"),
    [(1, None, True), (1, 1, False), (1, 20, False), (1, 21, True), (20, None, False), (3, None, True)],
    ids=["never", "each", "once, in time", "too late", "one long update", "accumulated"],
)
def test_updates_that_are_not_announced_are_said_once(caplog, accumulated, announced, said):
    model, regularizer = TinyClassifier().train(), ADDrop(**OFF)
    optimizer = torch.optim.Adam(model.parameters())
    with regularizer.attach(model):
        for batch in range(1, (UNANNOUNCED + 1) * (accumulated if said else 1) + 1):
            model(IDS).sum().backward()
            if batch % accumulated == 0:
                optimizer.step()
            if announced and batch % announced == 0:
                regularizer.end_update()
    assert len(caplog.messages) == said
    assert all("ad_drop: 20 updates were made, and none was announced" in message for message in caplog.messages)


def test_an_attached_model_is_not_scripted():
    model, states = nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True).train(), torch.randn(2, 3, 4)
    before, said = set(vars(model)), r"^torch.jit.script cannot compile a model while a regularizer is attached to it; "
    with ADDrop(sites="*", **OFF).attach(model):
        for part in (model, nn.Sequential(model)):
            with pytest.raises(RuntimeError, match=said + r"detach\(\) "):
                torch.jit.script(part)
    assert set(vars(model)) == before
    torch.testing.assert_close(torch.jit.script(model)(states), model(states))


def test_replicas_in_threads_are_refused_in_training():
    """`nn.DataParallel` over several devices: around the model when it attaches, or later; one device is as none."""
    model, regularizer = TinyClassifier().train(), ADDrop(**OFF)
    parallel = nn.DataParallel(model)
    with regularizer.attach(parallel):
        pass
    parallel.device_ids = [0, 1]
    said = r"ad_drop cannot act in the replicas of nn\.DataParallel.*DistributedDataParallel with a process for each"
    for whole in (parallel, Around(parallel)):
        with pytest.raises(ValueError, match=said):
            regularizer.attach(whole)
    with regularizer.attach(model):
        replica = model._replicate_for_data_parallel()  # without parameters, which come as attributes
        with pytest.raises(RuntimeError, match=said):
            replica(IDS)
        twin = model.eval()._replicate_for_data_parallel()
        twin.forward = lambda ids: ids
        assert twin(IDS) is IDS


class EmbeddingOnly(TinyClassifier):
    """A classifier whose encoder's layers are never called."""

    def forward(self, ids):
        return self.output(self.encoder.embedding(ids)[:, 0])


@EACH
def test_attention_that_is_never_called_is_named_at_once(caplog, method, options):
    model = EmbeddingOnly().train()
    plain = model(IDS).logsumexp(-1).sum()
    with build(method, **options).attach(model) as regularizer:
        assert update(model, regularizer).equal(plain)
        never = "but nothing was regularized; never called: encoder.self[0], encoder.self[1]; an attention"
        assert caplog.messages[0].startswith(f"{method}: an update was made, {never}")
        update(model, regularizer)
        shown = summary(regularizer.quantities, regularizer.statistics.take())
    assert len(caplog.messages) == 1 and shown["regularized"].value == 1
    assert not [title for title in shown if title.startswith("drop_")]


@EACH
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
    if method in ("attention_dropout", "attention_layer_drop"):
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
    model.config = SimpleNamespace()
    (model.encoder if holds == "model" else model.config).encoder_layerdrop = 0.5
    model.encoder.skip = {0}
    with build("head_drop", p=0.5, sites="encoder.self[0]").attach(model) as regularizer:
        for made in range(1, PATIENCE + 1):
            update(model, regularizer)
            assert len(caplog.messages) == (made == PATIENCE)


def test_plain_epochs_and_what_is_not_trained_are_not_waited_for(caplog):
    model = TinyClassifier().train()
    model.encoder.layers[1].eval()
    with build("head_drop", p=0.5).attach(model) as regularizer:
        for _ in range(PATIENCE + 1):
            update(model, regularizer)
    model.train().encoder.skip = {1}
    with ADDrop(sites="encoder.self[1]").attach(model) as regularizer:
        for epoch in (1, 2):
            regularizer.begin_epoch(epoch)
            update(model, regularizer)
            assert len(caplog.messages) == epoch - 1


@pytest.mark.parametrize("forwards", [1, 2])
def test_masks_are_freed_after_the_update(forwards):
    """A backward that comes later does not recompute without them."""
    model = TinyClassifier().train()
    with build("ad_drop", **OFF).attach(model) as regularizer:
        for _ in range(forwards):
            loss = model(IDS).logsumexp(-1).sum()
            assert all(site.keep is not None for site in regularizer.attached_sites)
            loss.backward()
        regularizer.end_update()
        assert all(site.keep is None and not site.calls.made for site in regularizer.attached_sites)
        assert model.encoder(IDS, IDS.ne(PAD)[:, None, None, :]).isfinite().all()
        model.encoder.checkpointed = True
        loss = model(IDS).logsumexp(-1).sum()
        regularizer.end_update()
        with pytest.raises(RuntimeError, match=r"^ad_drop freed its masks at the end of the update, and acti"):
            loss.backward()
        update(model, regularizer)
