"""Every option of every method is held to its type and range, a state to its method; what statistics show."""

import copy
import math
import pickle
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import REGISTRY, build, options_of
from attn_reg_plugin.regularizers.base.options import Interval
from attn_reg_plugin.regularizers.base.statistics import Quantity, Shown, Statistics, summary

EVERY = [(name, option) for name, method in sorted(REGISTRY.items()) for option in options_of(method)]
REQUIRED = {"scheduled_dropout": {"schedule": "drop *: 0:0.5"}}
EACH_METHOD = pytest.mark.parametrize("method", sorted(REGISTRY))


def make(method, **options):
    return build(method, **{**REQUIRED.get(method, {}), **options})


def refused(option):
    """Values that an option must not take, with what is said of them."""
    kind = getattr(option.type, "__name__", option.type)
    wrong = {
        "bool": ["false", 1, 0.0, None],
        "int": [1.5, 2.0, "3", True, None, math.nan],
        "float": ["0.1", False, None, [0.1], torch.tensor(0.1)],
        "str": [3, None, True, b"text"],
    }
    for value in wrong[kind]:
        yield value, TypeError, ".*, but must be (True or False|a whole |a number|text)"
    if option.metadata.get("choices"):
        yield "other", ValueError, f"'other', but must be one of {option.metadata['choices'][0]}"
    if kind not in ("int", "float"):
        return
    for value in (10**400, -(10**400)):
        yield value, ValueError, "a number of more than 308 digits, but must be finite"
    for value in (math.nan, math.inf, -math.inf) if kind == "float" else ():
        yield value, ValueError, f"{value}, but must "
    allowed = Interval(option.metadata["within"])
    for end, outwards in zip(allowed.bounds, (-1, 1), strict=True):
        for value in (end, end + outwards):
            if math.isfinite(value) and value not in allowed:
                value = int(value) if kind == "int" else float(value)
                yield value, ValueError, f"{value}, but must (lie in|be at least|be above)"


@pytest.mark.parametrize("method, option", EVERY, ids=lambda value: getattr(value, "name", value))
def test_every_option_is_held_to_its_type_and_range(method, option):
    assert isinstance(make(method), REGISTRY[method]), "the defaults are allowed"
    for value, error, said in refused(option):
        with pytest.raises(error, match=f"^{option.name} is {said}"):
            make(method, **{option.name: value})


@pytest.mark.parametrize(
    "text, inside, outside, said",
    [
        ("[0, 1]", [0, 0.5, 1], [-0.1, 1.1, math.nan], "lie in [0, 1]"),
        ("(0, 1)", [0.5], [0, 1], "lie in (0, 1)"),
        ("[0, 1)", [0], [1], "lie in [0, 1)"),
        ("(0, inf)", [1e-9, 1e30], [0, math.inf, math.nan], "be above 0"),
        ("[1, inf)", [1, 7], [0, math.inf], "be at least 1"),
    ],
)
def test_intervals(text, inside, outside, said):
    allowed = Interval(text)
    assert all(value in allowed for value in inside) and not any(value in allowed for value in outside)
    assert str(allowed) == said


def test_numbers_that_are_not_pythons_own_are_numbers():
    assert ADDrop(p=Fraction(1, 3), q=1).q == 1
    assert build("attend_out", steps=np.int64(4), generator_lr=np.float32(0.5)).steps == 4


@EACH_METHOD
def test_a_state_has_its_methods_name_and_another_methods_is_refused(method):
    """A state made before states had names is loaded."""
    state = make(method).state_dict()
    assert state["method"] == method
    for other in sorted(REGISTRY):
        again = make(other)
        if other != method:
            with pytest.raises(ValueError, match=f"^the state is one of {method}, but must be one of {other}$"):
                again.load_state_dict({**state, "updates": 7})
            assert (again.epoch, again.updates) == (None, 0)
    for number in (3, 4):
        again = make(method)
        again.load_state_dict({**state, "epoch": number, "updates": 7})
        assert (again.epoch, again.updates) == (number, 7)
        state.pop("method", None)


@pytest.mark.parametrize(
    "state, error, said",
    [
        ([1], TypeError, "the state is a list, but must be what ad_drop's state_dict"),
        ({}, ValueError, "the state isn't one of ad_drop: it lacks epoch and updates$"),
        ({"epoch": "x", "updates": 1}, ValueError, "the state's epoch is 'x', but must be a whole number"),
        ({"epoch": 0, "updates": 1}, ValueError, "the state's epoch is 0, but must be"),
        ({"epoch": 1, "updates": -1}, ValueError, "the state's updates is -1, but must be at least 0"),
        ({"epoch": 1, "updates": None}, ValueError, "the state's updates is None, but must be"),
        ({"epoch": 1, "updates": 1.5}, ValueError, "the state's updates is 1.5, but must be"),
    ],
)
def test_a_state_that_is_none_is_refused(state, error, said):
    method = ADDrop()
    with pytest.raises(error, match=f"^{said}"):
        method.load_state_dict(state)
    assert (method.epoch, method.updates) == (None, 0)


def test_sums_means_and_shares():
    statistics = Statistics()
    for value in (1.0, torch.tensor(2.0), 4.0):
        statistics.add("loss", value)
        statistics.add("updates", 1.0)
    statistics.add("part", 0.5)
    quantities = [
        Quantity("loss", title="loss_sum"),
        Quantity("loss", "updates"),
        Quantity("part", "loss", "share"),
        Quantity("part", "never"),
        Quantity("never"),
        Quantity("part", "loss", "of none", needs="never"),
    ]
    expected = {"loss_sum": Shown(7.0, None), "loss": Shown(7 / 3, 3.0), "share": Shown(0.5 / 7, 7.0)}
    assert summary(quantities, statistics.take()) == {**expected, "never": Shown(0.0, None)}


def test_a_copy_leaves_out_what_a_device_has_not_finished():
    """Events of a GPU cannot be copied; a lock stands for one."""
    statistics = Statistics()
    statistics.add("forwards", 1.0)
    statistics._running.append(("step_seconds", threading.Lock(), threading.Lock()))
    for twin in (copy.deepcopy(statistics), pickle.loads(pickle.dumps(statistics))):
        twin.add("forwards", 2.0)
        assert twin.take() == {"forwards": 3.0}
    assert statistics._sums == {"forwards": 1.0} and len(statistics._running) == 1
