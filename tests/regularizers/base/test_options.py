"""Every option of every method is held to its declared type and range; a state to the method that it is of."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import REGISTRY, ScheduledDropout, build, options_of
from attn_reg_plugin.regularizers.base.options import Interval

EVERY = [(name, option) for name, method in sorted(REGISTRY.items()) for option in options_of(method)]
REQUIRED = {"scheduled_dropout": {"schedule": "drop *: 0:0.5"}}
NUMBERS = [(name, option) for name, option in EVERY if option.type in ("int", "float")]


def named(value):
    return value.name if hasattr(value, "metadata") else str(value)


def make(method, **options):
    return build(method, **{**REQUIRED.get(method, {}), **options})


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_the_defaults_are_allowed(method):
    assert isinstance(make(method), REGISTRY[method])


@pytest.mark.parametrize("method, option", EVERY, ids=named)
def test_a_value_of_another_type_is_refused_with_the_options_name(method, option):
    wrong = {
        "bool": ["false", 1, 0.0, None],
        "int": [1.5, 2.0, "3", True, None, math.nan],
        "float": ["0.1", False, None, [0.1], torch.tensor(0.1)],
        "str": [3, None, True, b"text"],
    }
    for value in wrong[option.type]:
        with pytest.raises(
            TypeError, match=f"^{option.name} is .*, but must be (True or False|a whole |a number|text)"
        ):
            make(method, **{option.name: value})


@pytest.mark.parametrize("method, option", [entry for entry in NUMBERS if entry[1].type == "float"], ids=named)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(method, option, value):
    with pytest.raises(ValueError, match=f"^{option.name} is {value}, but must "):
        make(method, **{option.name: value})


@pytest.mark.parametrize("method, option", NUMBERS, ids=named)
def test_every_number_declares_a_range_and_is_held_to_it(method, option):
    allowed = Interval(option.metadata["help"].within)
    for end, outwards in zip(allowed.bounds, (-1, 1), strict=True):
        for value in (int(end) if math.isfinite(end) else end, end + outwards):
            if math.isfinite(value) and value not in allowed:
                value = int(value) if option.type == "int" else value
                with pytest.raises(
                    ValueError, match=f"^{option.name} is {value}, but must (lie in|be at least|be above)"
                ):
                    make(method, **{option.name: value})


@pytest.mark.parametrize("method, option", [entry for entry in EVERY if entry[1].metadata.get("choices")], ids=named)
def test_choices_are_listed(method, option):
    with pytest.raises(
        ValueError, match=f"^{option.name} is 'other', but must be one of {option.metadata['choices'][0]}"
    ):
        make(method, **{option.name: "other"})


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


def test_what_is_said():
    for options, message in (
        ({"generator_lr": math.inf}, "generator_lr is inf, but must be above 0, and finite"),
        ({"generator_clip_norm": -1.0}, "generator_clip_norm is -1.0, but must be at least 0"),
        ({"baseline_momentum": 1}, "baseline_momentum is 1, but must lie in [0, 1)"),
    ):
        with pytest.raises(ValueError) as refused:
            build("attend_out", **options)
        assert str(refused.value) == message
    with pytest.raises(TypeError) as refused:
        build("attend_out", steps=1.5)
    assert str(refused.value) == "steps is 1.5, but must be a whole number"


def test_numbers_that_are_not_pythons_own_are_numbers():
    assert ADDrop(p=Fraction(1, 3), q=1).q == 1
    numpy = pytest.importorskip("numpy")
    assert build("attend_out", steps=numpy.int64(4), generator_lr=numpy.float32(0.5)).steps == 4


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_a_state_has_its_methods_name_and_another_methods_is_refused(method):
    state = make(method).state_dict()
    assert state["method"] == method
    for other in sorted(REGISTRY):
        again = make(other)
        if other == method:
            again.load_state_dict({**state, "epoch": 3, "updates": 7})
            assert (again.epoch, again.updates) == (3, 7)
            continue
        with pytest.raises(ValueError, match=f"^the state is one of {method}, but must be one of {other}$"):
            again.load_state_dict({**state, "updates": 7})
        assert (again.epoch, again.updates) == (None, 0)


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_a_state_made_before_states_had_names_is_loaded(method):
    state = {name: value for name, value in make(method).state_dict().items() if name != "method"}
    again = make(method)
    again.load_state_dict({**state, "epoch": 2, "updates": 5})
    assert (again.epoch, again.updates) == (2, 5)


@pytest.mark.parametrize("method, option", NUMBERS, ids=named)
def test_a_number_that_no_float_holds_is_refused(method, option):
    for value in (10**400, -(10**400)):
        with pytest.raises(ValueError, match=f"^{option.name} is a number of more than 308 digits, but must be finite"):
            make(method, **{option.name: value})


@pytest.mark.parametrize(
    "state, error, said",
    [
        ([1], TypeError, "the state is a list, but must be what ad_drop's state_dict"),
        (None, TypeError, "the state is a NoneType, but must be"),
        ({"epoch": "x", "updates": 1}, ValueError, "the state's epoch is 'x', but must be a whole number, at least 1"),
        ({"epoch": 0, "updates": 1}, ValueError, "the state's epoch is 0, but must be"),
        ({"epoch": 1, "updates": -1}, ValueError, "the state's updates is -1, but must be a whole number, at least 0"),
        ({"epoch": 1, "updates": None}, ValueError, "the state's updates is None, but must be"),
        ({"epoch": 1, "updates": 1.5}, ValueError, "the state's updates is 1.5, but must be"),
    ],
)
def test_a_state_that_counts_in_other_than_numbers_is_refused(state, error, said):
    method = ADDrop()
    with pytest.raises(error, match=f"^{said}"):
        method.load_state_dict(state)
    assert (method.epoch, method.updates) == (None, 0)


def test_a_state_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^the state isn't one of scheduled_dropout: it lacks epoch and updates$"):
        ScheduledDropout(schedule="drop *: 0:0.5").load_state_dict({})
