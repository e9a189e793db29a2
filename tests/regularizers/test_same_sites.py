"""Methods that act on the same attention: each does what it does alone, and the output is what both say."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from attn_reg_plugin import ADDrop, AttentionLayerDrop, ScheduledDropout
from attn_reg_plugin.attention.sites import SiteSelector
from attn_reg_plugin.regularizers import Combination, Regularizer, build
from attn_reg_plugin.regularizers.base.repeated_batch import repeated
from attn_reg_plugin.regularizers.base.statistics import summary
from tests.attention.literal import loop_attention
from tests.attention.tiny_model import PAD, assert_recomputed, attentions, drawn, loss_of, same_step

pytestmark = pytest.mark.usefixtures("one_thread")
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


def step(model, batch, regularizer, seed=4, look=lambda masks: None):
    """Loss, gradients and random state of a training step; `look` is given the masks."""
    model.zero_grad()
    with regularizer.attach(model):
        torch.manual_seed(seed)
        loss = regularizer.loss(lambda b: loss_of(model(*b), b[1]), batch)
        loss.backward()
        look([site.keep for site in regularizer.attached_sites])
    return loss.detach(), [parameter.grad for parameter in model.parameters()], torch.get_rng_state()


def masks_alone(model, batch, passes=1, seed=4):
    with ADDrop(**AD_DROP, sites=SITES).attach(model) as alone:
        torch.manual_seed(seed)
        model(*repeated(batch, passes))
        return [site.keep for site in alone.attached_sites]


@pytest.mark.parametrize("other", OTHERS)
def test_the_probe_sees_nothing_of_the_other(other, dropping_translator, batch):
    """From the same random numbers AD-DROP draws the masks that it draws alone, whoever is named first."""
    for names in (("ad_drop", other), (other, "ad_drop")):
        both, seen = together(*names, ad_drop=AD_DROP, **{other: OTHERS[other][0]}), []
        expected = masks_alone(dropping_translator, batch, both.passes)
        step(dropping_translator, batch, both, look=seen.extend)
        assert len(seen) == 4 and all(ours.equal(theirs) for ours, theirs in zip(seen, expected, strict=True))


@pytest.mark.parametrize("other", OTHERS)
def test_with_nothing_to_do_for_one_it_is_the_other_bit_for_bit(other, dropping_translator, batch):
    on, off = OTHERS[other]
    for ours, theirs, alone in (
        (AD_DROP, off, build("ad_drop", **AD_DROP, sites=SITES)),
        ({"p": 0.0, "cross_tuning": "off"}, on, build(other, **on, sites=SITES)),
    ):
        both = together("ad_drop", other, ad_drop=ours, **{other: theirs})
        expected = step(dropping_translator, batch, alone)
        assert same_step(step(dropping_translator, batch, both), expected)


def test_the_output_is_the_literal_product(translator, batch):
    """AD-DROP's softmax, or a uniform row, times DropHead's factor; each as it is alone."""
    literal, alone = copy.deepcopy(translator), masks_alone(translator, batch)
    names = ("head_drop", "ad_drop", "attention_layer_drop")
    both = together(*names, ad_drop=AD_DROP, head_drop={"p": 0.5}, attention_layer_drop={"p": 0.5})
    parts = {part.name: part for part in both.parts}
    states, draw = {}, {name: parts[name].before_forward for name in names[::2]}
    for name, act in draw.items():
        parts[name].before_forward = lambda forward, name=name, act=act: (
            states.update({name: torch.get_rng_state()}),
            act(forward),
        )
    with both.attach(translator):
        torch.manual_seed(4)
        output = translator(*batch)
        assert all(site.attached == 3 for site in both.attached_sites)
        keep = {site.name: site.keep for site in both.attached_sites}
        uniform = {site.name: site.calls.made[0].uniform for site in both.attached_sites}
        factor = {site.name: site.request.factor for site in both.attached_sites}
    assert [keep[name].equal(mask) for name, mask in zip(keep, alone, strict=True)] == [True] * 4
    for name, options in (("head_drop", {"p": 0.5}), ("attention_layer_drop", {"p": 0.5})):
        with build(name, **options, sites=SITES).attach(translator) as single:
            torch.set_rng_state(states[name])
            translator(*batch)
            for site in single.attached_sites:
                if name == "head_drop":
                    shape = (3, 2, 5, 5) if site.stack == "decoder" else (3, 2, 6, 6)
                    assert drawn(site.request.factor, shape).equal(drawn(factor[site.name], shape))
                else:
                    assert site.calls.made[0].uniform == uniform[site.name]
    assert len(set(uniform.values())) == 2

    def attend(name, query, key, value, valid, dropout_p):
        if name not in keep:
            return loop_attention(query, key, value, valid=valid)
        mask = torch.zeros_like(keep[name]) if uniform[name] else keep[name]
        rows = loop_attention(query, key, value, valid=valid, keep=mask)
        return rows * drawn(factor[name], (*query.shape[:-1], key.size(-2)), valid)

    for module in attentions(literal).values():
        module.attend = attend
    with torch.no_grad():
        torch.testing.assert_close(output[batch[1].ne(PAD)], literal(*batch)[batch[1].ne(PAD)])


@pytest.mark.parametrize("attribution", ["gradient", "random"])
def test_activation_checkpointing_repeats_all_of_them(attribution, dropping_translator, batch):
    names = ("ad_drop", "head_drop", "attention_dropout", "layer_drop", "attention_layer_drop")
    options = {name: {"p": 0.3} for name in names[1:]} | {"ad_drop": {**AD_DROP, "attribution": attribution}}
    assert_recomputed(dropping_translator, batch, 2, lambda model: together(*names, **options).attach(model))


def test_evaluation_is_untouched_and_nothing_stays(dropping_translator, batch):
    model = dropping_translator
    expected = model.eval()(*batch)
    both = together("ad_drop", *list(OTHERS)[:4], ad_drop=AD_DROP)
    with both.attach(model.train()):
        model(*batch)
        assert model.eval()(*batch).equal(expected)
        with torch.no_grad():
            assert model(*batch).equal(expected)
    assert not any(module.site.attached or module.site.active for module in attentions(model).values())
    assert not model._forward_pre_hooks and model(*batch).equal(expected)


def test_a_copy_of_the_model_has_all_of_them(translator, batch):
    together_ = together("ad_drop", *list(OTHERS)[:4], ad_drop=AD_DROP)
    with together_.attach(translator):
        translator(*batch)
        outputs = []
        for model in (translator, copy.deepcopy(translator), pickle.loads(pickle.dumps(translator))):
            torch.manual_seed(6)
            outputs.append(model(*batch))
        counted = together_.statistics.take()
    assert outputs[1].equal(outputs[0]) and outputs[2].equal(outputs[0]) and counted["forwards"] == 10
    torch.manual_seed(6)
    assert not translator(*batch).allclose(outputs[0])


def test_hidden_cut_looks_at_the_map_that_is_left(translator, batch):
    """AD-DROP drops everything: every row is uniform over its keys, so all tokens get the same but for the future."""
    both = together("ad_drop", "hidden_cut", ad_drop={"p": 1.0, "q": 1.0, "cross_tuning": "off"})
    shown = []
    with both.attach(translator):
        cut = next(part for part in both.parts if part.name == "hidden_cut")
        act = cut.before_forward

        def before_forward(forward):
            act(forward)
            site = cut.attached_sites[0]
            look = site.request.look
            site.ask(look=lambda call, weights, valid: (shown.append(weights), look(call, weights, valid)))

        cut.before_forward = before_forward
        both.loss(lambda b: loss_of(translator(*b), b[1]), batch)
    expected = batch[0].ne(PAD) / batch[0].ne(PAD).sum(-1, keepdim=True)
    torch.testing.assert_close(shown[0], expected.repeat(2, 1)[:, None, None, :].expand(6, 2, 6, 6))


# -- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["ad_drop", "scheduled_dropout"])
def test_each_has_drop_rates_of_its_own(first, translator, batch):
    options = {"ad_drop": AD_DROP, "scheduled_dropout": {"schedule": "drop *: 0:0.5"}, "head_drop": {"p": 0.6}}
    both = together(first, "head_drop", **options)
    sums = {}
    for regularizer in (both, build(first, sites=SITES, **options[first]), build("head_drop", sites=SITES, p=0.6)):
        with regularizer.attach(translator):
            names = [quantity.title for quantity in regularizer.quantities if "_decoder.self[1]" in quantity.title]
            torch.manual_seed(4)
            translator(*batch)
        sums[regularizer.name] = regularizer.statistics.take()
    assert names == ["drop_decoder.self[1]"]
    with both.attach(translator):
        assert [quantity.title for quantity in both.quantities][-4:] == [
            f"head_drop_{stack}.self[{layer}]" for stack in ("encoder", "decoder") for layer in range(2)
        ]
    ours, masks, heads = sums.values()
    site = "encoder.self[0]"
    assert float(ours[f"dropped/{site}"]) == float(masks[f"dropped/{site}"]) > 0
    assert float(ours[f"valid/head_drop/{site}"]) == float(heads[f"valid/{site}"]) == 6, "once"
    assert 0 < float(ours[f"dropped/head_drop/{site}"]) < 6


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
        torch.manual_seed(4)
        torch.rand(1)  # what the other one draws
        torch.manual_seed(4)
        act = beside.before_forward
        beside.before_forward = lambda forward: (act(forward), torch.manual_seed(4))
        translator(*batch)
        assert all(site.keep.equal(mask) for site, mask in zip(ours.attached_sites, expected, strict=True))
        assert all(site.calls.made[0].uniform for site in beside.attached_sites)
    said = r"encoder.self\[0\] is regularized already; detach that regularizer first"
    with ours.attach(translator), pytest.raises(ValueError, match=said):
        build("head_drop").attach(translator)


# -- what is refused --------------------------------------------------------------------------------------------------


class Untold(Regularizer):
    """A method that does not say what it uses."""

    name = "untold"


def test_refusals_give_the_reason(translator):
    scheduled = ScheduledDropout(schedule="drop *: 0:0.5", sites="*.self")
    clashing = Combination([ADDrop(sites="encoder"), scheduled])  # no pattern is sure to be in the other
    for _ in range(2):
        with pytest.raises(ValueError) as refused:
            clashing.attach(translator)
        assert str(refused.value) == (
            "ad_drop and scheduled_dropout both choose which positions are attended, at encoder.self[0]; give them "
            "sites of their own"
        )
    assert not any(module.site.attached for module in attentions(translator).values())
    with pytest.raises(ValueError, match="the same attention, of which untold doesn't say in `uses` what it fills"):
        Combination([ADDrop(), Untold()])
    Combination([ADDrop(), Untold(sites="decoder")])


@pytest.mark.parametrize(
    ("first", "second", "sure"),
    [
        ("encoder.self", "*", True),
        ("decoder.cross encoder.self[1]", "encoder", True),
        ("encoder.self[0-2]", "encoder.self[2-5]", True),
        ("encoder.self[0-1]", "encoder.self[2-5]", False),
        ("encoder.self[0]", "*.self[0]", True),
        ("encoder", "*.self", False),
        ("encoder.self", "decoder", False),
        ("encoder.self@vision", "encoder.self", True),
        ("encoder.self@vision", "encoder.self@text", False),
        ("*[1]", "encoder.self", False),
    ],
)
def test_patterns_that_are_sure_to_meet(first, second, sure):
    assert SiteSelector(first).meets(SiteSelector(second)) is sure
    assert SiteSelector(second).meets(SiteSelector(first)) is sure
