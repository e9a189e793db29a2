"""An attention that runs several times in a forward: a tape, a mask and a draw for each of its calls."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_reg_plugin import ADDrop, AttendOut, find_sites, gradient_attribution, recording
from attn_reg_plugin.regularizers import Combination, build
from tests.attention.tiny_model import PAD, SIZE, TinyClassifier, TinyStack, keep_of, sharpened, tokens
from tests.regularizers.attend_out.playing import TokensOnly

EQUALLY_LONG = tokens([6, 3, 2], 6, seed=1), tokens([2, 6, 5], 6, seed=2)
OF_THEIR_OWN = tokens([6, 3, 2], 6, seed=1), tokens([4, 1, 3], 4, seed=2)
TEXTS = pytest.mark.parametrize("texts", [EQUALLY_LONG, OF_THEIR_OWN], ids=["equally long", "of their own lengths"])
AD_DROP = {"p": 0.6, "q": 0.5, "cross_tuning": "off"}
METHODS = {
    "gradient": ("ad_drop", AD_DROP),
    "random": ("ad_drop", {**AD_DROP, "attribution": "random"}),
    "attention_layer_drop": ("attention_layer_drop", {"p": 0.5}),
    "scheduled_dropout": ("scheduled_dropout", {"schedule": "drop *: 0:0.5"}),
    "attention_dropout": ("attention_dropout", {"p": 0.5}),
    "head_drop": ("head_drop", {"p": 0.5}),
}
LEAVING_OUT = {
    "layer_drop": ("layer_drop", {"p": 0.5}),
    "both": ("ad_drop+layer_drop", {"ad_drop": AD_DROP, "layer_drop": {"p": 0.5}}),
}


class Siamese(nn.Module):
    """One encoder for two texts; `apart` gives the second text an equal encoder of its own."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.encoder = TinyStack("encoder", 2, dropout)
        self.output = nn.Linear(2 * SIZE, 3)
        self.second = None

    def apart(self):
        twin = copy.deepcopy(self)
        twin.second = copy.deepcopy(self.encoder)
        return twin

    def forward(self, first, second):
        encoders = self.encoder, self.encoder if self.second is None else self.second
        pairs = zip(encoders, (first, second), strict=True)
        states = [encode(text, text.ne(PAD)[:, None, None, :])[:, 0] for encode, text in pairs]
        return self.output(torch.cat(states, -1))


def siamese(dropout=0.0, seed=4):
    torch.manual_seed(seed)
    return sharpened(Siamese(dropout)).train()


def step(model, texts, seed=1):
    """Loss and gradients of a training step."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(*texts).float().square().sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@TEXTS
@pytest.mark.parametrize("attribution", ["gradient", "integrated", "attention"])
def test_each_call_has_the_mask_that_an_encoder_of_its_own_would_have(texts, attribution):
    """With q = 1 nothing is drawn: loss and gradients are those of two equal encoders, one for each text."""
    model = siamese()
    apart = model.apart()
    options = {"attribution": attribution, "integrated_steps": 3, "integrated_path": "joint", "cross_tuning": "off"}
    results = []
    for each in (model, apart):
        with ADDrop(p=0.4, q=1.0, **options).attach(each) as regularizer:
            results.append(step(each, texts))
            if each is model:
                counted = regularizer.statistics.take()["valid/encoder.self[0]"]
    assert counted == 2 * sum(int(text.size(1) * text.ne(PAD).sum()) for text in texts), "two heads, every query row"
    (loss, gradients), (expected, parts) = results
    torch.testing.assert_close(loss, expected)
    assert not loss.allclose(step(model, texts)[0])
    for name, gradient in gradients.items():
        other = parts.get(name.replace("encoder.", "second.", 1)) if name.startswith("encoder.") else None
        torch.testing.assert_close(gradient, parts[name] if other is None else parts[name] + other)


@pytest.mark.parametrize("name", [*METHODS, *LEAVING_OUT])
def test_recomputed_calls_cannot_be_told_apart_and_are_refused(name):
    """Activation checkpointing runs the calls again in the backward."""
    (method, options), model = {**METHODS, **LEAVING_OUT}[name], siamese()
    ran = r"^encoder\.self\[\d\] \(encoder\S*\) ran 2 times in one forward"
    again = "activation checkpointing runs it again in the backward, where it can't be told which mask is meant"
    with build(method, **options).attach(model):
        step(model, OF_THEIR_OWN)
        model.encoder.checkpointed = True
        with pytest.raises(RuntimeError, match=f"{ran}, and {again}"):
            step(model, OF_THEIR_OWN)
        model.encoder.checkpointed = False
        step(model, OF_THEIR_OWN)
    model.encoder.checkpointed = True
    step(model, OF_THEIR_OWN)


@pytest.mark.parametrize(("name", "checkpointed"), [*((name, True) for name in METHODS), ("random", "reentrant")])
def test_two_checkpointed_forwards_before_one_backward_are_refused(name, checkpointed, classifier):
    """The first one's masks are gone with the second."""
    method, options = METHODS[name]
    classifier.encoder.checkpointed = checkpointed
    first, second = EQUALLY_LONG
    with build(method, **options).attach(classifier):
        for text in (first, second):
            classifier(text).square().sum().backward()
        both = classifier(first).square().sum() + classifier(second).square().sum()
        with pytest.raises(RuntimeError, match=r"ran in several forwards before one backward, and activation check"):
            both.backward()


class Nested(TinyClassifier):
    """Recomputes the whole encoder, whose layers recompute themselves, as Swin does."""

    def forward(self, tokens):
        there = tokens.ne(PAD)[:, None, None, :]
        if not self.encoder.checkpointed:
            return self.output(self.encoder(tokens, there)[:, 0])
        return self.output(checkpoint(self.encoder, tokens, there, use_reentrant=False)[:, 0])


@pytest.mark.parametrize("name", ["gradient", "random", "head_drop"])
def test_checkpointing_inside_of_checkpointing_recomputes_a_call_twice(name):
    """A repeated call is no second forward: loss and gradients are those without checkpointing."""
    torch.manual_seed(3)
    (method, options), model, steps = METHODS[name], sharpened(Nested(dropout=0.2)).train(), []
    for checkpointed in (False, True):
        model.encoder.checkpointed = checkpointed
        with build(method, **options).attach(model):
            steps.append([step(model, EQUALLY_LONG[:1], seed) for seed in (1, 2, 3)])
    torch.testing.assert_close(*steps)


@TEXTS
@pytest.mark.parametrize("name", [*LEAVING_OUT, "attention_layer_drop"])
def test_each_call_is_left_out_for_itself(texts, name):
    method, options = {**METHODS, **LEAVING_OUT}[name]
    model, dropped = siamese(dropout=0.2), set()
    with build(method, **options).attach(model) as regularizer:
        title = {"both": "layer_drop/"}.get(name, "") + "encoder.self[1]"
        for seed in range(12):
            step(model, texts, seed)
            sums = regularizer.statistics.take()
            dropped.add((float(sums[f"dropped/{title}"]), float(sums[f"valid/{title}"])))
    assert dropped == {(0, 2), (1, 2), (2, 2)}


class Twice(nn.Module):
    """Runs an attention twice, as DiffLlama's layers do."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, *given):
        return self.attention(x, *given) + self.attention(-x, *given)


@pytest.mark.parametrize("layers", ["usual", "twice"])
@pytest.mark.parametrize("other", ["layer_drop", "attention_layer_drop"])
def test_a_call_that_does_not_run_leaves_the_others_their_own_masks(layers, other):
    """Nothing tells the texts apart: they are equally long, without padding. With q = 1 no mask is drawn at random."""
    texts, model = [tokens([6, 6, 6], 6, seed=seed) for seed in (1, 2)], siamese()
    for layer in model.encoder.layers if layers == "twice" else ():
        layer.attentions[0] = Twice(layer.attentions[0])
    ours = ADDrop(p=0.4, q=1.0, cross_tuning="off", sites="*")
    with ours.attach(model):
        model(*texts)
        expected = {site.name: [keep_of(call) for call in site.calls.made] for site in ours.attached_sites}
    ran = {name: set() for name in expected}
    with Combination([build(other, p=0.5, sites="*"), ours]).attach(model):
        for seed in range(15):
            torch.manual_seed(seed)
            model(*texts)
            for site in ours.attached_sites:
                calls = [call for call in site.calls.made if not call.uniform]
                ran[site.name].add(tuple(call.index for call in calls))
                for call in calls:
                    assert keep_of(call).equal(expected[site.name][call.index]), (site.name, call.index)
    for name, masks in expected.items():
        every = tuple(range(len(masks)))
        half = len(every) // 2
        assert not masks[0].equal(masks[half])
        if other == "layer_drop":
            assert ran[name] == {(), every, every[:half], every[half:]}, "layers are left out as a whole"
        assert any(calls and calls[0] > 0 for calls in ran[name])


def test_attend_out_refuses_a_second_call_by_name():
    """Masks are proposed from the batch's tokens: there is no second batch."""
    model = siamese()
    method = AttendOut(problem=TokensOnly("first"), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    refused = r"^encoder.self\[0\] \(\S+\) runs more than once in a forward: attend_out proposes one mask per site"
    with method.attach(model), pytest.raises(RuntimeError, match=refused):
        model(*EQUALLY_LONG)


def test_a_call_that_the_probe_left_out_is_refused():
    """As with LayerDrop: the probe skips the first text's layer, the forward does not."""
    model, runs = siamese(), []

    def skip_in_the_probe(module, args):
        runs.append(module)
        module.skip = {0, 1} if len(runs) % 4 == 1 else set()

    model.encoder.register_forward_pre_hook(skip_in_the_probe)
    said = r"ran more often in the forward than in the probe \(1\).*turn LayerDrop off"
    with ADDrop(p=1.0, q=1.0, cross_tuning="off").attach(model), pytest.raises(RuntimeError, match=said):
        model(*EQUALLY_LONG)


def test_a_part_of_the_model_that_runs_by_itself_is_plain():
    model = siamese()
    there = EQUALLY_LONG[1].ne(PAD)[:, None, None, :]
    plain = model.encoder(EQUALLY_LONG[1], there)
    with ADDrop(p=1.0, q=1.0, cross_tuning="off").attach(model):
        model(*EQUALLY_LONG)
        assert model.encoder(EQUALLY_LONG[1], there).equal(plain)


def test_one_attribution_for_several_calls_is_refused():
    model = siamese()
    sites = find_sites(model)
    with recording(sites):
        objective = model(*EQUALLY_LONG).sum()
        assert [len(site.tapes) for site in sites] == [2, 2]
        with pytest.raises(ValueError, match=r"^encoder.self\[0\] ran 2 times in the forward; give output_gradients"):
            gradient_attribution(objective, sites)
