"""Attention dropout: weights against their formula and the model's own dropout, scores against theirs, p by site."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.attention_dropout import AttentionDropout
from attn_reg_plugin.regularizers.base.options import OptionError
from tests.attention.tiny_model import PAD, attentions, drawn

BY_SITE = "encoder.self[1]: 0; decoder.cross: 0.5"


def literally(model, attend):
    """A copy of `model` in which `attend(name, weights, valid)` makes the map that multiplies the values."""
    literal = copy.deepcopy(model)

    def run(name, query, key, value, valid, dropout_p):
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
        return attend(name, scores, valid) @ value

    for module in attentions(literal).values():
        module.attend = run
    return literal


def test_weights_are_dropped_after_the_softmax_and_rescaled(translator, batch):
    p = {"encoder.self[0]": 0.3, "encoder.self[1]": 0.0, "decoder.self[0]": 0.3, "decoder.self[1]": 0.3}
    p |= {"decoder.cross[0]": 0.5, "decoder.cross[1]": 0.5}

    def attend(name, scores, valid):
        weights = scores.masked_fill(~valid, -math.inf).softmax(-1)
        if p[name] == 0:
            return weights
        mask = F.dropout(torch.ones_like(weights), p[name]) > 0  # the kernel's draws
        return weights * mask / (1 - p[name])

    real, outputs = batch[1].ne(PAD), []
    for model in (translator, literally(translator, attend)):
        with AttentionDropout(p=0.3, sites="*", p_by_site=BY_SITE if model is translator else "*: 0").attach(model):
            torch.manual_seed(6)
            outputs.append(model(*batch)[real])
    torch.testing.assert_close(*outputs)


def test_scores_are_dropped_before_the_softmax(translator, batch):
    """Equation 3 of AttendOut: softmax(QKᵀ/√d + M), M = -∞ where a position is dropped."""
    regularizer, keeps = AttentionDropout(p=0.4, where="scores", sites="*", p_by_site=BY_SITE), {}
    torch.manual_seed(6)
    with regularizer.attach(translator):
        output = translator(*batch)
        samplers = {site.name: site.request.sampler for site in regularizer.attached_sites}

    def attend(name, scores, valid):
        keep = valid.expand(scores.shape)
        if samplers[name] is not None:
            keep = keeps[name] = drawn(samplers[name], scores.shape, valid)
        dead = ~keep.any(-1, keepdim=True)
        return scores.masked_fill(dead, 0).masked_fill(~(keep | dead & valid), -math.inf).softmax(-1)

    real = batch[1].ne(PAD)
    torch.testing.assert_close(output[real], literally(translator, attend)(*batch)[real])
    assert "encoder.self[1]" not in keeps and len(keeps) == 5
    assert any(not keep[:, 0].equal(keep[:, 1]) for keep in keeps.values()), "each head has its own"


def test_weights_dropout_adds_to_the_models_own(translator, batch):
    """Two independent dropouts are one: 1 - (1 - 0.2) (1 - 0.25) = 0.4, drawn as the model would draw it."""
    outputs = []
    for own, added in ((0.4, 0.0), (0.2, 0.25), (0.0, 0.4)):
        for module in attentions(translator).values():
            module.dropout.p = own
        with AttentionDropout(p=added, sites="*").attach(translator):
            torch.manual_seed(3)
            outputs.append(translator(*batch))
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])


@pytest.mark.parametrize(
    "options, said",
    [
        ({"p": 1.0}, "p is 1, but must be below 1 where weights are dropped"),
        ({"p_by_site": "encoder.self: 1"}, "p is 1, but must be below 1 where weights are dropped"),
        ({"p_by_site": "encoder.self"}, "p_by_site entry 'encoder.self' is not understood; write for example"),
        ({"p_by_site": "encoder.self: x"}, "p_by_site entry 'encoder.self: x' is not understood"),
        ({"p_by_site": "encoder.self: 1.5"}, r"p_by_site entry 'encoder.self: 1.5': p is 1.5, but must lie in \[0, 1"),
        ({"p_by_site": "nowhere: 0.5"}, "site pattern 'nowhere' is not understood"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        build("attention_dropout", **options)
    if options.get("p") == 1.0:
        assert build("attention_dropout", where="scores", **options).p == 1.0


def test_an_entry_that_fits_no_site_is_refused_and_nothing_stays(classifier):
    regularizer = AttentionDropout(p_by_site="decoder.self: 0.5")
    with pytest.raises(OptionError, match=r"^site pattern 'decoder.self' matches nothing in this model"):
        regularizer.attach(classifier)
    assert not classifier._forward_pre_hooks and regularizer.attached_sites == []
