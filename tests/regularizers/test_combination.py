"""Methods that act together do what each does alone; those that cannot are refused before anything is touched."""

from __future__ import annotations

import pytest
import torch

from attn_reg_plugin import ADDrop, ScheduledDropout
from attn_reg_plugin.regularizers import Combination, build
from tests.attention.tiny_model import PAD, attentions, loss_of, same_step, training_step

pytestmark = pytest.mark.usefixtures("one_thread")
ALWAYS = {"cross_tuning": "off", "p": 0.4, "q": 1.0}


@pytest.mark.parametrize("name", ["ad_drop+r_drop", "r_drop+ad_drop"])
def test_ad_drop_masks_both_passes(name, translator, batch):
    """No dropout but AD-DROP's, and every candidate is dropped: both passes are AD-DROP's forward."""
    alone = ADDrop(**ALWAYS, sites="*")
    with alone.attach(translator):
        expected = loss_of(translator(*batch), batch[1])
        masks = [site.keep for site in alone.attached_sites]
    together = build(name, ad_drop={**ALWAYS, "sites": "*"})
    with together.attach(translator):
        loss = together.loss(lambda b: loss_of(translator(*b), b[1]), batch)
        for site, mask in zip(together.attached_sites, masks, strict=True):
            assert site.keep.equal(torch.cat([mask, mask]))
    assert loss.item() == pytest.approx(2 * expected.item(), rel=1e-5)
    assert together.name == name and together.quantities and together.statistics.take()["r_drop_items"] == 15


def test_what_is_supplied_is_repeated_for_all_parts(dropping_translator, batch):
    together = build("ad_drop+r_drop", ad_drop={**ALWAYS, "labels": "gold"})
    with together.attach(dropping_translator):
        together.supply(targets=batch[1].masked_fill(batch[1] == PAD, -100))
        together.loss(lambda b: loss_of(dropping_translator(*b), b[1]), batch).backward()
        assert all(part.supplied is together.supplied for part in together.parts)
    assert together.statistics.take()["r_drop_items"] == batch[1].ne(PAD).sum()


def test_the_probe_comes_before_what_is_drawn(translator, batch):
    together = build("layer_drop+head_drop+ad_drop", ad_drop=ALWAYS)
    with together.attach(translator):
        for _ in range(2):
            loss_of(translator(*batch), batch[1]).backward()
            together.end_update()
    assert [part.name for part in together.parts] == ["ad_drop", "layer_drop", "head_drop"]
    sums = together.statistics.take()
    assert sums["regularized"] == sums["forwards"] == 6
    assert together.updates == 2 and all(part.updates == 2 for part in together.parts)


def test_two_mask_methods_on_sites_of_their_own(translator, batch):
    together = Combination(
        [ADDrop(**ALWAYS, sites="encoder.self"), ScheduledDropout(schedule="drop *: 0:0.5", sites="decoder.self")]
    )
    with together.attach(translator):
        translator(*batch)
        assert len(together.attached_sites) == 4
    sums = together.statistics.take()
    assert {key for key in sums if key.startswith("dropped/")} == {
        f"dropped/{stack}.self[{layer}]" for stack in ("encoder", "decoder") for layer in range(2)
    }


def test_with_nothing_to_do_it_is_plain_training(dropping_translator, batch):
    plain = training_step(dropping_translator, batch)
    options = {"ad_drop": {"p": 0.0, "cross_tuning": "off"}, "r_drop": {"weight": 0.0}, "head_drop": {"p": 0.0}}
    together = build("ad_drop+r_drop+head_drop", **options)
    with together.attach(dropping_translator):
        assert same_step(training_step(dropping_translator, batch), plain)


@pytest.mark.parametrize(
    "name, options, said",
    [
        (
            "ad_drop+scheduled_dropout",
            {"scheduled_dropout": {"schedule": "drop *: 0:0.5", "sites": "*"}},
            "ad_drop and scheduled_dropout both choose which positions are attended, at 'encoder.self' and '\\*'; give",
        ),
        ("attention_dropout+ad_drop", {"attention_dropout": {"where": "scores"}}, "both choose which positions are"),
        ("hidden_cut+attention_layer_drop", {}, "both need the attention map, to read it or to put another in its"),
        ("r_drop+hidden_cut", {}, "r_drop and hidden_cut each run the batch several times"),
        ("attend_out+r_drop", {}, "attend_out combines with no other method: it trains two copies of the model"),
        ("head_drop+head_drop", {}, "names head_drop twice"),
        ("head_drop+nothing", {}, "unknown method 'nothing'; the methods are: "),
        ("head_drop+r_drop", {"ad_drop": {}}, r"options of 'ad_drop', which is not among head_drop\+r_drop"),
        ("head_drop+r_drop", {"head_drop": {"p": 2.0}}, r"p is 2.0, but must lie in \[0, 1\]"),
    ],
)
def test_what_cannot_act_together_is_refused(name, options, said):
    with pytest.raises(ValueError, match=said):
        build(name, **options)


def test_a_site_that_another_regularizer_has_is_refused(translator, batch):
    together, before = build("ad_drop+head_drop", head_drop={"sites": "*"}), translator.eval()(*batch)
    with ADDrop(sites="decoder.self").attach(translator):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"decoder.self\[0\] is regularized already"):
                together.attach(translator)
        assert [name for name, a in attentions(translator).items() if a.site.attached] == [
            "decoder.self[0]",
            "decoder.self[1]",
        ]
    assert translator(*batch).equal(before) and not translator._forward_pre_hooks


def test_its_state_has_that_of_each():
    first, second = (build("head_drop+r_drop+ad_drop") for _ in range(2))
    first.begin_epoch(3)
    state = first.state_dict()
    state["parts"]["ad_drop"]["epoch"] = 17
    second.load_state_dict({**state, "updates": 4})
    assert (second.epoch, second.updates) == (3, 4) and not second.large_state
    assert next(part for part in second.parts if part.name == "ad_drop").epoch == 17
    del state["parts"]["head_drop"]
    with pytest.raises(ValueError, match=r"the state isn't one of head_drop\+r_drop\+ad_drop: it lacks that of head"):
        second.load_state_dict(state)
    with pytest.raises(ValueError, match="the state is one of ad_drop, but must be one of head_drop"):
        second.load_state_dict(ADDrop().state_dict())
