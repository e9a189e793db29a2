"""AD-DROP in a training step under autocast: what is ranked, and what its passes leave to the training itself."""

from __future__ import annotations

import pytest
import torch

from attn_reg_plugin import ADDrop
from attn_reg_plugin.attention.attribution import map_gradient
from attn_reg_plugin.attention.calls import without_gradients
from tests.attention.tiny_model import tokens

ATTRIBUTIONS = ["gradient", "integrated", "attention", "random"]


def test_a_bfloat16_probe_within_fp16_autocast_leaves_no_casts(classifier):
    """What either casts of the weights is of no use to the other."""
    seen = []
    regularizer = ADDrop(
        cross_tuning="off", probe_dtype="bfloat16", objective=lambda o, i: seen.append(o.dtype) or o.float().sum()
    )
    with regularizer.attach(classifier), torch.autocast("cpu", torch.float16):
        for _ in range(2):
            seen.append(classifier(tokens([5, 3, 2], 5)).dtype)
    assert seen == [torch.bfloat16, torch.float16] * 2


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
def test_under_autocast_every_parameter_has_its_gradient(classifier, attribution, monkeypatch):
    """A pass without gradients leaves no casts without a graph to the training's own forward: earlier versions of torch
    would take them."""
    cleared, clear = [], torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (cleared.append(torch.is_grad_enabled()), clear()))
    with ADDrop(cross_tuning="off", attribution=attribution).attach(classifier), torch.autocast("cpu", torch.bfloat16):
        loss = classifier(tokens([5, 3, 2], 5)).float().square().sum()
        # autocast itself clears it once, at its end
        assert cleared == ([True] if attribution in ("integrated", "attention") else [])
    loss.backward()
    assert all(parameter.grad is not None for parameter in classifier.parameters())
    with pytest.raises(KeyError), without_gradients():
        raise KeyError
    assert cleared[-1]


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_attributions_are_fp32_under_autocast(grad):
    """The probe's hook runs where the caller's autocast is on."""
    torch.manual_seed(0)
    gradient, value = torch.randn(2, 3, 5, 4).to(grad), torch.randn(2, 3, 6, 4).to(grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attribution = map_gradient(gradient, value)
    assert attribution.dtype == torch.float32
    assert attribution.equal(gradient.float() @ value.float().transpose(-1, -2))


def test_the_fresh_probe_under_autocast_ranks_fp32_attributions(classifier, monkeypatch):
    from attn_reg_plugin.regularizers.ad_drop import ad_drop

    seen, draw = [], ad_drop.sample_keep
    monkeypatch.setattr(ad_drop, "sample_keep", lambda a, *rest, **more: (seen.append(a), draw(a, *rest, **more))[1])
    with ADDrop(sites="*", cross_tuning="off").attach(classifier), torch.autocast("cpu", dtype=torch.bfloat16):
        classifier(tokens([5, 3, 2], 5))
    assert len(seen) == 2
    for attribution in seen:
        assert attribution.dtype == torch.float32 and not attribution.equal(attribution.bfloat16().float())
