"""Gradient attribution against autograd on materialized attention maps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin import find_sites, gradient_attribution, recording
from attn_reg_plugin.attention.attribution import map_gradient, output_gradients
from tests.attention.materialized import Materialized


def materialized(model, batch, seed):
    """F and ∂F/∂A of every site by autograd, in a forward with the random draws of `seed`."""
    torch.manual_seed(seed)
    with Materialized(model) as open_attention:
        objective = pseudo_likelihood(model(*batch))
    maps = open_attention.maps
    return objective, dict(zip(maps, torch.autograd.grad(objective, list(maps.values())), strict=True))


def pseudo_likelihood(logits):
    return logits.log_softmax(-1).amax(-1).sum()


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("build", ["translator", "dropping_translator"])
@pytest.mark.parametrize("select", ["*", "encoder.self", "decoder.cross", "encoder.self[1] decoder.self[0]"])
@pytest.mark.parametrize("leaf", [False, True])
def test_gradient_attribution_is_the_gradient_of_the_map(build, select, leaf, batch, request):
    model = request.getfixturevalue(build)
    objective, expected = materialized(model, batch, seed=1)
    sites = find_sites(model, select)
    with recording(sites):
        torch.manual_seed(1)
        if leaf:
            model.requires_grad_(False)
            ours = pseudo_likelihood(model(*batch))
            model.requires_grad_(True)
        else:
            ours = pseudo_likelihood(model(*batch))
        torch.testing.assert_close(ours, objective)
        attributions = gradient_attribution(ours, sites)
    assert len(attributions) == len(sites)
    for site, attribution in zip(sites, attributions, strict=True):
        assert attribution.dtype == torch.float32
        assert relative_error(attribution, expected[site.name]) < 1e-5


def test_padded_queries_are_attributed_nothing_in_the_last_layer(translator, batch):
    source, target = batch
    sites = find_sites(translator, "decoder.cross[1]")
    real = target.ne(0)
    with recording(sites):
        likelihood = translator(source, target).log_softmax(-1).amax(-1)
        (attribution,) = gradient_attribution((likelihood * real).sum(), sites)
    assert attribution.transpose(1, 2)[~real].eq(0).all()
    assert attribution.transpose(1, 2)[real].ne(0).any(-1).all()


def test_sites_that_the_objective_does_not_depend_on_are_attributed_zero(translator, batch):
    sites = find_sites(translator, "encoder.self decoder.self")
    with recording(sites):
        translator(*batch)
        encoded = sites[0].tapes[0].output
        attributions = gradient_attribution(encoded.square().sum(), sites)
    assert attributions[0].ne(0).any()
    assert all(attribution.eq(0).all() for attribution in attributions[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attributions_of_half_models_are_fp32(translator, batch, dtype):
    _, expected = materialized(translator, batch, seed=1)
    sites = find_sites(translator, "*")
    translator.to(dtype)
    with recording(sites):
        attributions = gradient_attribution(pseudo_likelihood(translator(*batch).float()), sites)
    for site, attribution in zip(sites, attributions, strict=True):
        assert attribution.dtype == torch.float32
        assert attribution.isfinite().all()
        assert F.cosine_similarity(attribution.flatten(), expected[site.name].flatten(), 0) > 0.9


def test_map_gradient():
    gradient, value = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5)
    expected = torch.zeros(2, 3, 4, 6)
    for b, h, t, s, d in torch.cartesian_prod(*map(torch.arange, (2, 3, 4, 6, 5))).tolist():
        expected[b, h, t, s] += gradient[b, h, t, d] * value[b, h, s, d]
    torch.testing.assert_close(map_gradient(gradient, value), expected)
    assert map_gradient(gradient.half(), value.half()).dtype == torch.float32


class TestRefusals:
    def test_nothing_recorded(self, translator, batch):
        sites = find_sites(translator)
        objective = pseudo_likelihood(translator(*batch))
        message = r"^encoder.self\[0\] recorded nothing; run the forward inside recording\(sites\), in training mode$"
        with pytest.raises(ValueError, match=message):
            gradient_attribution(objective, sites)
        with recording(sites), pytest.raises(ValueError, match=message):
            translator.eval()
            gradient_attribution(pseudo_likelihood(translator(*batch)), sites)

    def test_objective_of_several_numbers(self, translator, batch):
        sites = find_sites(translator)
        with recording(sites), pytest.raises(ValueError, match=r"must be a scalar, but has the shape \(3, 5\)$"):
            gradient_attribution(translator(*batch).sum(-1), sites)

    def test_objective_that_depends_on_nothing(self, translator, batch):
        sites = find_sites(translator)
        with recording(sites), pytest.raises(ValueError, match="depends on no selected attention site"):
            translator(*batch)
            output_gradients(torch.tensor(1.0), [site.tapes[0] for site in sites])
        with recording(sites), torch.no_grad(), pytest.raises(ValueError, match="depends on no selected"):
            gradient_attribution(pseudo_likelihood(translator(*batch)), sites)
