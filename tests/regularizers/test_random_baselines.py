"""The methods that draw at random: where they drop nothing, in evaluation, recomputed, resumed, copied, detached."""

from __future__ import annotations

import copy

import pytest
import torch

from attn_reg_plugin.regularizers import build
from tests.attention.tiny_model import assert_recomputed, same_step, training_step

METHODS = {
    "weights": ("attention_dropout", {"where": "weights"}),
    "scores": ("attention_dropout", {"where": "scores"}),
    "heads": ("head_drop", {}),
    "layers": ("layer_drop", {}),
}
EACH = pytest.mark.parametrize("method", METHODS)


def make(method, p, **options):
    name, own = METHODS[method]
    return build(name, p=p, sites="*", **own, **options)


@EACH
@pytest.mark.parametrize("checkpointed", [False, True])
def test_p_of_zero_changes_no_bit_and_draws_nothing(dropping_translator, batch, method, checkpointed):
    model = dropping_translator
    model.encoder.checkpointed = checkpointed
    expected = training_step(model, batch)
    with make(method, 0.0).attach(model) as regularizer:
        assert same_step(expected, training_step(model, batch))
        assert regularizer.statistics.take() == {"forwards": 1.0, "regularized": 0.0}
    with make(method, 0.5).attach(model):
        assert not same_step(expected, training_step(model, batch))
    assert same_step(expected, training_step(model, batch)), "detached, it is as it was"


@EACH
def test_evaluation_and_forwards_without_gradients_are_untouched(dropping_translator, batch, method):
    model = dropping_translator.eval()
    expected = model(*batch)
    torch.manual_seed(4)
    with torch.no_grad():
        training = model.train()(*batch)
    with make(method, 0.9).attach(model):
        assert model.eval()(*batch).equal(expected)
        model.train()(*batch)
        assert model.eval()(*batch).equal(expected)
        torch.manual_seed(4)
        with torch.no_grad():
            assert model.train()(*batch).equal(training)


@EACH
@pytest.mark.parametrize("seed", range(3))
def test_recomputation_drops_the_same(translator, batch, method, seed):
    assert_recomputed(translator, batch, seed, lambda model: make(method, 0.5).attach(model))


@EACH
def test_a_run_that_is_resumed_draws_the_same(dropping_translator, batch, method):
    def losses(regularizer, n):
        with regularizer.attach(dropping_translator):
            for _ in range(n):
                yield dropping_translator(*batch).square().sum().item()
                regularizer.end_update()

    torch.manual_seed(2)
    whole = list(losses(make(method, 0.5), 5))
    torch.manual_seed(2)
    first, second = make(method, 0.5), make(method, 0.5)
    parts = list(losses(first, 2))
    second.load_state_dict(first.state_dict())
    assert parts + list(losses(second, 3)) == whole and len(set(whole)) == 5


@EACH
def test_a_copy_of_an_attached_model_drops_for_itself(translator, batch, method):
    before = {path: dict(vars(module)) for path, module in translator.named_modules()}
    regularizer = make(method, 0.5)
    with regularizer.attach(translator):
        twin = copy.deepcopy(translator)
        expected = training_step(translator, batch)
        with torch.no_grad():
            for parameter in translator.parameters():
                parameter.zero_()
        counted = regularizer.statistics.take()
        assert same_step(expected, training_step(twin, batch)), "nothing of it is the first model's"
        assert counted["forwards"] == 1.0 and regularizer.statistics.take() == {}
    assert {path: dict(vars(module)).keys() for path, module in translator.named_modules()} == {
        path: attributes.keys() for path, attributes in before.items()
    }


@EACH
def test_the_rate_is_logged(translator, batch, method):
    torch.manual_seed(0)
    with make(method, 0.3).attach(translator) as regularizer:
        for _ in range(40):
            translator(*batch)
        sums = regularizer.statistics.take()
        names = [site.name for site in regularizer.attached_sites]
    rates = [float(sums[f"dropped/{name}"] / sums[f"valid/{name}"]) for name in names]
    assert len(rates) == 6 and all(0.1 < rate < 0.5 for rate in rates)
    # of two heads, both are dropped in 9 % of the draws, and then one of them stays
    assert sum(rates) / 6 == pytest.approx(0.3 - (0.045 if method == "heads" else 0), abs=0.06)
