"""The probe changes nothing of the model and its arguments, and a rehearsal says what is wrong at the start."""

import random
from collections import OrderedDict
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from attn_reg_plugin import ADDrop, AttendOut, ScheduledDropout, find_sites
from attn_reg_plugin.attention.selection import HeldSites
from attn_reg_plugin.regularizers.base.hooks.forward import own_copy
from tests.attention.tiny_model import PAD, SIZE, TinyClassifier, TinyStack, attentions, loss_of, sharpened, tokens
from tests.regularizers.attend_out.playing import TokensOnly
from tests.regularizers.trainings import equal

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


EACH = pytest.mark.parametrize("attribution", ATTRIBUTIONS)


@EACH
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

    model = TinyClassifier().train()
    model.register_buffer("scale", torch.full((1, 3), 2.0))
    model.output.register_forward_hook(lambda module, args, output: output.exp() * model.scale)
    with ADDrop(**IDLE).attach(model):
        (model(IDS) + model(IDS)).sum().backward()
    assert model.output.weight.grad.isfinite().all() and model.output.weight.grad.any()


def test_a_copy_of_arguments_shares_tensors_and_nothing_else():
    ids, cache = torch.ones(2), Store(3)
    given = {"ids": ids, "options": [ids, {"cache": cache}], "same": cache, "model": nn.Linear(1, 1), "kind": Store}
    made = own_copy(given)
    assert made is not given and made["ids"] is ids and made["options"][0] is ids
    assert made["model"] is given["model"] and made["kind"] is Store
    held = OrderedDict(ids=ids, options=[])
    twin = own_copy(held)
    assert type(twin) is OrderedDict and twin.pop("ids") is held["ids"] and twin["options"] is not held["options"]
    twin = made["same"]
    assert twin is made["options"][1]["cache"] is twin.itself is not cache
    twin.update(torch.ones(1, 1, 3))
    assert cache.filled == 0 and not cache.rows.any() and not cache.layers[0]["seen"].any()


def zero_half_and_double_the_rest(module, inputs):
    module.weight.data = 2 * module.weight.masked_fill(torch.rand_like(module.weight) < 0.5, 0.0)


@EACH
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
    method = AttendOut(problem=TokensOnly("ids"), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with method.attach(model):
        model(IDS, cache=cache, options=[])
        ((inputs, _),) = method.game._pending
        assert cache.filled == 1 and inputs["cache"].filled == 0 and inputs["ids"] is IDS and inputs["options"] == []


def test_what_the_probe_needs_is_said_in_the_first_plain_epoch():
    model = TinyClassifier(classes=1).train()
    for options in ({}, {"cross_tuning": "update:5"}, {"attribution": "integrated"}):
        regularizer = ADDrop(labels="gold", **options)
        regularizer.begin_epoch(1)
        with regularizer.attach(model), pytest.raises(ValueError, match=r"^the objective needs gold labels"):
            model(IDS)
        assert not any(site.active for site in find_sites(model))


@pytest.mark.parametrize(
    "method",
    [ADDrop(), ADDrop(attribution="attention"), ScheduledDropout(schedule="drop *: 0:0 1000:0.5")],
    ids=["ad_drop", "attention weights", "scheduled_dropout"],
)
def test_attention_that_cannot_be_regularized_is_said_in_the_first_forward(method):
    model = TinyClassifier().train()
    method.begin_epoch(1)

    def refuse(module, args):
        if module.site.active:
            raise RuntimeError("uses sinks, which cannot be regularized")

    attentions(model)["encoder.self[1]"].register_forward_pre_hook(refuse)
    with method.attach(model), pytest.raises(RuntimeError, match="uses sinks"):
        model(IDS)
    model(IDS)


@pytest.mark.parametrize("attribution", [None, *ATTRIBUTIONS, "random", "later"])
def test_a_rehearsal_leaves_plain_epochs_bit_identical(attribution):
    """Whatever draws in it; and what is never due is not rehearsed."""
    calls, runs = [], []

    def objective(outputs, inputs):
        calls.append(np.random.rand() + random.random())
        return outputs.logsumexp(-1).sum()

    rehearsing = ScheduledDropout(schedule="drop *: 5:0 9:0.5")
    if attribution != "later":
        rehearsing = ADDrop(attribution=attribution or "gradient", q=0.3 if attribution else 0.0, integrated_steps=2)
    for method in (None, rehearsing):
        torch.manual_seed(2)
        np.random.seed(2)
        random.seed(2)
        model = stateful()
        model.encoder.layers[0].dropout.p = 0.3
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        if method is not None:
            method.objective = objective
            method.attach(model)
            method.begin_epoch(1)
        for _ in range(3):
            loss = loss_of(model(IDS), torch.tensor([1, 2, 1]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        state = [*losses, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]
        runs.append((state, random.random(), np.random.rand()))
    assert len(calls) == (attribution in ATTRIBUTIONS), "rehearsed once"
    assert method.statistics.take() == {"forwards": 3.0, "regularized": 0.0}
    assert not any(site.active for site in method.attached_sites)
    assert equal(runs[0][0], runs[1][0]) and runs[0][1:] == runs[1][1:]


def test_every_backend_with_a_site_is_asked():
    """The first backend's word wins; each may make the model ready for the probe."""
    open_, seen = [], {}

    def objective(outputs, inputs):
        seen.update({name: inputs[name] for name in ("targets", "padding_label", "token_mask")}, probing=list(open_))
        return outputs.sum()

    class Other(HeldSites):
        def __init__(self, name, **told):
            self.name, self.told = name, told

        def describe(self, model, named):
            return self.told

        @contextmanager
        def probing(self, model):
            open_.append(self.name)
            yield
            open_.remove(self.name)

    model = TinyClassifier().train()
    with ADDrop(cross_tuning="off", objective=objective).attach(model) as regularizer:
        backends = [Other("first", targets=1, padding_label=1), Other("second", targets=2, token_mask=2)]
        regularizer._attachment.backends = backends
        model(IDS)
    assert seen == {"targets": 1, "padding_label": 1, "token_mask": 2, "probing": ["first", "second"]}
    assert not open_
