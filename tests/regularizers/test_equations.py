"""Each method's attention, alone and together, against its formula: which keys are kept, uniform rows, factors."""

import copy

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin.regularizers import build
from tests.attention.literal import loop_weights
from tests.attention.tiny_model import HEADS, PAD, attentions, drawn
from tests.regularizers.trainings import on_all_sites

METHODS = {
    "weights": ("attention_dropout", {"p": 0.3}),
    "scores": ("attention_dropout", {"p": 0.4, "where": "scores"}),
    "scheduled_dropout": ("scheduled_dropout", {"schedule": "drop *: 0:0.6"}),
    "everything is dropped": ("scheduled_dropout", {"schedule": "drop *: 0:1"}),
    "attention_layer_drop": ("attention_layer_drop", {"p": 0.5}),
    "head_drop": ("head_drop", {"p": 0.5}),
    "together": (
        "head_drop+ad_drop+attention_layer_drop",
        {
            "ad_drop": {"p": 0.4, "q": 0.5, "cross_tuning": "off"},
            "head_drop": {"p": 0.5},
            "attention_layer_drop": {"p": 0.5},
        },
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_output_is_that_of_the_formula(name, translator, batch):
    """softmax(QKᵀ/√d + M) (AttendOut, equation 3), uniform where nothing is left, A ⊙ Bernoulli / (1 - p) for dropped
    weights, H / (number kept) or 0 times a head's rows."""
    literal, (method, options) = copy.deepcopy(translator), METHODS[name]
    with build(method, **on_all_sites(method, options)).attach(translator) as regularizer:
        torch.manual_seed(6)
        output = translator(*batch)
        sites = regularizer.attached_sites
        asked = {site.name: (site.request, next(iter(site.calls.made), None)) for site in sites}
    masks, uniform, survivors, rates = {}, set(), set(), {}

    def attend(site, query, key, value, valid, dropout_p):
        (request, call), shape = asked[site], (*query.shape[:-1], key.size(-2))
        keep = None if request.sampler is None else drawn(request.sampler, call, shape, valid)
        keep = request.masks[0].unpacked() if request.masks else keep
        if keep is not None:
            masks[site] = keep
            assert not (keep & ~valid).any()
        if call is not None and call.uniform:
            keep = torch.zeros(shape, dtype=torch.bool)
            uniform.add(site)
        weights = loop_weights(query, key, valid=valid, keep=keep)
        if request.weights_dropout:
            rates[site] = p = request.weights_dropout
            weights = weights * (F.dropout(torch.ones_like(weights), p) > 0) / (1 - p)  # the kernel's draws
        rows = weights @ value
        if request.factor is not None:
            alive = drawn(request.factor, call, shape, valid) > 0
            survivors.update(alive.sum(1).flatten().tolist())
            rows = rows * alive * HEADS / alive.sum(1, keepdim=True)
        return rows

    for module in attentions(literal).values():
        module.attend = attend
    real = batch[1].ne(PAD)
    with torch.no_grad():
        torch.manual_seed(6)
        torch.testing.assert_close(output[real], literal(*batch)[real])
    if name == "weights":
        assert rates == dict.fromkeys(asked, 0.3)
    if name == "scores":
        assert any(not keep[:, 0].equal(keep[:, 1]) for keep in masks.values()), "each head has its own"
    if name == "everything is dropped":
        assert not any(keep.any() for keep in masks.values())
    assert ("layer_drop" in method) == (0 < len(uniform) < 6)
    assert survivors == ({1, 2} if "head_drop" in method else set())


def test_weights_dropout_adds_to_the_models_own(translator, batch):
    """Two independent dropouts are one: 1 - (1 - 0.2) (1 - 0.25) = 0.4, drawn as the model would draw it."""
    outputs = []
    for own, added in ((0.4, 0.0), (0.2, 0.25), (0.0, 0.4)):
        for module in attentions(translator).values():
            module.dropout.p = own
        with build("attention_dropout", p=added, sites="*").attach(translator):
            torch.manual_seed(3)
            outputs.append(translator(*batch))
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])
    with pytest.raises(ValueError, match=r"^p is 1, but must be below 1 where weights are dropped"):
        build("attention_dropout", p=1.0)
    assert build("attention_dropout", p=1.0, where="scores").p == 1.0
