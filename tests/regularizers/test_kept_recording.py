"""What a training's backward leaves behind: what is kept of it, what isn't, and what is said of that."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import Combination, Tokens, build
from attn_reg_plugin.regularizers.example_digests import examples_of
from attn_reg_plugin.regularizers.probing import Forward
from attn_reg_plugin.regularizers.statistics import Statistics
from tests.attention.tiny_model import PAD, loss_of, tokens
from tests.regularizers.test_several_calls import EQUALLY_LONG, OF_THEIR_OWN, siamese

pytestmark = pytest.mark.usefixtures("one_thread")
OTHER = tokens([4, 6], 6, seed=5), tokens([2, 5], 5, seed=6)
CPU = torch.device("cpu")


def kept(**options):
    """In its first epoch, which is plain and recorded."""
    regularizer = ADDrop(**{"p": 0.4, "q": 1.0, "sites": "*", "probe": "kept", "on_miss": "plain", **options})
    regularizer.begin_epoch(1)
    return regularizer


def supplied(*batch):
    """Source and target of a translator."""
    return {stack: Tokens(ids, ids.ne(PAD)) for stack, ids in zip(("encoder", "decoder"), batch, strict=True)}


def forward_of(regularizer, *batch):
    model = regularizer.model
    return Forward(model, batch, {}, regularizer.supplied, regularizer._attachment._described(model, batch, {}))


def run(regularizer, batch, scale=1.0):
    """Forward and backward of a translator."""
    regularizer.supply(example_tokens=supplied(*batch))
    loss = loss_of(regularizer.model(*batch), batch[1])
    (loss * scale).backward()
    return loss


def found(regularizer, *batch):
    """What is kept of a batch of a translator."""
    regularizer.supply(example_tokens=supplied(*batch))
    return regularizer.kept.find(forward_of(regularizer, *batch), regularizer._setting, Statistics())


def digests(regularizer, *batch):
    return examples_of(forward_of(regularizer, *batch)).digests


# -- updates ----------------------------------------------------------------------------------------------------------


def test_a_skipped_update_is_not_kept(translator, batch):
    with kept().attach(translator) as regularizer:
        run(regularizer, batch)
        regularizer.forget_unfinished()
        run(regularizer, OTHER)
        regularizer.end_update()
        assert found(regularizer, *batch).missing == [0, 1, 2] and not found(regularizer, *OTHER).missing


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_an_example_whose_gradient_is_not_finite_is_not_kept(translator, batch, value):
    with kept().attach(translator) as regularizer:
        regularizer.supply(example_tokens=supplied(*batch))
        outputs = translator(*batch)
        outputs.backward(torch.ones_like(outputs).index_fill(0, torch.tensor([1]), float(value)))
        regularizer.end_update()
        assert found(regularizer, *batch).missing == [1]
        assert regularizer.statistics.take()["kept_lost"] == 1


def test_every_part_of_an_accumulated_update_is_kept(dropping_translator, batch):
    with kept().attach(dropping_translator) as regularizer:
        regularizer.begin_update(5)
        for part in (batch, OTHER):
            run(regularizer, part, scale=0.5)
        assert found(regularizer, *batch).missing, "not before the update is made"
        regularizer.end_update()
        for part in (batch, OTHER):
            assert [one.update for one in found(regularizer, *part).kept] == [5] * len(part[0])
    assert len({tuple(row.tolist()) for part in (batch, OTHER) for row in part[0]}) == 5


def test_two_forwards_before_one_backward(dropping_translator, batch):
    with kept().attach(dropping_translator) as regularizer:
        losses = []
        for part in (batch, OTHER):
            regularizer.supply(example_tokens=supplied(*part))
            losses.append(loss_of(dropping_translator(*part), part[1]))
        sum(losses).backward()
        regularizer.end_update()
        assert not found(regularizer, *OTHER).missing and not found(regularizer, *batch).missing


def test_backwards_one_after_the_other_are_not_kept_and_told_of(translator, batch, caplog):
    with kept().attach(translator) as regularizer, caplog.at_level(logging.WARNING):
        for _ in range(2):
            regularizer.supply(example_tokens=supplied(*batch))
            outputs = translator(*batch)
            outputs.sum().backward(retain_graph=True)
            outputs.square().sum().backward()
            regularizer.end_update()
        assert len(found(regularizer, *batch).missing) == 3 and caplog.text.count("call backward once") == 1


def test_repeated_rows_have_one_region(dropping_translator, batch):
    """R-Drop's batch: every example twice."""
    twice = tuple(torch.cat([part, part]) for part in batch)
    with kept().attach(dropping_translator) as regularizer:
        run(regularizer, twice)
        regularizer.end_update()
        both = found(regularizer, *twice)
        assert not both.missing and len(regularizer.kept.store) == 3
        region = both.region(regularizer.attached_sites[0], (0, 0), (6, 2, 6, 6), CPU)
        assert region.any() and region[:3].equal(region[3:])


def test_a_rank_without_examples_records_nothing(translator, batch):
    with kept().attach(translator) as regularizer:
        regularizer.begin_epoch(1)
        regularizer.supply(example_tokens=supplied(*batch), counts=False)
        (translator(*batch).sum() * 0).backward()
        regularizer.end_update()
        assert regularizer.kept.store is not None and len(regularizer.kept.store) == 0


# -- models -----------------------------------------------------------------------------------------------------------


def masks(regularizer):
    """What each call of each site attends to, drawn for the forward that was."""
    return {site.name: [call.keep.unpacked() for call in site.calls] for site in regularizer.attached_sites}


def fresh_masks(model, batch, loss, seed=7):
    fresh = ADDrop(p=0.4, q=1.0, sites="*", cross_tuning="off", objective=lambda outputs, _: -loss(outputs))
    with fresh.attach(model):
        torch.manual_seed(seed)
        model(*batch)
        return masks(fresh)


@pytest.mark.parametrize("texts", [EQUALLY_LONG, OF_THEIR_OWN], ids=["equally long", "of their own lengths"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_text_of_an_example_has_its_own_region(texts, checkpointed):
    model, loss = siamese(0.2), lambda outputs: outputs.square().sum()
    model.encoder.checkpointed = checkpointed
    expected = fresh_masks(model, texts, loss)
    with kept().attach(model) as regularizer:
        torch.manual_seed(7)
        loss(model(*texts)).backward()
        regularizer.end_update()
        look = regularizer.kept.find(forward_of(regularizer, *texts), regularizer._setting, Statistics())
        assert not look.missing
        for index, site in enumerate(regularizer.attached_sites):
            for call, keep in enumerate(expected[site.name]):
                region = look.region(site, (index, call), tuple(keep.shape), CPU)
                real = texts[call].ne(PAD)[:, None, None, :] & texts[call].ne(PAD)[:, None, :, None]
                assert region.any() and (region & real).equal(~keep & real), (site.name, call)
        first, second = texts
        other = digests(regularizer, first, second.roll(1, 0))
        assert not set(other) & set(digests(regularizer, first, second)), "another second text, another example"


@pytest.mark.parametrize("other", ["layer_drop", "attention_layer_drop"])
def test_of_two_texts_what_did_not_run_has_no_region_and_the_other_keeps_its_own(other):
    """The texts differ in length, so that the sizes of a region say whose it is."""
    model, kept_of = siamese(), set()
    method, beside = kept(on_miss="plain", sites="encoder.self"), build(other, p=0.5)
    with Combination([method, beside]).attach(model) as together:
        for seed in range(12):
            together.begin_epoch(1)
            torch.manual_seed(seed)
            model(*OF_THEIR_OWN).square().sum().backward()
            together.end_update()
            look = method.kept.find(forward_of(method, *OF_THEIR_OWN), method._setting, Statistics())
            for index in range(2):
                parts = [part for part in look.kept[0].parts if part[0] == index]
                kept_of.add(tuple(call for _, call, *_ in parts))
                assert [part[3:] for part in parts] == [(OF_THEIR_OWN[call].size(1),) * 2 for _, call, *_ in parts]
    assert (1,) in kept_of and (0,) in kept_of


@pytest.mark.parametrize("frozen", ["encoder", "embedding and first layer", "all but the output"])
def test_what_is_not_trained_is_attributed_all_the_same(dropping_translator, batch, frozen):
    model, loss = dropping_translator, lambda outputs: loss_of(outputs, batch[1])
    parts = {
        "encoder": [model.encoder],
        "embedding and first layer": [model.encoder.embedding, model.encoder.position, model.encoder.layers[0]],
        "all but the output": [model.encoder, model.decoder],
    }[frozen]
    for part in parts:
        part.requires_grad_(False)
    expected = fresh_masks(model, batch, loss)
    with kept().attach(model) as regularizer:
        torch.manual_seed(7)
        run(regularizer, batch)
        assert all(p.grad is None for part in parts for p in part.parameters())
        regularizer.end_update()
        look = found(regularizer, *batch)
        site = regularizer.attached_sites[0]
        (keep,), real = expected[site.name], batch[0].ne(PAD)
        real = real[:, None, None, :] & real[:, None, :, None]
        assert (look.region(site, (0, 0), (3, 2, 6, 6), CPU) & real).equal(~keep & real)


def test_a_layer_that_was_left_out_drops_nothing(translator, batch):
    """LayerDrop leaves it out as an example is recorded."""
    with kept().attach(translator) as regularizer:
        regularizer.begin_epoch(1)
        translator.encoder.skip = {1}
        run(regularizer, batch)
        regularizer.end_update()
        translator.encoder.skip = set()
        regularizer.begin_epoch(2)
        regularizer.statistics.take()
        run(regularizer, batch)
        sums = regularizer.statistics.take()
        assert sums["kept_hits"] == 3 and sums["dropped/encoder.self[0]"] > 0 == sums["dropped/encoder.self[1]"]


class Encoder(nn.Module):
    """Rows that aren't the examples: two choices each, under the model's back."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(torch.cat([tokens, tokens]))


def test_rows_that_are_not_examples_are_refused(classifier):
    with kept().attach(Encoder(classifier).train()) as regularizer, pytest.raises(RuntimeError, match="batch of 6"):
        regularizer.model(tokens([5, 3, 2], 5))


def test_other_sizes_of_source_and_target_are_refused(translator, batch):
    with kept().attach(translator) as regularizer, pytest.raises(ValueError, match="encoder has 3 examples, but"):
        regularizer.supply(example_tokens=supplied(batch[0], batch[1][:2]))
        translator(*batch)


# -- options that change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value", "hits"), [("p", 0.2, 0), ("direction", "low", 0), ("q", 0.1, 3)])
def test_options_that_change_between_epochs(translator, batch, caplog, option, value, hits):
    regularizer = kept()
    with regularizer.attach(translator), caplog.at_level(logging.WARNING):
        for epoch in (1, 2, 2):
            regularizer.begin_epoch(epoch)
            run(regularizer, batch)
            regularizer.end_update()
            if epoch == 1:
                setattr(regularizer, option, value)
    sums = regularizer.statistics.take()
    assert sums["kept_asked"] == 6 and sums["kept_hits"] == 2 * hits
    assert caplog.text.count("it counts as missing") == (0 if hits else 1)


def test_another_model_has_a_store_of_its_own(translator, batch):
    """One object for one model after the other, as in cross-validation."""
    other, regularizer = copy.deepcopy(translator), kept()
    for model, missing in ((translator, 0), (translator, 0), (other, 3)):
        with regularizer.attach(model):
            for epoch in (1, 2) if missing == 0 else (2,):
                regularizer.begin_epoch(epoch)
                run(regularizer, batch)
                regularizer.end_update()
            assert len(found(regularizer, *batch).missing) == missing


def test_a_copy_has_a_store_of_its_own(translator, batch, tmp_path):
    regularizer = kept(store_folder=str(tmp_path), store_gb=1e-9)
    with regularizer.attach(translator):
        run(regularizer, batch)
        regularizer.end_update()
        twin = copy.deepcopy(regularizer.kept)
        del twin
        assert not found(regularizer, *batch).missing, "its files are open"


def test_a_model_may_be_copied_between_forward_and_update(translator, batch):
    """As an average of its weights is made."""
    with kept().attach(translator) as regularizer:
        run(regularizer, batch)
        twin = copy.deepcopy(translator)
        twin(*OTHER).sum().backward()
        regularizer.end_update()
        assert len(regularizer.kept.store) == 3 and not found(regularizer, *batch).missing


@pytest.mark.parametrize("texts", [EQUALLY_LONG, OF_THEIR_OWN], ids=["equally long", "of their own lengths"])
def test_each_text_of_a_missing_example_is_probed(texts):
    """Their masks are those that a fresh probe gives them."""
    model = siamese(dropout=0.2)
    expected = fresh_masks(model, texts, lambda outputs: outputs.square().sum())
    regularizer = kept(on_miss="probe", cross_tuning="off", objective=lambda o, i: -o.square().sum())
    with regularizer.attach(model):
        torch.manual_seed(7)
        model(*texts).square().sum().backward()
        drawn = regularizer.attached_sites[0].sampler is not None
        regularizer.end_update()
        assert drawn and len(expected) == 2 and len(regularizer.kept.store) == len(texts[0])


def test_a_copy_of_the_model_leaves_the_files_alone(translator, batch, tmp_path):
    regularizer = kept(store_gb=1e-9, store_folder=str(tmp_path))
    with regularizer.attach(translator):
        run(regularizer, batch)
        regularizer.end_update()
        regularizer.begin_epoch(2)
        run(regularizer, batch)
        twin = copy.deepcopy(translator)
        del twin
        regularizer.end_update()
        assert regularizer.kept.store.in_memory == 0 and not found(regularizer, *batch).missing


def test_a_loop_that_announces_no_update_is_told(translator, batch, caplog):
    regularizer = kept()
    with regularizer.attach(translator), caplog.at_level(logging.WARNING):
        run(regularizer, batch)
        regularizer.begin_epoch(2)
        run(regularizer, batch)
    assert caplog.text.count("call regularizer.end_update() after each") == 1 and not regularizer.kept._unfinished


def test_a_site_that_sees_another_length_is_told_of(translator, batch, caplog):
    """Tokens of a stack that aren't known are taken as they come: padded otherwise, the example is another map."""
    regularizer = kept()
    with regularizer.attach(translator), caplog.at_level(logging.WARNING):
        run(regularizer, batch)
        regularizer.end_update()
        found_ = found(regularizer, *batch)
        site = regularizer.attached_sites[0]
        assert not found_.region(site, (0, 0), (3, 2, 9, 9), CPU).any()
    assert caplog.text.count(f"{site.name} sees an example at another length") == 1
