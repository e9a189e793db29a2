"""Attention dropout: weights against their formula and the model's own dropout, scores against theirs, p by site."""

from __future__ import annotations

import pytest
import torch

from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.attention_dropout import AttentionDropout
from attn_reg_plugin.regularizers.base.options import OptionError
from tests.attention.tiny_model import attentions

BY_SITE = "encoder.self[1]: 0; decoder.cross: 0.5"


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
