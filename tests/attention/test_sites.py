"""Attention sites: found, selected by a pattern, active in training mode only."""

import tracemalloc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_reg_plugin import AttentionSite, find_sites, recording, regularized_attention
from attn_reg_plugin.attention.selection import SiteSelector, all_sites
from tests.attention import tiny_model
from tests.attention.tiny_model import asked_site, attentions

SITES = [
    *(AttentionSite("encoder", "self", layer) for layer in range(4)),
    *(AttentionSite("decoder", kind, layer) for layer in range(2) for kind in ("self", "cross")),
]
EVERY = [site.name for site in SITES]


def selected(pattern):
    return [site.name for site in SiteSelector(pattern).select(SITES)]


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("*", EVERY),
        ("*.*", EVERY),
        ("encoder", EVERY[:4]),
        ("encoder.self", EVERY[:4]),
        ("encoder.*", EVERY[:4]),
        ("decoder", EVERY[4:]),
        ("*.cross", ["decoder.cross[0]", "decoder.cross[1]"]),
        ("*.self[0]", ["encoder.self[0]", "decoder.self[0]"]),
        ("*[1]", ["encoder.self[1]", "decoder.self[1]", "decoder.cross[1]"]),
        ("encoder.self[0,2-3]", ["encoder.self[0]", "encoder.self[2]", "encoder.self[3]"]),
        ("encoder.self[2-2]", ["encoder.self[2]"]),
        ("encoder.self[3,0]", ["encoder.self[0]", "encoder.self[3]"]),
        ("decoder.cross encoder.self[0]", ["encoder.self[0]", "decoder.cross[0]", "decoder.cross[1]"]),
        ("encoder.self[0] encoder[0-1]", ["encoder.self[0]", "encoder.self[1]"]),
        ("  decoder.cross[1]\n", ["decoder.cross[1]"]),
    ],
)
def test_patterns(pattern, expected):
    assert selected(pattern) == expected


MALFORMED = ["encoders", "self", "encoder.", "encoder.selff", "encoder,decoder", "ENCODER", "encoder.self[0"]
LAYERS = ["", "a", "1-", "-1", "1-2-3", "3-1", "0,3-1", "0,", "0, 1", "٣", "²", f"0-{'9' * 5000}"]
ABSENT = ["encoder.cross", "encoder.self[4]", "encoder.self[0-9]", "* decoder.self[0,2]", "*[3-4]"]


@pytest.mark.parametrize(
    "pattern, said",
    [
        *((pattern, "is not understood; write for example") for pattern in MALFORMED),
        *((f"encoder.self[{layers}]", "is not understood; write for example") for layers in LAYERS),
        *((pattern, "the site pattern is empty; write for example") for pattern in ("", "  ", "\n")),
    ],
)
def test_malformed_patterns_are_refused_before_any_model_is_seen(pattern, said):
    with pytest.raises(ValueError, match=said):
        SiteSelector(pattern)


@pytest.mark.parametrize("pattern", [*ABSENT, "encoder.self[0-999999999]"])
def test_patterns_that_match_nothing_list_what_exists(pattern):
    """A range is compared and never built: the last pattern once took all of the machine's memory."""
    tracemalloc.start()
    with pytest.raises(ValueError) as refused:
        SiteSelector(pattern).select(SITES)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    said = f"site pattern {pattern.split()[-1]!r} matches nothing in this model; its sites are: {' '.join(EVERY)}"
    assert str(refused.value) == said


@pytest.mark.parametrize(
    "place, named",
    [
        (("enc", "self", 0), "stack is 'enc', but must be encoder or decoder"),
        (("encoder", "selfattn", 0), "kind is 'selfattn', but must be self or cross"),
        *(
            (("encoder", "self", layer), f"layer is {layer!r}, but must be a whole number from 0")
            for layer in ("0", -1, True)
        ),
    ],
)
def test_a_site_that_no_pattern_selects_and_a_model_without_sites_are_refused(place, named):
    with pytest.raises(ValueError, match=f"^an AttentionSite's {named}$"):
        AttentionSite(*place)
    with pytest.raises(ValueError, match="no attention site found in Linear; give its attention modules"):
        find_sites(nn.Linear(2, 2))


def test_sites_are_found_in_the_order_of_the_model(translator):
    sites = find_sites(translator, "*")
    assert [site.name for site in sites] == tiny_model.EVERY
    modules = dict(translator.named_modules())
    for site in sites:
        assert modules[site.path] is site.module is attentions(translator)[site.name]
    assert find_sites(translator) == find_sites(translator, "encoder.self") == sites[:2]
    assert all_sites(translator) == sites
    assert len(find_sites(nn.ModuleList([translator, translator]), "*")) == 6, "a module that stands twice is one site"


def test_a_site_acts_in_the_training_mode_of_its_module_only(translator):
    site = find_sites(translator)[0]
    assert not site.active
    site.ask(keep=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    assert site.active
    translator.eval()
    assert not site.active
    translator.train()
    site.clear()
    for name, wanted in (("uniform", bool), ("sampler", lambda *_: None), ("weights_dropout", 0.1)):
        site.ask(**{name: wanted})
        assert site.active
        site.clear()
        assert not site.active
    with recording([site]):
        assert site.active
    assert not site.active


def test_a_mask_of_another_shape_is_refused():
    site = asked_site(layer=1, keep=torch.ones(2, 1, 3, 3, dtype=torch.bool))
    states = torch.randn(2, 1, 4, 2)
    with pytest.raises(RuntimeError) as refused:
        regularized_attention(states, states, states, site=site)
    assert str(refused.value) == (
        "encoder.self[1]: the keep mask is (2, 1, 3, 3), but the attention map is (2, 1, 4, 4); "
        "it was made for other inputs: those of AD-DROP's probe, or the tokens that AttendOut's problem told"
    )


def test_a_sampler_is_given_the_map_and_asked_at_every_call():
    calls = []
    valid = torch.tensor([True, True, False])

    def sampler(call, shape, valid, device):
        calls.append((call.index, shape, valid, device))
        return torch.ones(shape, dtype=torch.bool).triu()

    site = asked_site(sampler=sampler)
    states = torch.randn(2, 1, 3, 2)
    output = regularized_attention(states, states, states, valid=valid, site=site)
    upper = asked_site(keep=torch.ones(2, 1, 3, 3, dtype=torch.bool).triu())
    assert output.equal(regularized_attention(states, states, states, valid=valid, site=upper))
    regularized_attention(states, states, states, valid=valid, site=site)
    assert calls == [(index, (2, 1, 3, 3), valid, torch.device("cpu")) for index in (0, 1)]


def test_recording_clears_before_and_after(translator, batch):
    sites = find_sites(translator, "*")
    sites[0].ask(uniform=lambda call: True)
    with recording(sites):
        assert sites[0].request.uniform is None and not any(site.tapes for site in sites)
        translator(*batch)
        tapes = [tape for site in sites for tape in site.tapes]
        assert len(tapes) == len(sites)
        assert all(tape.output.shape == (3, 2, tape.output.size(2), 4) for tape in tapes)
        assert all(not tape.value.requires_grad for tape in tapes)
        assert tapes[0].valid.equal(batch[0].ne(0)[:, None, None, :])
    assert not any(site.active for site in sites)
    with pytest.raises(ZeroDivisionError), recording(sites, needs_weights=True):
        translator(*batch)
        raise ZeroDivisionError
    assert not any(site.active or site.tapes for site in sites)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_tape_keeps_its_first_run(checkpointed):
    """Activation checkpointing runs a call a second time, to recompute; another call has a tape of its own."""
    recorded = AttentionSite("encoder", "self", 0)
    states = torch.randn(1, 1, 3, 2, requires_grad=True)

    def attend(given):
        return regularized_attention(given, given, given, site=recorded).square()

    with recording([recorded]):
        if checkpointed:
            checkpoint(attend, states, use_reentrant=False).sum().backward()
            (tape,) = recorded.tapes
            tape_before = regularized_attention(states, states, states)
        else:
            tape_before = regularized_attention(states, states, states, site=recorded)
            regularized_attention(2 * states, 2 * states, 2 * states, site=recorded)
            tape, other = recorded.tapes
            assert tape.output is tape_before and other.value.equal(2 * states)
        assert tape.output.equal(tape_before) and tape.value.equal(states)
