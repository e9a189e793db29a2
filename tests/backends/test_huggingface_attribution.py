"""transformers models: attributions against materialized attention, and masks that neither padding nor future enter."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from attn_reg_plugin import ADDrop, find_sites, recording
from attn_reg_plugin.attention.attribution import map_gradient, output_gradients
from attn_reg_plugin.attention.calls import opened
from tests.backends.huggingface_models import FAMILIES, HEADS, batch, build, objective, token_mask
from tests.backends.materialized import Materialized

TOKEN_LEVEL = [name for name, family in FAMILIES.items() if "Sequence" not in family.model]
SIDES = [(name, False) for name in FAMILIES] + [(name, True) for name in TOKEN_LEVEL]
#: Longformer's maps are of windows; its test stands beside this one
MAPS = [name for name in FAMILIES if name != "longformer"]


def by_site(name: str, maps: Sequence[Tensor]) -> dict[str, Tensor]:
    """Maps (B, H, T, S) by the name of their site; some models have them as (B · H, T, S)."""
    shaped = (each.view(-1, HEADS, *each.shape[-2:]) for each in maps)
    return dict(zip(FAMILIES[name].sites, shaped, strict=True))


def recorded(model: nn.Module, name: str, inputs: dict[str, Tensor]) -> tuple[Tensor, dict, dict, dict]:
    """Logits, attributions, valid positions and outputs of every site, by its name."""
    sites = find_sites(model, "*")
    with recording(sites):
        logits = model(**inputs).logits
        tapes = [site.tapes[0] for site in sites]
        gradients = output_gradients(objective(name, inputs, logits), tapes)  # Longformer's further calls are left out
        attributions = [map_gradient(gradient, tape.value) for gradient, tape in zip(gradients, tapes, strict=True)]
        names = [site.name for site in sites]
        valid = [
            torch.ones_like(b, dtype=torch.bool) if t.valid is None else t.valid.expand_as(b)
            for t, b in zip(tapes, attributions, strict=True)
        ]
    return logits, *(dict(zip(names, values, strict=True)) for values in (attributions, valid))


@pytest.mark.parametrize("full", [False, True], ids=["padded", "full"])
@pytest.mark.parametrize("name", MAPS)
def test_gradient_attribution_is_that_of_the_materialized_maps(name: str, full: bool) -> None:
    """Without padding transformers gives no mask at all; causality has to hold all the same."""
    inputs = batch(name, full=full)
    with Materialized() as written_out:
        expected_logits = build(name)(**inputs).logits
    gradients = torch.autograd.grad(objective(name, inputs, expected_logits), written_out.maps)
    maps, expected = by_site(name, written_out.maps), by_site(name, gradients)
    model = build(name)
    logits, attributions, valid = recorded(model, name, inputs)
    counted = token_mask(name, inputs) if logits.dim() == 3 else ...
    torch.testing.assert_close(logits[counted], expected_logits[counted], atol=3e-5, rtol=1e-5)
    assert list(attributions) == FAMILIES[name].sites
    for site, attribution in attributions.items():
        # a row without any valid key is no token's; eager makes it uniform over everything
        seen = valid[site].any(-1, keepdim=True) & (maps[site] > 0)
        assert torch.equal(valid[site], seen), site
        difference = (attribution - expected[site]).masked_fill(~valid[site], 0.0)
        scale = max(1.0, float(expected[site].abs().max()))
        assert float(difference.abs().max()) <= 2e-5 * scale, site
        assert float(attribution.abs().max()) > 1e-4, site
    # integrated gradients and attention weights read A itself: scale, position bias and repeated heads are in it
    sites = find_sites(model, "*")
    with recording(sites, needs_weights=True):
        torch.testing.assert_close(model(**inputs).logits[counted], expected_logits[counted], atol=3e-5, rtol=1e-5)
        for site in sites:
            there = valid[site.name].any(-1, keepdim=True)
            torch.testing.assert_close(site.tapes[0].weights, maps[site.name] * there, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name, left", SIDES)
def test_what_is_padded_never_matters(name: str, left: bool) -> None:
    """Other embeddings at the padding change neither outputs, attributions nor masks at real tokens."""
    inputs = batch(name, left)
    real = inputs["attention_mask"].bool()
    ids = inputs.pop("input_ids")
    model = build(name, seed=3)
    embedded = model.get_input_embeddings()(ids).detach()
    results = []
    for noise in (0.0, 5.0):
        torch.manual_seed(4)
        changed = embedded + noise * torch.randn_like(embedded) * ~real.unsqueeze(-1)
        assert noise == 0.0 or not changed.equal(embedded)
        arguments = {**inputs, "inputs_embeds": changed}
        logits, attributions, valid = recorded(model, name, arguments)
        with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(model) as regularizer:
            torch.manual_seed(5)
            regularized = model(**arguments).logits
            masks = {site.name: site.keep for site in regularizer.attached_sites}
        results.append((logits, regularized, attributions, masks))
    rows = real if FAMILIES[name].stacks != "both" else None
    for first, second in zip(results[0][:2], results[1][:2], strict=True):
        compared = rows if rows is not None and first.dim() == 3 else torch.ones(first.shape[:-1], dtype=torch.bool)
        torch.testing.assert_close(second[compared], first[compared], atol=1e-5, rtol=1e-5)
    for site in results[0][2]:
        counted = valid[site].clone()
        if site.startswith("encoder") or rows is not None:
            counted &= real[:, None, :, None]
        before, after = (result[2][site].where(counted, 0.0) for result in results)
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
        before, after = (result[3][site] & counted for result in results)
        assert torch.equal(after, before) and before.any()
        assert not (results[0][3][site] & ~valid[site]).any()


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_has_no_nan(name: str) -> None:
    model, inputs = build(name, dropout=0.1).bfloat16(), batch(name, left=name in ("gpt2", "llama"))
    for p in (0.4, 1.0):
        with ADDrop(p=p, q=p, sites="*", cross_tuning="off").attach(model) as regularizer:
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            assert float(regularizer.statistics.take()["fallbacks"]) == 0
        assert loss.isfinite()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_a_mask_of_the_users_own(name: str, kind: torch.dtype) -> None:
    """Four-dimensional masks pass transformers' mask functions by; an additive one may hold finite numbers as well."""
    model, inputs = build(name), batch(name)
    torch.manual_seed(6)
    seen = (torch.rand(3, 1, 7, 7) < 0.5) | torch.eye(7, dtype=torch.bool)
    numbers = torch.randn(3, 1, 7, 7).masked_fill(~seen, torch.finfo(torch.float32).min)
    inputs["attention_mask"] = seen if kind == torch.bool else numbers
    if FAMILIES[name].stacks == "both":  # cross attention has another shape: the encoder alone
        model, inputs = model.get_encoder(), {k: v for k, v in inputs.items() if k != "labels"}
    expected = model(**inputs)[0 if "labels" not in inputs else 1]
    with opened(find_sites(model, "*")) as sites:
        for site in sites:
            site.ask(keep=torch.ones(1, 1, 1, 1, dtype=torch.bool))
        found = model(**inputs)[0 if "labels" not in inputs else 1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "modernbert", "bert", "bart"])
def test_rows_without_a_valid_key_are_the_models_own(name: str, attention: str) -> None:
    """Padded queries predict the first token behind left padding: `eager` has the mean of all."""
    model, inputs = build(name, attention=attention), batch(name, left=True)
    plain = model(**inputs)
    with ADDrop(p=1.0, q=1e-30, sites="*", cross_tuning="off").attach(model):
        found = model(**inputs)
    torch.testing.assert_close(found.logits, plain.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.loss, plain.loss, atol=1e-6, rtol=1e-6)
    if name == "llama" and attention == "eager":
        model.config.output_attentions = True
        maps = model(**inputs).attentions
        with ADDrop(p=1.0, q=1e-30, sites="*", cross_tuning="off").attach(model):
            assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(model(**inputs).attentions, maps, strict=True))


def test_a_bool_mask_that_eager_adds_as_numbers_is_refused() -> None:
    model, inputs = build("bert", attention="eager"), batch("bert")
    inputs["attention_mask"] = torch.ones(3, 1, 7, 7, dtype=torch.bool)
    with ADDrop(p=0.5, q=0.5, cross_tuning="off").attach(model):
        model(**inputs)
        inputs["attention_mask"][..., -1] = False
        said = r"^encoder\.self\[0\] .* is given a bool mask, .* attn_implementation='sdpa'$"
        with pytest.raises(RuntimeError, match=said):
            model(**inputs)
