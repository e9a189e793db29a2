"""Gradient attribution against autograd on materialized maps; integrated gradients against a literal path."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin import find_sites, gradient_attribution, recording
from attn_reg_plugin.attention.attribution import map_gradient, output_gradients
from attn_reg_plugin.regularizers.ad_drop.integrated import integrated_attribution, integration_nodes
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


DECODER = [f"decoder.{kind}[{layer}]" for layer in range(2) for kind in ("self", "cross")]
EVERY = ["encoder.self[0]", "encoder.self[1]", *DECODER]


def run_of(model, batch, seed=1):
    """The probe: the same random draws every time, and a smooth objective that every site moves clearly."""

    def run():
        torch.manual_seed(seed)
        return model(*batch)[..., :3].square().sum()

    return run


def attributed(model, run, select="*", **options):
    """B by the name of the site."""
    sites = find_sites(model, select)
    with recording(sites, needs_weights=True):
        return {site.name: attribution for site, attribution in integrated_attribution(run, sites, **options)}


def value_at(model, run, given):
    """F where the maps of `given` take its values."""
    with torch.no_grad(), Materialized(model, given=given):
        return float(run())


def maps_of(model, run):
    """Every site's map after dropout."""
    with torch.no_grad(), Materialized(model) as materialized:
        run()
    return materialized.maps


def literal(model, run, group, nodes):
    """B = A ⊙ Σ w ∂F/∂A(αA), the maps of `group` scaled together."""
    maps = maps_of(model, run)
    totals = {name: torch.zeros_like(maps[name]) for name in group}
    for alpha, weight in nodes:
        given = {name: (alpha * maps[name]).requires_grad_() for name in group}
        with Materialized(model, given=given):
            gradients = torch.autograd.grad(run(), list(given.values()))
        for name, gradient in zip(given, gradients, strict=True):
            totals[name] += weight * gradient
    return {name: maps[name] * total for name, total in totals.items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        error = (actual[name] - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 1e-5, (name, float(error))


@pytest.mark.parametrize("build", ["translator", "dropping_translator"])
@pytest.mark.parametrize("nodes", ["uniform", "gauss-legendre"])
def test_attribution_is_the_literal_sum(build, nodes, batch, request):
    model = request.getfixturevalue(build)
    run = run_of(model, batch)
    points = integration_nodes(2, nodes)
    separate = {name: literal(model, run, [name], points)[name] for name in EVERY}
    assert_same(attributed(model, run, steps=2, nodes=nodes), separate)
    assert_same(attributed(model, run, steps=2, nodes=nodes, path="joint"), literal(model, run, EVERY, points))
    some = ["encoder.self[1]", "decoder.cross[0]"]
    together = attributed(model, run, " ".join(some), steps=2, nodes=nodes, path="joint")
    assert_same(together, literal(model, run, some, points))


@pytest.mark.parametrize("build", ["translator", "dropping_translator"])
def test_completeness_of_each_site(build, batch, request):
    model = request.getfixturevalue(build)
    run = run_of(model, batch)
    maps = maps_of(model, run)
    change = {n: value_at(model, run, {}) - value_at(model, run, {n: torch.zeros_like(maps[n])}) for n in EVERY}
    exact = attributed(model, run, steps=8, nodes="gauss-legendre")
    coarse = attributed(model, run, steps=20)
    for name in EVERY:
        assert float(exact[name].sum()) == pytest.approx(change[name], rel=1e-3), name
        moved = float(exact[name].abs().sum())  # the change itself may nearly cancel
        assert float(coarse[name].sum()) == pytest.approx(change[name], abs=0.05 * moved), name


@pytest.mark.parametrize("build", ["translator", "dropping_translator"])
@pytest.mark.parametrize("select", ["*", "encoder.self"])
def test_completeness_of_the_joint_path(build, select, batch, request):
    model = request.getfixturevalue(build)
    run = run_of(model, batch)
    maps = maps_of(model, run)
    zeros = {site.name: torch.zeros_like(maps[site.name]) for site in find_sites(model, select)}
    change = value_at(model, run, {}) - value_at(model, run, zeros)
    exact = attributed(model, run, select, steps=8, nodes="gauss-legendre", path="joint")
    coarse = attributed(model, run, select, steps=20, path="joint")
    assert abs(sum(float(b.sum()) for b in exact.values()) / change - 1) < 1e-3
    assert abs(sum(float(b.sum()) for b in coarse.values()) / change - 1) < 0.05


def test_the_error_of_uniform_nodes_falls_as_one_over_m(translator, batch):
    run = run_of(translator, batch)
    exact = attributed(translator, run, "encoder.self[0]", steps=12, nodes="gauss-legendre")["encoder.self[0]"]
    errors = []
    for steps in (8, 16, 32, 64):
        coarse = attributed(translator, run, "encoder.self[0]", steps=steps)["encoder.self[0]"]
        errors.append(float((coarse - exact).norm() / exact.norm()))
    for larger, smaller in pairwise(errors):
        assert 1.7 < larger / smaller < 2.3, errors


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 20])
def test_gauss_legendre_nodes_are_numpys(steps):
    points, weights = np.polynomial.legendre.leggauss(steps)
    nodes = integration_nodes(steps, "gauss-legendre")
    np.testing.assert_allclose([alpha for alpha, _ in nodes], (points + 1) / 2, atol=1e-12)
    np.testing.assert_allclose([weight for _, weight in nodes], weights / 2, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_uniform_nodes_are_the_papers(steps):
    nodes = integration_nodes(steps)
    assert nodes == [(k / steps, 1 / steps) for k in range(1, steps + 1)]
    assert math.isclose(sum(weight for _, weight in nodes), 1.0)


def test_skipped_layers_are_left_out(translator, batch):
    translator.encoder.skip = {0}
    for path in ("site", "joint"):
        names = attributed(translator, run_of(translator, batch), steps=1, path=path).keys()
        assert list(names) == [name for name in EVERY if name != "encoder.self[0]"]


def test_a_half_model_is_integrated_in_fp32(translator, batch):
    translator.bfloat16()
    for attribution in attributed(translator, run_of(translator, batch), steps=2).values():
        assert attribution.dtype == torch.float32
        assert attribution.isfinite().all()


def test_refusals(translator, batch):
    sites = find_sites(translator)
    with pytest.raises(ValueError, match=r"^integrated gradients need at least 1 step, not 0$"):
        integration_nodes(0)
    with pytest.raises(ValueError, match=r"^nodes is 'simpson', but must be one of uniform, gauss-legendre$"):
        integration_nodes(3, "simpson")
    with pytest.raises(ValueError, match=r"^path is 'all', but must be one of site, joint$"):
        list(integrated_attribution(run_of(translator, batch), sites, path="all"))
