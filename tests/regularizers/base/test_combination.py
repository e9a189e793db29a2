"""Methods that act together do what each does alone; those that cannot are refused before anything is touched."""

import copy

import pytest
import torch

from attn_reg_plugin import ADDrop, AttentionLayerDrop
from attn_reg_plugin.callbacks import logged
from attn_reg_plugin.regularizers import Combination, Regularizer, build
from attn_reg_plugin.regularizers.base.repeated_batch import repeated
from attn_reg_plugin.regularizers.base.statistics import summary
from attn_reg_plugin.regularizers.hidden_cut import Spans
from tests.attention.tiny_model import PAD, attentions, loss_of
from tests.regularizers.trainings import equal, step

ALWAYS = {"cross_tuning": "off", "p": 0.4, "q": 1.0}


@pytest.mark.parametrize("name", ["ad_drop+r_drop", "r_drop+ad_drop"])
def test_ad_drop_masks_both_passes(name, translator, batch):
    """No dropout but AD-DROP's, and every candidate is dropped: both passes are AD-DROP's forward."""
    targets = batch[1].masked_fill(batch[1] == PAD, -100)
    alone, both = ADDrop(**ALWAYS, sites="*", labels="gold"), {**ALWAYS, "sites": "*", "labels": "gold"}
    with alone.attach(translator):
        alone.supply(targets=targets)
        expected = loss_of(translator(*batch), batch[1])
        masks = [site.keep for site in alone.attached_sites]
    with build(name, ad_drop=both).attach(translator) as together:
        together.supply(targets=targets)
        loss = together.loss(lambda b: loss_of(translator(*b), b[1]), batch)
        assert all(part.supplied is together.supplied for part in together.parts)
        for site, mask in zip(together.attached_sites, masks, strict=True):
            assert site.keep.equal(torch.cat([mask, mask]))
    assert loss.item() == pytest.approx(2 * expected.item(), rel=1e-5)
    assert together.name == name and together.quantities
    assert together.statistics.take()["r_drop_items"] == batch[1].ne(PAD).sum()


def test_a_method_goes_on_alone_after_it(translator, batch):
    method = build("head_drop", p=0.5)
    Combination([method, ADDrop()])
    for _ in range(2):
        model = copy.deepcopy(translator)
        with method.attach(model):
            loss_of(model(*batch), batch[1]).backward()
            method.end_update()
    assert method.updates == 1, "another model begins anew"


def test_its_state_has_that_of_each():
    first, second = (build("head_drop+r_drop+ad_drop") for _ in range(2))
    first.begin_epoch(3)
    state = first.state_dict()
    state["parts"]["ad_drop"]["epoch"] = 17
    second.load_state_dict({**state, "updates": 4})
    second.begin_training(updates=5)
    assert (second.epoch, second.updates) == (3, 4) and not second.large_state
    assert next(part for part in second.parts if part.name == "ad_drop").epoch == 17
    del state["parts"]["head_drop"]
    with pytest.raises(ValueError, match=r"the state isn't one of head_drop\+r_drop\+ad_drop: it lacks that of head"):
        second.load_state_dict(state)
    with pytest.raises(ValueError, match="the state is one of ad_drop, but must be one of head_drop"):
        second.load_state_dict(ADDrop().state_dict())


SITES = "encoder.self decoder.self"
AD_DROP = {"p": 0.4, "q": 0.5, "cross_tuning": "off"}
#: what acts beside AD-DROP on its sites: with something to do, and with nothing
OTHERS = {
    "head_drop": ({"p": 0.6}, {"p": 0.0}),
    "attention_dropout": ({"p": 0.4}, {"p": 0.0}),
    "layer_drop": ({"p": 0.5}, {"p": 0.0}),
    "attention_layer_drop": ({"p": 0.5}, {"p": 0.0}),
    "hidden_cut": ({"cut": 0.4}, {"cut": 0.0}),
}


def together(*names, **options):
    return build("+".join(names), **{name: {"sites": SITES, **options.get(name, {})} for name in names})


def masks_alone(model, batch, passes=1):
    with ADDrop(**AD_DROP, sites=SITES).attach(model) as alone:
        torch.manual_seed(1)
        model(*(repeated(batch) if passes > 1 else batch))
        return [site.keep for site in alone.attached_sites]


@pytest.mark.parametrize("other", OTHERS)
def test_the_probe_sees_nothing_of_the_other(other, dropping_translator, batch):
    """From the same random numbers AD-DROP draws the masks that it draws alone, whoever is named first."""
    for names in (("ad_drop", other), (other, "ad_drop")):
        both = together(*names, ad_drop=AD_DROP, **{other: OTHERS[other][0]})
        expected = masks_alone(dropping_translator, batch, both.passes)
        with both.attach(dropping_translator):
            step(dropping_translator, both, batch=batch)
            seen = [site.keep for site in both.attached_sites]
        assert len(seen) == 4 and all(ours.equal(theirs) for ours, theirs in zip(seen, expected, strict=True))


@pytest.mark.parametrize("other", OTHERS)
def test_with_nothing_to_do_for_one_it_is_the_other_bit_for_bit(other, dropping_translator, batch):
    on, off = OTHERS[other]
    for ours, theirs, alone in (
        (AD_DROP, off, build("ad_drop", **AD_DROP, sites=SITES)),
        ({"p": 0.0, "cross_tuning": "off"}, on, build(other, **on, sites=SITES)),
    ):
        found = []
        for regularizer in (together("ad_drop", other, ad_drop=ours, **{other: theirs}), alone):
            with regularizer.attach(dropping_translator):
                found.append(step(dropping_translator, regularizer, batch=batch))
        assert equal(*found)


def test_hidden_cut_looks_at_the_map_that_is_left(translator, batch, monkeypatch):
    """AD-DROP drops everything: every row is uniform over its keys, so all tokens get the same but for the future."""
    both, shown = together("ad_drop", "hidden_cut", ad_drop={"p": 1.0, "q": 1.0, "cross_tuning": "off"}), []
    look = Spans.__call__
    monkeypatch.setattr(Spans, "__call__", lambda *given: (shown.append(given[2]), look(*given)))
    with both.attach(translator):
        both.loss(lambda b: loss_of(translator(*b), b[1]), batch)
    expected = batch[0].ne(PAD) / batch[0].ne(PAD).sum(-1, keepdim=True)
    torch.testing.assert_close(shown[0], expected.repeat(2, 1)[:, None, None, :].expand(6, 2, 6, 6))


def test_a_log_has_the_mean_rate_of_each(translator, batch):
    both = together("ad_drop", "head_drop", ad_drop=AD_DROP, head_drop={"p": 0.6})
    with both.attach(translator):
        translator(*batch)
        found = logged(both, torch.device("cpu"), by_site=False)
    rates = {name for name, value in found.items() if name.endswith("_rate") and 0 < value < 1}
    assert rates == {"attn_reg/drop_rate", "attn_reg/head_drop_rate"}


@pytest.mark.parametrize("first", ["ad_drop", "scheduled_dropout"])
def test_each_has_drop_rates_of_its_own(first, translator, batch):
    options = {"ad_drop": AD_DROP, "scheduled_dropout": {"schedule": "drop *: 0:0.5"}, "head_drop": {"p": 0.6}}
    both, alone = together(first, "head_drop", **options), build(first, sites=SITES, **options[first])
    sums = []
    for regularizer in (both, alone):
        with regularizer.attach(translator):
            titles = [quantity.title for quantity in regularizer.quantities if ".self[" in quantity.title]
            torch.manual_seed(4)
            translator(*batch)
        sums.append(regularizer.statistics.take())
        if regularizer is both:
            heads = [f"head_drop_{stack}.self[{layer}]" for stack in ("encoder", "decoder") for layer in range(2)]
            assert titles == [*(name.removeprefix("head_") for name in heads), *heads]
    ours, masks = sums
    site = "encoder.self[0]"
    assert float(ours[f"dropped/{site}"]) == float(masks[f"dropped/{site}"]) > 0
    assert float(ours[f"valid/head_drop/{site}"]) == 6 and 0 < float(ours[f"dropped/head_drop/{site}"]) < 6, "once"


def test_a_method_that_counts_no_drops_leaves_the_name_to_the_next(translator, batch):
    both = together("hidden_cut", "scheduled_dropout", scheduled_dropout={"schedule": "drop *: 0:0.5"})
    with both.attach(translator):
        both.loss(lambda b: loss_of(translator(*b), b[1]), batch)
        shown = summary(both.quantities, both.statistics.take())
    rates = {name: value for name, (value, _) in shown.items() if ".self[" in name}
    assert list(rates) == [f"drop_{stack}.self[{layer}]" for stack in ("encoder", "decoder") for layer in range(2)]
    assert all(0.3 < rate < 0.7 for rate in rates.values()) and "tokens_cut" in shown


def test_a_rehearsal_neither_counts_nor_erases_the_others(translator, batch):
    """Scheduled dropout begins later, and tries in the first forward what it will do."""
    both = together("head_drop", "scheduled_dropout", scheduled_dropout={"schedule": "drop *: 0:0 5:0 6:0.5"})
    with both.attach(translator):
        translator(*batch)
        assert all(site.request.factor is not None and site.keep is None for site in both.attached_sites)
    assert both.statistics.take()["valid/encoder.self[0]"] == 6


def test_a_probe_sees_nothing_of_who_is_attached_beside_it(translator, batch):
    """On sites of its own, and before it."""
    expected = masks_alone(translator, batch)
    beside, ours = AttentionLayerDrop(p=1.0, sites="decoder.cross"), ADDrop(**AD_DROP, sites=SITES)
    with beside.attach(translator), ours.attach(translator):
        act = beside.before_forward
        beside.before_forward = lambda forward: (act(forward), torch.manual_seed(1))  # as if it drew nothing
        translator(*batch)
        assert all(site.keep.equal(mask) for site, mask in zip(ours.attached_sites, expected, strict=True))
        assert all(site.calls.made[0].uniform for site in beside.attached_sites)


def test_a_method_of_a_part_does_not_act_in_a_probe_of_the_whole(translator, batch):
    """No mask of the part is in the probe, also none of the batch before; only the part's own forwards count."""
    expected = masks_alone(translator, batch)
    part, ours = AttentionLayerDrop(p=1.0, sites="decoder.cross"), ADDrop(**AD_DROP, sites=SITES)
    with part.attach(translator.decoder), ours.attach(translator):
        for _ in range(2):
            act = ours.before_forward
            ours.before_forward = lambda forward, act=act: (torch.manual_seed(1), act(forward))
            translator(*batch)
            assert all(site.keep.equal(mask) for site, mask in zip(ours.attached_sites, expected, strict=True))
            assert all(site.calls.made[0].uniform for site in part.attached_sites)
        assert part.statistics.take()["forwards"] == 2


@pytest.mark.parametrize(
    "name, options, said",
    [
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


class Untold(Regularizer):
    """A method that does not say what it uses."""

    name = "untold"


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            ADDrop(sites="encoder"),
            build("scheduled_dropout", schedule="drop *: 0:0.5", sites="*.self"),
            "ad_drop and scheduled_dropout both choose which positions are attended",
        ),
        (
            build("attention_dropout", where="scores"),
            ADDrop(),
            "ad_drop and attention_dropout both choose which positions are attended",
        ),
        (
            build("hidden_cut"),
            AttentionLayerDrop(),
            "hidden_cut and attention_layer_drop both need the attention map, to read it or to put another in its "
            "place",
        ),
        (
            ADDrop(),
            Untold(),
            "ad_drop and untold would act on the same attention, of which untold doesn't say in `uses` what it fills",
        ),
    ],
)
def test_methods_that_ask_the_same_of_a_site_are_refused(first, second, reason, translator):
    together = Combination([first, second])
    for _ in range(2):
        with pytest.raises(ValueError) as refused:
            together.attach(translator)
        assert str(refused.value) == f"{reason}, at encoder.self[0]; give them sites of their own"
    assert not any(module.site.attached for module in attentions(translator).values())
    second.sites = "decoder.cross"
    if first.name != "hidden_cut":
        with Combination([first, second]).attach(translator):
            assert not set(first.attached_sites) & set(second.attached_sites)
