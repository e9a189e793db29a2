"""Child-Tuning against literal evaluations; models and states of both methods that act on weights."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin.regularizers import Outcome, build
from attn_reg_plugin.regularizers.child_tuning import stacked_parameters
from tests.attention.tiny_model import TinyClassifier, same_step, tokens, training_step

pytestmark = pytest.mark.usefixtures("one_thread")
IDS, LABELS = tokens([6, 3, 5], 6, seed=4), torch.tensor([2, 0, 1])


def classifier():
    torch.manual_seed(5)
    return TinyClassifier(0.1).train()


def update(model, regularizer, optimizer, ids=IDS):
    loss = F.cross_entropy(model(ids), LABELS)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    regularizer.end_update()
    return loss.detach()


# -- Child-Tuning -----------------------------------------------------------------------------------------------------


def gradients_of(model, regularizer, **how):
    """Of two batches that are accumulated, with and without the method."""
    found = []
    for one in (regularizer, None):
        twin = copy.deepcopy(model)
        if one is not None:
            one.attach(twin)
        if one is not None and how:
            one.estimate(lambda b, twin=twin: F.cross_entropy(twin(b[0]), b[1]), how["batches"])
        torch.manual_seed(7)
        for ids in (IDS, IDS.flip(0)):
            F.cross_entropy(twin(ids), LABELS).backward()
        found.append({name: weight.grad for name, weight in twin.named_parameters()})
    return found


def test_free_masks_are_drawn_for_every_update():
    model, regularizer = classifier(), build("child_tuning", p=0.4)
    regularizer.seed = 3  # else it is drawn, and dropout is another
    masked, plain = gradients_of(model, regularizer)
    kept = total = 0
    for name, gradient in plain.items():
        zero = (masked[name] == 0) & (gradient != 0)
        torch.testing.assert_close(masked[name], gradient * ~zero / 0.4, rtol=1e-4, atol=1e-6)
        kept, total = kept + int((~zero & (gradient != 0)).sum()), total + int((gradient != 0).sum())
    assert 0.35 < kept / total < 0.45
    sums = regularizer.statistics.take()
    assert 0.35 < float(sums["gradients_kept"]) / sums["gradients"] < 0.45
    regularizer.end_update()
    regularizer.model.zero_grad()
    torch.manual_seed(7)
    for ids in (IDS, IDS.flip(0)):
        F.cross_entropy(regularizer.model(ids), LABELS).backward()
    again = regularizer.model.output.weight.grad
    assert not (again == 0).equal(masked["output.weight"] == 0), "the next update has another mask"


def test_driven_masks_keep_what_has_the_largest_fisher_information():
    model, regularizer = classifier(), build("child_tuning", mode="driven", p=0.3)
    batches = [(IDS, LABELS), (IDS.roll(1, 0), LABELS)]
    masked, plain = gradients_of(model, regularizer, batches=batches)
    names, reference = list(stacked_parameters(model)), copy.deepcopy(model).eval()
    information = {name: 0 for name in names}
    for ids, labels in batches:
        reference.zero_grad()
        F.cross_entropy(reference(ids), labels).backward()
        for name in names:
            information[name] = information[name] + reference.get_parameter(name).grad ** 2 / 2
    values = sorted((value for one in information.values() for value in one.flatten().tolist()), reverse=True)
    threshold = values[round(0.3 * len(values)) - 1]
    assert all(name.startswith("encoder.layers.") for name in names) and len(names) < len(plain)
    for name, gradient in plain.items():
        keep = information[name] >= threshold if name in information else torch.ones_like(gradient).bool()
        assert masked[name].equal(gradient * keep)
    assert regularizer.model.training, "it is in training mode again"


@pytest.mark.parametrize("examples, estimated", [(0, 3), (2, 2)])
def test_the_fisher_information_is_of_as_many_examples_as_asked(examples, estimated):
    model, asked = classifier(), []

    class Counting(Task):
        def loss(self, model, inputs):
            asked.append(inputs[0])
            return super().loss(model, inputs)

    with build("child_tuning", mode="driven", fisher_examples=examples).attach(model) as regularizer:
        regularizer.bind(Counting(LABELS))
        model(IDS)
    assert torch.cat(asked).equal(IDS[:estimated])


def kept_share(model, name="encoder.layers.0.feed_forward.0.weight"):
    gradient = model.get_parameter(name).grad
    return float((gradient != 0).float().mean())


def test_what_is_unfrozen_later_is_masked_too():
    model, regularizer = classifier(), build("child_tuning", p=0.3)
    model.encoder.requires_grad_(False)
    with regularizer.attach(model):
        F.cross_entropy(model(IDS), LABELS).backward()
        model.encoder.requires_grad_(True)
        F.cross_entropy(model(IDS), LABELS).backward()
        assert 0.15 < kept_share(model) < 0.45
        assert len(regularizer._attachment.handles) == 3 + len(list(model.parameters())), "each has one hook"
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_what_is_unfrozen_after_the_fisher_information_is_said(caplog):
    model, regularizer = classifier(), build("child_tuning", mode="driven")
    frozen = model.encoder.layers[0].feed_forward
    frozen.requires_grad_(False)
    with regularizer.attach(model):
        regularizer.estimate(lambda b: F.cross_entropy(model(b), LABELS), [IDS])
        for _ in range(2):
            F.cross_entropy(model(IDS), LABELS).backward()
            assert ("is trained whole" in caplog.text) == frozen[0].weight.requires_grad
            frozen.requires_grad_(True)
        F.cross_entropy(model(IDS), LABELS).backward()
    assert caplog.text.count("is trained whole") == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_masked_too(copied):
    model = classifier()
    with build("child_tuning", p=0.3).attach(model):
        twin = copied(model)
        F.cross_entropy(twin(IDS), LABELS).backward()
        assert 0.15 < kept_share(twin) < 0.45


def test_driven_needs_the_fisher_information_and_a_model_with_layers():
    with (
        build("child_tuning", mode="driven").attach(classifier()) as regularizer,
        pytest.raises(RuntimeError, match="needs the Fisher information: call"),
    ):
        regularizer.model(IDS)
    regularizer.attach(classifier())
    with pytest.raises(ValueError, match="at least one batch"):
        regularizer.estimate(lambda b: b, [])
    with pytest.raises(ValueError, match="has no stacked layers"):
        build("child_tuning", mode="driven").attach(torch.nn.Linear(2, 2))


class Task:
    """A face's training, and its problem: labels of its own for the same texts."""

    def __init__(self, labels):
        self.labels = labels

    def problem(self, subset):
        return self, len(IDS)

    def validation(self, n):
        return zip(IDS[:n].split(1), self.labels[:n].split(1), strict=True)

    def loss(self, model, inputs):
        return Outcome(F.cross_entropy(model(inputs[0]), inputs[1]))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", ["child_tuning", "child_tuning+head_drop"])
def test_a_copy_leaves_the_training_where_it_is(name, begun):
    """A task with its data is no part of a model, and may not be copied at all."""
    model, task = classifier(), Task(LABELS)
    task.lock = threading.Lock()
    driven = {"child_tuning": {"mode": "driven"}}
    with build(name, **(driven if "+" in name else driven[name])).attach(model) as regularizer:
        regularizer.bind(task)
        if begun:
            F.cross_entropy(model(IDS), LABELS).backward()
        twin = copy.deepcopy(model)
        F.cross_entropy(twin(IDS), LABELS).backward()
        assert 0 < kept_share(twin) < 1 and pickle.dumps(model)


@pytest.mark.parametrize("loaded", [False, True])
def test_another_task_on_the_same_model_has_masks_of_its_own(loaded):
    """Where a face trains on it; a state that was loaded for it is kept."""

    def masks(regularizer, task):
        with regularizer.attach(model):
            regularizer.bind(task)
            model(IDS)
            regularizer.unbind()
        return regularizer.masks

    def differ(first, second):
        return not all(mask.equal(second[name]) for name, mask in first.items())

    model, driven = classifier(), build("child_tuning", mode="driven")
    tasks = [Task(LABELS), Task(LABELS.flip(0).roll(1))]
    first = masks(driven, tasks[0])
    if loaded:
        driven.load_state_dict(driven.state_dict())
    second = masks(driven, tasks[1])
    assert differ(first, second) != loaded
    assert not differ(masks(driven, tasks[1]), masks(build("child_tuning", mode="driven"), tasks[1]))


# -- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options", [("mixout", {}), ("child_tuning", {}), ("child_tuning", {"mode": "driven"})], ids=str
)
def test_a_second_model_has_nothing_of_the_first(name, options):
    """One regularizer over seeds or folds is as a new one each time; on the same model again it goes on."""

    def train(regularizer, seed):
        torch.manual_seed(seed)
        model = TinyClassifier(0.1).train()
        with regularizer.attach(model):
            if options:
                regularizer.estimate(lambda b: F.cross_entropy(model(b), LABELS), [IDS])
            for _ in range(3):
                update(model, regularizer, torch.optim.SGD(model.parameters(), 0.3))
        return model

    regularizer = build(name, **options)
    first = train(regularizer, 1)
    begun = regularizer.state_dict()
    with regularizer.attach(first):
        assert regularizer.state_dict()["seed"] == begun["seed"]
    again, new = train(regularizer, 2), train(build(name, **options), 2)
    assert all(ours.equal(theirs) for ours, theirs in zip(again.parameters(), new.parameters(), strict=True))


@pytest.mark.parametrize("name", ["mixout", "child_tuning"])
def test_the_masks_of_weights_and_updates_have_nothing_in_common(name):
    """Nor do they move from one weight to the next, update by update."""
    torch.manual_seed(1)
    model, masks = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(3))).train(), []
    with build(name, p=0.5).attach(model) as regularizer:
        for _ in range(3):
            model(torch.randn(4, 16)).sum().backward()
            masks += [weight.grad == 0 for weight in model.parameters()]
            model.zero_grad()
            regularizer.end_update()
    shares = [float((one == other).float().mean()) for one, other in itertools.combinations(masks, 2)]
    assert len(shares) == 36 and min(shares) > 0.35 and max(shares) < 0.65


@pytest.mark.parametrize("name", ["mixout", "child_tuning", "r_drop"])
def test_the_same_method_twice_on_a_model_is_refused(name):
    model = classifier()
    with (
        build(name).attach(model),
        pytest.raises(ValueError, match=f"{name} acts on the model already; detach"),
    ):
        build(name).attach(model)
    with build(name).attach(model):
        pass


def test_mixout_resumes_with_weights_that_are_frozen_again():
    """Gradual unfreezing: what a later epoch trains has its pretrained value in the state, too."""
    model, regularizer = classifier(), build("mixout")
    with regularizer.attach(model):
        update(model, regularizer, torch.optim.SGD(model.parameters(), 0.3))
        state = regularizer.state_dict()
    frozen, again = classifier(), build("mixout")
    frozen.encoder.requires_grad_(False)
    with again.attach(frozen):
        again.resume(state)
        assert again.pretrained.keys() == state["pretrained"].keys()
    with (
        build("mixout", weights="all").attach(classifier()) as other,
        pytest.raises(ValueError, match="'linear', and not"),
    ):
        other.resume(state)


@pytest.mark.parametrize("name, options", [("mixout", {"p": 0.0}), ("child_tuning", {"p": 1.0})])
def test_nothing_is_plain_training(name, options, dropping_translator, batch):
    plain = training_step(dropping_translator, batch)
    with build(name, **options).attach(dropping_translator):
        assert same_step(training_step(dropping_translator, batch), plain)


@pytest.mark.parametrize("name, options", [("mixout", {"weights": "all"}), ("child_tuning", {})])
def test_evaluation_is_untouched(name, options):
    model = classifier()
    plain = model.eval()(IDS)
    F.cross_entropy(plain, LABELS).backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    with build(name, **options).attach(model) as regularizer:
        update(model.train(), regularizer, torch.optim.SGD(model.parameters(), 0.0))
        model.zero_grad()
        again = model.eval()(IDS)
        F.cross_entropy(again, LABELS).backward()
        assert again.equal(plain)
        assert all(w.grad.equal(g) for w, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize(
    "name, options", [("mixout", {}), ("child_tuning", {}), ("child_tuning", {"mode": "driven"})], ids=str
)
def test_a_training_goes_on_from_its_state(name, options):
    """Bit for bit, in a model that was loaded from a checkpoint."""

    def train(model, regularizer, updates, state=None):
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        with regularizer.attach(model):
            if state is not None:
                regularizer.resume(state)
            elif options:
                regularizer.estimate(lambda b: F.cross_entropy(model(b), LABELS), [IDS])
            for _ in range(updates):
                update(model, regularizer, optimizer)
        return model.state_dict()

    torch.manual_seed(9)
    whole, regularizer = classifier(), build(name, **options)
    train(whole, regularizer, 2)
    half, state = copy.deepcopy(whole), copy.deepcopy(regularizer.state_dict())
    random = torch.get_rng_state()
    expected = train(whole, regularizer, 2, state)
    torch.set_rng_state(random)
    found = train(half, build(name, **options), 2, state)
    assert all(found[key].equal(value) for key, value in expected.items())
    if options or name == "mixout":
        other = (
            TinyClassifier(classes=7)
            if name == "mixout"
            else torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
        )
        with build(name, **options).attach(other) as unfit, pytest.raises(ValueError, match="another model"):
            unfit.resume(state)
