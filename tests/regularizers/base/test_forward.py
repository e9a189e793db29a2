"""The probe changes nothing of the model and its arguments, and a rehearsal says what is wrong at the start."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from attn_reg_plugin import ADDrop, AttendOut, ScheduledDropout, find_sites
from attn_reg_plugin.attention.selection import HeldSites
from attn_reg_plugin.regularizers.base.forward import own_copy
from tests.attention.tiny_model import PAD, SIZE, TinyClassifier, TinyStack, attentions, loss_of, sharpened, tokens
from tests.regularizers.attend_out.playing import TokensOnly

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = tokens([6, 3, 2], 6, seed=1)
ATTRIBUTIONS = ["gradient", "integrated", "attention"]
#: nothing is dropped, in effect
IDLE = {"p": 1.0, "q": 1e-30, "cross_tuning": "off", "integrated_steps": 2}


class Store:
    """A cache: it grows by what a forward adds."""

    def __init__(self, width):
        self.rows, self.layers = torch.zeros(8, width), [{"seen": torch.zeros(())}]
        self.filled, self.itself = 0, self

    def update(self, states):
        self.rows[self.filled] = states.detach().mean((0, 1))
        self.filled += 1
        self.layers[0]["seen"] += 1
        return self.rows[: self.filled]


class Stateful(nn.Module):
    """A classifier with running statistics, a counter, a buffer that a forward replaces, and a cache."""

    def __init__(self):
        super().__init__()
        self.encoder = TinyStack("encoder", 2, 0.0)
        self.norm, self.output = nn.BatchNorm1d(SIZE), nn.Linear(SIZE, 3)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.register_buffer("longest", torch.zeros(1))
        self.register_buffer("wide", torch.ones(1).expand(5))

    def forward(self, ids, cache=None, options=None):
        self.forwards += 1
        self.longest = torch.maximum(self.longest, torch.tensor([float(ids.size(1))]) + self.longest)
        states = self.encoder(ids, ids.ne(PAD)[:, None, None, :])
        if cache is not None:
            states = states + cache.update(states).sum(0) + len(options)
            options.append(1)
        return self.output(self.norm(states[:, 0]))


def stateful():
    torch.manual_seed(2)
    return sharpened(Stateful()).train()


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
def test_buffers_and_caches_count_one_forward(attribution):
    plain, model = stateful(), stateful()
    ours, theirs = (Store(SIZE), [1, 2]), (Store(SIZE), [1, 2])
    with ADDrop(attribution=attribution, **IDLE).attach(model):
        for _ in range(2):
            torch.testing.assert_close(model(IDS, *ours), plain(IDS, *theirs))
    assert ours[0].filled == theirs[0].filled == 2 and ours[1] == theirs[1] == [1, 2, 1, 1]
    torch.testing.assert_close(ours[0].rows, theirs[0].rows)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert model.forwards == 2 and model.norm.num_batches_tracked == 2 and model.longest == 12


def test_two_forwards_before_one_backward_keep_their_graphs():
    """Putting a buffer back must not look like a change to what was computed from it."""

    class Scaled(TinyClassifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((1, 3), 2.0))

        def forward(self, ids):
            return super().forward(ids).exp() * self.scale

    model = Scaled().train()
    with ADDrop(**IDLE).attach(model):
        (model(IDS) + model(IDS)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.output.parameters())
    assert model.output.weight.grad.any()


def test_a_copy_of_arguments_shares_tensors_and_nothing_else():
    ids, cache = torch.ones(2), Store(3)
    given = {"ids": ids, "options": [ids, {"cache": cache}], "same": cache, "model": nn.Linear(1, 1), "kind": Store}
    made = own_copy(given)
    assert made is not given and made["ids"] is ids and made["options"][0] is ids
    assert made["model"] is given["model"] and made["kind"] is Store
    twin = made["same"]
    assert twin is made["options"][1]["cache"] is twin.itself is not cache
    twin.update(torch.ones(1, 1, 3))
    assert cache.filled == 0 and not cache.rows.any() and not cache.layers[0]["seen"].any()


def zero_half_and_double_the_rest(module, inputs):
    module.weight.data = 2 * module.weight.masked_fill(torch.rand_like(module.weight) < 0.5, 0.0)


@pytest.mark.parametrize("attribution", ATTRIBUTIONS)
def test_hooks_that_give_a_module_new_weights_act_once(attribution):
    """As fairseq's quantization noise: each forward drops blocks of the weight, for good, and scales the others."""
    torch.manual_seed(6)
    model = TinyClassifier().train()
    noisy = model.output, model.encoder.layers[1].attentions[0].projections[2]
    for module in noisy:
        module.register_forward_pre_hook(zero_half_and_double_the_rest)
    with ADDrop(attribution=attribution, **IDLE).attach(model):
        model(IDS).sum().backward()
    for module in noisy:
        assert 0.3 < (module.weight == 0).float().mean() < 0.7
        assert module.weight.abs().max() <= 2 * SIZE**-0.5 and module.weight.grad is not None


def test_attend_outs_defender_learns_from_what_the_attacker_was_given():
    model, cache = stateful(), Store(SIZE)
    with AttendOut(problem=TokensOnly("ids"), optimizer=torch.optim.SGD(model.parameters(), 0.1)).attach(
        model
    ) as regularizer:
        model(IDS, cache=cache, options=[])
        (inputs,) = regularizer.game._pending
        assert cache.filled == 1 and inputs["cache"].filled == 0 and inputs["ids"] is IDS and inputs["options"] == []


# -- rehearsal --------------------------------------------------------------------------------------------------------


def test_what_the_probe_needs_is_said_in_the_first_plain_epoch():
    model = TinyClassifier(classes=1).train()
    for options in ({}, {"cross_tuning": "update:5"}, {"attribution": "integrated"}):
        regularizer = ADDrop(labels="gold", **options)
        regularizer.begin_epoch(1)
        with regularizer.attach(model), pytest.raises(ValueError, match=r"^the objective needs gold labels"):
            model(IDS)
        assert not any(site.active for site in find_sites(model))


def drawing_objective(calls, outputs, inputs):
    calls.append(np.random.rand() + random.random())
    return outputs.logsumexp(-1).sum()


@pytest.mark.parametrize(
    "method",
    [ADDrop(), ADDrop(attribution="attention"), ScheduledDropout(schedule="keep *: 0:1 1000:0.5")],
    ids=["ad_drop", "attention weights", "scheduled_dropout"],
)
def test_attention_that_cannot_be_regularized_is_said_in_the_first_forward(method):
    model = TinyClassifier().train()
    method.begin_epoch(1)
    attention = attentions(model)["encoder.self[1]"]

    def refuse(module, args):
        if module.site.active:
            raise RuntimeError("uses sinks, which cannot be regularized")

    attention.register_forward_pre_hook(refuse)
    with method.attach(model), pytest.raises(RuntimeError, match="uses sinks"):
        model(IDS)
    model(IDS)


@pytest.mark.parametrize("attribution", [*ATTRIBUTIONS, "random", "later"])
def test_a_rehearsal_leaves_plain_epochs_bit_identical(attribution):
    runs = []
    later = ScheduledDropout(schedule="keep *: 5:1 9:0.5")
    rehearsing = later if attribution == "later" else ADDrop(attribution=attribution, integrated_steps=2)
    for method in (None, rehearsing):
        torch.manual_seed(2)
        np.random.seed(2)
        random.seed(2)
        model, losses = stateful(), []
        model.encoder.layers[0].dropout.p = 0.3
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        calls = []
        if method is not None:
            method.objective = partial(drawing_objective, calls)
            method.attach(model)
            method.begin_epoch(1)
        for _ in range(3):
            loss = loss_of(model(IDS), torch.tensor([1, 2, 1]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if method is not None:
            assert len(calls) == (attribution in ATTRIBUTIONS), "rehearsed once"
            counted = method.statistics.take()
            assert counted == {"forwards": 3.0, "regularized": 0.0}
            assert not any(site.active for site in method.attached_sites)
            method.detach()
        runs.append((torch.stack(losses), copy.deepcopy(model.state_dict()), torch.get_rng_state(), random.random()))
        runs[-1] += (np.random.rand(),)
    (losses, state, torchs, pythons, numpys), (ours, our_state, our_torchs, our_pythons, our_numpys) = runs
    assert ours.equal(losses) and our_torchs.equal(torchs) and (our_pythons, our_numpys) == (pythons, numpys)
    assert all(our_state[name].equal(tensor) for name, tensor in state.items())


def test_what_is_never_due_is_not_rehearsed():
    calls = []
    for ratios in ({"p": 0.0}, {"q": 0.0}):
        model = TinyClassifier().train()
        regularizer = ADDrop(objective=lambda outputs, inputs: calls.append(1) or outputs.sum(), **ratios)
        regularizer.begin_epoch(1)
        with regularizer.attach(model):
            model(IDS)
    assert not calls


# -- several backends in one model ------------------------------------------------------------------------------------


def test_every_backend_with_a_site_is_asked():
    """What the first one tells wins; each may make the model ready for the probe."""
    open_, seen = [], {}

    def objective(outputs, inputs):
        seen.update({name: inputs[name] for name in ("targets", "padding_label", "token_mask")}, probing=list(open_))
        return outputs.sum()

    def backend(name, **told):
        class Other(HeldSites):
            def describe(self, model, args, kwargs):
                return told

            def probing(self, model):
                return Opened(name, open_)

        return Other()

    model = TinyClassifier().train()
    with ADDrop(cross_tuning="off", objective=objective).attach(model) as regularizer:
        first, second = regularizer.attached_sites
        first.backend = backend("first", targets=1, padding_label=1)
        second.backend = backend("second", targets=2, token_mask=2)
        regularizer._attachment.backends = [first.backend, second.backend]
        model(IDS)
    assert seen == {"targets": 1, "padding_label": 1, "token_mask": 2, "probing": ["first", "second"]}
    assert not open_


class Opened:
    """A context that tells whether it is open."""

    def __init__(self, name, where):
        self.name, self.where = name, where

    def __enter__(self):
        self.where.append(self.name)

    def __exit__(self, *error):
        self.where.remove(self.name)
