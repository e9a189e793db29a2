"""Gradient attribution against autograd on materialized maps; integrated gradients against a literal path."""

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin import find_sites, gradient_attribution, recording
from attn_reg_plugin.attention import functional
from attn_reg_plugin.regularizers.ad_drop.integrated import integrated_attribution
from tests.attention.tiny_model import EVERY, Materialized


def materialized(model, batch, seed):
    """F and ∂F/∂A of every site by autograd, in a forward with the random draws of `seed`."""
    torch.manual_seed(seed)
    with Materialized(model) as open_attention:
        objective = pseudo_likelihood(model(*batch))
    maps = open_attention.maps
    return objective, dict(zip(maps, torch.autograd.grad(objective, list(maps.values())), strict=True))


def pseudo_likelihood(logits):
    return logits.log_softmax(-1).amax(-1).sum()


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
    assert all(attribution.dtype == torch.float32 for attribution in attributions)
    names = [site.name for site in sites]
    assert_same(dict(zip(names, attributions, strict=True)), {name: expected[name] for name in names})


def test_sites_that_the_objective_does_not_depend_on_are_attributed_zero(translator, batch):
    sites = find_sites(translator, "encoder.self decoder.self")
    with recording(sites):
        translator(*batch)
        encoded = sites[0].tapes[0].output
        attributions = gradient_attribution(encoded.square().sum(), sites)
    assert attributions[0].ne(0).any()
    assert all(attribution.eq(0).all() for attribution in attributions[1:])


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
        found = integrated_attribution(run, sites, **options)
        return dict(zip([site.name for site in sites for _ in site.tapes], found, strict=True))


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
def test_attribution_is_the_literal_sum(build, batch, request):
    model = request.getfixturevalue(build)
    run = run_of(model, batch)
    points = [(0.5, 0.5), (1.0, 0.5)]
    separate = {name: literal(model, run, [name], points)[name] for name in EVERY}
    assert_same(attributed(model, run, steps=2), separate)
    assert_same(attributed(model, run, steps=2, path="joint"), literal(model, run, EVERY, points))
    some = ["encoder.self[1]", "decoder.cross[0]"]
    together = attributed(model, run, " ".join(some), steps=2, path="joint")
    assert_same(together, literal(model, run, some, points))


def test_maps_are_those_of_the_passes_they_are_scaled_in(dropping_translator, batch, monkeypatch):
    """Where attention that is recorded draws more random numbers than the model's own, as a GPU's kernels do."""
    record, run = functional._record, run_of(dropping_translator, batch)
    monkeypatch.setattr(functional, "_record", lambda *call: (torch.rand(()), record(*call))[1])
    alone = {name: attributed(dropping_translator, run, name, steps=2)[name] for name in EVERY}
    assert_same(attributed(dropping_translator, run, steps=2), alone)


@pytest.mark.parametrize("build", ["translator", "dropping_translator"])
@pytest.mark.parametrize("select", ["*", "encoder.self"])
@pytest.mark.parametrize("path", ["site", "joint"])
def test_completeness(build, select, path, batch, request):
    """Σ B = F(A) - F(0), of each site or of all together: the error of the paper's steps falls with their number."""
    model = request.getfixturevalue(build)
    run, names = run_of(model, batch), [site.name for site in find_sites(model, select)]
    zeros = {name: torch.zeros_like(one) for name, one in maps_of(model, run).items()}
    coarse, fine = (attributed(model, run, select, steps=steps, path=path) for steps in (20, 40))
    for group in [names] if path == "joint" else [[name] for name in names]:
        change = value_at(model, run, {}) - value_at(model, run, {name: zeros[name] for name in group})
        moved = sum(float(fine[name].abs().sum()) for name in group)  # the change itself may nearly cancel
        sums = [sum(float(found[name].sum()) for name in group) for found in (coarse, fine)]
        assert sums[0] == pytest.approx(change, abs=0.05 * moved)
        assert 2 * sums[1] - sums[0] == pytest.approx(change, abs=2e-3 * moved), "without the error of first order"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("integrated", [False, True])
def test_attributions_of_half_models_are_fp32(translator, batch, dtype, integrated):
    _, expected = materialized(translator, batch, seed=1)
    sites = find_sites(translator, "*")
    translator.to(dtype)
    if integrated:
        found = attributed(translator, run_of(translator, batch), steps=2)
    else:
        with recording(sites):
            attributions = gradient_attribution(pseudo_likelihood(translator(*batch).float()), sites)
        found = {site.name: attribution for site, attribution in zip(sites, attributions, strict=True)}
    for name, attribution in found.items():
        assert attribution.dtype == torch.float32 and attribution.isfinite().all()
        if not integrated:
            assert F.cosine_similarity(attribution.flatten(), expected[name].flatten(), 0) > 0.9


def test_refusals(translator, batch):
    sites = find_sites(translator)
    with pytest.raises(ValueError, match=r"^encoder.self\[0\] recorded nothing; run the forward inside recording\("):
        gradient_attribution(translator(*batch).sum(), sites)
    recorded = {
        r"^the objective must be a scalar, but has the shape \(3, 5\)$": lambda: translator(*batch).sum(-1),
        "depends on no selected attention site": lambda: translator(*batch).sum().detach(),
        "recorded nothing; run the forward inside": lambda: translator.eval()(*batch).sum(),
    }
    for said, objective in recorded.items():
        with recording(sites), pytest.raises(ValueError, match=said):
            gradient_attribution(objective(), sites)
    with recording(sites), torch.no_grad(), pytest.raises(ValueError, match="depends on no selected"):
        gradient_attribution(pseudo_likelihood(translator.train()(*batch)), sites)
