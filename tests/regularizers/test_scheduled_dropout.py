"""Scheduled dropout: which curve holds where, and the masks that are drawn from it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from attn_reg_plugin.regularizers import ScheduledDropout
from tests.attention.tiny_model import (
    PAD,
    assert_recomputed,
    attentions,
    drawn,
    loss_of,
    same_step,
    tokens,
    training_step,
)

SITES = ["encoder.self[0]", "encoder.self[1]"]


# -- which curve holds where ------------------------------------------------------------------------------------------


def test_later_entries_override_earlier_ones_and_sites_without_a_curve_are_plain(translator):
    schedule = "drop encoder.self: 0:0.5; keep decoder.self: 0:0.75; drop encoder.self[1]: 0:0.75"
    regularizer = ScheduledDropout(schedule=schedule, sites="*")
    with regularizer.attach(translator):
        drop = regularizer.drop_probabilities()
    assert drop == {
        "encoder.self[0]": 0.5,
        "encoder.self[1]": 0.75,
        "decoder.self[0]": 0.25,
        "decoder.self[1]": 0.25,
        "decoder.cross[0]": 0.0,
        "decoder.cross[1]": 0.0,
    }


@pytest.mark.parametrize("pattern", ["decoder.cross", "encoder.self[2]"])
def test_an_entry_that_fits_no_regularized_site_is_refused_and_nothing_stays_attached(translator, pattern):
    regularizer = ScheduledDropout(schedule=f"drop encoder.self: 0:0.5; drop {pattern}: 0:0.5")
    with pytest.raises(ValueError, match=r"does not fit the regularized sites, which are: encoder\.self\[0\]"):
        regularizer.attach(translator)
    assert regularizer.attached_sites == []
    assert not translator._forward_pre_hooks
    regularizer.sites = "*"
    if pattern == "decoder.cross":
        regularizer.attach(translator).remove()


def test_updates_count_from_zero_and_epochs_from_one(classifier):
    regularizer = ScheduledDropout(schedule="drop *: 0:0.8 4:0.0")
    with regularizer.attach(classifier):
        for update in range(7):
            assert regularizer.drop_probabilities()[SITES[0]] == pytest.approx(max(0.8 - 0.2 * update, 0))
            assert regularizer.due() == (update < 4)
            regularizer.end_update()
        regularizer.begin_update(1)
        assert regularizer.drop_probabilities()[SITES[1]] == pytest.approx(0.6)
    regularizer = ScheduledDropout(schedule="drop *: 1:0.2 3:0.6", unit="epoch")
    with regularizer.attach(classifier):
        with pytest.raises(RuntimeError, match="begin_epoch"):
            classifier(tokens([4, 3], 4))
        for epoch, drop in ((1, 0.2), (2, 0.4), (3, 0.6), (9, 0.6)):
            regularizer.begin_epoch(epoch)
            regularizer.end_update()
            assert regularizer.drop_probabilities()[SITES[0]] == pytest.approx(drop)


# -- masks ------------------------------------------------------------------------------------------------------------


def masks_of(regularizer, model, batch):
    """The keep masks that the sites draw in a forward of `model`, by name."""
    masks = {}
    for name, module in attentions(model).items():

        def attend(name, query, key, value, valid, dropout_p):
            call, shape = attentions(model)[name].site.enter(), (*query.shape[:-1], key.size(-2))
            keep = None if call is None else call.keep_mask(shape, valid, query.device)
            masks.setdefault(name, []).append((keep, valid))
            return value[..., :1, :].expand(*shape[:-1], value.size(-1))

        assert module.site.name == name
        module.attend = attend
    with regularizer.attach(model):
        model(*batch)
    return {name: calls[0] for name, calls in masks.items()}


def test_masks_have_the_rate_of_their_curve_independently_of_place(translator):
    """χ² of how often each position is kept, over the examples of a batch; nothing on padding or the future."""
    batch = tokens([8] * 150 + [5] * 150, 8, seed=1), tokens([8] * 150 + [3] * 150, 8, seed=2)
    wanted = {"encoder.self[0]": 0.6, "encoder.self[1]": 0.75, "decoder.self[1]": 0.3, "decoder.cross[0]": 0.9}
    schedule = "; ".join(f"keep {name}: 0:0.1 2:{2 * keep - 0.1}" for name, keep in wanted.items() if keep <= 0.5)
    schedule += "; " + "; ".join(f"drop {name}: 1:{1 - keep}" for name, keep in wanted.items() if keep > 0.5)
    regularizer = ScheduledDropout(schedule=schedule, sites="*")
    regularizer.begin_update(1)
    torch.manual_seed(11)
    masks = masks_of(regularizer, translator, batch)
    sums = regularizer.statistics.take()
    for name, p in wanted.items():
        keep, valid = masks[name]
        assert keep.shape == (300, 1, 8, 8), "shared by all heads"
        assert not (keep & ~valid).any()
        valid = valid.expand(keep.shape)
        n = valid.sum(0).double()
        cells = n > 0
        kept = (keep & valid).sum(0).double()
        chi_square = ((kept - n * p)[cells] ** 2 / (n * p * (1 - p))[cells]).sum()
        freedom = int(cells.sum())
        assert abs(float(chi_square) - freedom) < 5 * math.sqrt(2 * freedom), name
        rate = float(sums[f"dropped/{name}"] / sums[f"valid/{name}"])
        assert rate == pytest.approx(float(1 - kept.sum() / n.sum()), abs=1e-6)
        assert sums[f"valid/{name}"] == n.sum()
    assert all(masks[name][0] is None for name in ("decoder.self[0]", "decoder.cross[1]"))
    pair = torch.stack([masks[f"encoder.self[{layer}]"][0][:150].flatten().double() for layer in (0, 1)])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(pair.size(1)), "layers draw for themselves"


def test_the_scores_are_masked_before_the_softmax(translator, batch):
    plain = copy.deepcopy(translator)
    regularizer = ScheduledDropout(schedule="drop *: 0:0.6", sites="*")
    masks = {}
    with regularizer.attach(translator):
        torch.manual_seed(3)
        output = translator(*batch)
        for site in regularizer.attached_sites:
            masks[site.name] = site.request.sampler

    def attend(name, query, key, value, valid, dropout_p):
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
        keep = drawn(masks[name], scores.shape, valid)
        dead = ~keep.any(-1, keepdim=True)
        scores = scores.masked_fill(dead, 0.0).masked_fill(~(keep | dead & valid), -math.inf)
        return scores.softmax(-1) @ value

    for module in attentions(plain).values():
        module.attend = attend
    real = batch[1].ne(PAD)
    torch.testing.assert_close(output[real], plain(*batch)[real])


def test_drop_of_one_is_the_uniform_row(translator, batch):
    literal = copy.deepcopy(translator)
    for module in attentions(literal).values():
        module.attend = lambda name, q, k, v, valid, p: (
            (valid.float() / valid.sum(-1, keepdim=True)).expand(*v.shape[:2], -1, -1) @ v
        ).expand(*q.shape)
    with ScheduledDropout(schedule="drop *: 0:1", sites="*").attach(translator):
        torch.testing.assert_close(translator(*batch), literal(*batch))


@pytest.mark.parametrize("schedule", ["drop *: 0:0", "drop *: 0:0.5 9:0", "keep encoder.self[0]: 0:1"])
def test_drop_of_zero_changes_no_bit_and_draws_nothing(dropping_translator, batch, schedule):
    model = dropping_translator
    expected = training_step(model, batch)
    regularizer = ScheduledDropout(schedule=schedule, sites="*")
    regularizer.begin_update(9)
    with regularizer.attach(model):
        assert same_step(expected, training_step(model, batch))
        assert regularizer.statistics.take() == {"forwards": 1.0, "regularized": 0.0}


def test_evaluation_is_untouched(dropping_translator, batch):
    model = dropping_translator.eval()
    expected = model(*batch)
    with ScheduledDropout(schedule="drop *: 0:0.8", sites="*").attach(model):
        assert model(*batch).equal(expected)
        model.train()(*batch)
        assert model.eval()(*batch).equal(expected)


@pytest.mark.parametrize("seed", range(3))
def test_recomputation_draws_the_same_masks(dropping_translator, batch, seed):
    schedule = "drop *: 0:0.5"
    assert_recomputed(
        dropping_translator, batch, seed, lambda model: ScheduledDropout(schedule=schedule, sites="*").attach(model)
    )


def test_every_forward_draws_anew_from_the_global_generator(translator, batch):
    with ScheduledDropout(schedule="drop *: 0:0.5", sites="*").attach(translator):
        torch.manual_seed(1)
        first, second = translator(*batch), translator(*batch)
        torch.manual_seed(1)
        again = translator(*batch)
    assert not first.equal(second)
    assert first.equal(again)


def test_what_is_padded_and_what_comes_later_never_matters(translator, batch):
    source, target = batch
    real = batch[1].ne(PAD)
    outputs = []
    for changed in (False, True):
        with torch.no_grad():
            translator.encoder.embedding.weight[PAD] += float(changed)
        later = target.clone()
        later[:, 2:] = torch.where(real[:, 2:] & torch.tensor(changed), 1 + later[:, 2:] % 12, later[:, 2:])
        with ScheduledDropout(schedule="drop *: 0:0.6", sites="*").attach(translator):
            torch.manual_seed(5)
            outputs.append(translator(source, later)[:, :2][real[:, :2]])
    torch.testing.assert_close(*outputs)


def test_a_run_that_is_resumed_continues_exactly(translator, batch):
    def train(model, regularizer, n):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with regularizer.attach(model):
            for _ in range(n):
                loss_of(model(*batch), batch[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                regularizer.end_update()
        return model

    def make():
        return ScheduledDropout(schedule="drop encoder.self: 0:0.8 6:0.1; drop decoder: 3:0 5:0.7", sites="*")

    whole, parts = copy.deepcopy(translator), copy.deepcopy(translator)
    torch.manual_seed(2)
    train(whole, make(), 7)
    torch.manual_seed(2)
    first, second = make(), make()
    train(parts, first, 3)
    second.load_state_dict(first.state_dict())
    train(parts, second, 4)
    pairs = zip(whole.parameters(), parts.parameters(), strict=True)
    assert all(a.equal(b) for a, b in pairs)
