"""The methods as objects: settings that travel, what they say of themselves, and arguments of other kinds refused."""

import math

import pytest
import torch
from torch import nn

import attn_reg_plugin
from attn_reg_plugin import (
    ADDrop,
    AttentionDropout,
    HeadDrop,
    RDrop,
    attach,
    build,
    candidate_region,
    drop_candidates,
    find_sites,
    regularized_attention,
)
from attn_reg_plugin.regularizers import REGISTRY, Combination, options_of
from tests.attention.tiny_model import TinyClassifier

IDS = torch.arange(3, 9).view(2, 3)
OPTIONS = {"scheduled_dropout": {"schedule": "drop encoder.self: 0:0.6 100:0.1"}}


def test_a_plain_epoch_of_one_method_beside_another_logs_no_zeros():
    model, regularizer = TinyClassifier(), Combination([ADDrop(), HeadDrop(p=0.5)])
    regularizer.attach(model)
    for epoch, probed in enumerate((set(), {"probe_share", "probe_fallbacks"}), start=1):
        regularizer.begin_epoch(epoch)
        with regularizer.statistics.seconds("step_seconds", torch.device("cpu")):
            model.train()(IDS).sum().backward()
        logged = regularizer.summary()
        assert {name for name in logged if name.startswith("probe")} == probed and logged["regularized"] > 0


def test_an_error_inside_a_property_is_said():
    class Broken(HeadDrop):
        quantities = property(lambda self: self.no_such_thing)

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'no_such_thing'"):
        _ = Broken().quantities


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_can_be_imported_and_its_help_lists_its_options(name):
    method = REGISTRY[name]
    assert getattr(attn_reg_plugin, method.__name__) is method
    assert all(f"\n    {entry.name}: {entry.metadata['help']}" in method.__doc__ for entry in options_of(method))


def test_attaching_in_one_line_says_what_is_attached():
    model = TinyClassifier().train()
    with attach(model, "ad_drop", p=0.2, cross_tuning="update:3") as regularizer:
        said = "ad_drop on 2 of 2 attentions of TinyClassifier: encoder.self; p 0.2, q 0.3; every other 3 updates"
        assert repr(regularizer._attachment) == said
        model(IDS).sum().backward()
        assert regularizer.summary()["regularized"] == 0
        regularizer.begin_update(3)
        model(IDS).sum().backward()
        found = regularizer.summary()
        assert found["regularized"] == 1 and 0 <= found["drop_encoder.self[0]"] <= 0.2 + 0.2
    assert repr(attach(torch.nn.Linear(2, 2), "r_drop", weight=2.0)) == "r_drop on Linear; weight 2.0"


MODEL = "^model is {}, but must be a torch.nn.Module that is not compiled by torch.jit$"
STATES, NUMBERS = torch.zeros(1, 2, 3, 4), torch.ones(1, 1, 1, 3)
MASK = "^valid is a {}, but must be a tensor of torch.bool, True = attend$"
SHAPE = r"^valid has the shape \(1, 1, 1, 3, 1\), but must be broadcastable"
BIAS = "^bias is a tensor of {}, but must be floating-point.* as valid"


def attend(**given):
    return regularized_attention(**{"query": STATES, "key": STATES, "value": STATES, **given})


@pytest.mark.parametrize(
    "call, error, said",
    [
        *(
            (lambda given=given, verb=verb: verb(given), TypeError, MODEL.format(kind))
            for given, kind in (
                (None, "of type NoneType"),
                ("bert", "of type str"),
                ([TinyClassifier()], "of type list"),
                (TinyClassifier, "the class TinyClassifier"),
                (len, "of type builtin_function_or_method"),
                (torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "of type TopLevelTracedModule"),
            )
            for verb in (find_sites, ADDrop().attach, RDrop().attach)
        ),
        (lambda: find_sites(TinyClassifier(), None), TypeError, "^sites is None, but must be text$"),
        (lambda: attach(TinyClassifier(), ADDrop()), TypeError, r"^method is ADDrop\(.*, but must be a name, such as"),
        (lambda: build(None), TypeError, "^method is None, but must be a name, such as 'ad_drop'"),
        (lambda: ADDrop(objective="loss"), TypeError, "^objective is 'loss', but must be a function"),
        (lambda: ADDrop().supply("x"), TypeError, "^supplied is of type str, but must be a Supplied; give fields by"),
        (lambda: ADDrop().supply({"targets": 1}), TypeError, "^supplied is of type dict"),
        (
            lambda: ADDrop().supply(special_ids=torch.ones(2)),
            TypeError,
            "^the supplied special_ids must be whole numbers",
        ),
        (lambda: ADDrop().supply(targets=[1]), TypeError, "^the supplied targets is of type list, but must be a ten"),
        *(
            (lambda given=given: ADDrop().begin_epoch(given), TypeError, f"^epoch is {given}, but must be a whole")
            for given in (math.nan, 1.5, True)
        ),
        (lambda: ADDrop().begin_epoch(0), ValueError, "^epoch is 0, but must be at least 1$"),
        (lambda: ADDrop().begin_update(-1), ValueError, "^update is -1, but must be at least 0$"),
        (lambda: ADDrop().begin_update(math.nan), TypeError, "^update is nan, but must be a whole number$"),
        *(
            (lambda given=given: ADDrop().begin_training(given), TypeError, "^the number of updates is")
            for given in (math.nan, math.inf, 1.5)
        ),
        (lambda: ADDrop().begin_training(5, 0), ValueError, "^the number of epochs is 0, but must be at least 1$"),
        *(
            (lambda loss=loss, method=method: method.loss(lambda batch: loss, IDS), error, f"^the loss {said}")
            for method in (ADDrop(), Combination([AttentionDropout(), HeadDrop()]), RDrop())
            for loss, error, said in (
                (None, TypeError, "is of type NoneType"),
                (0.5, TypeError, "is of type float"),
                ("0.5", TypeError, "is of type str"),
                (torch.ones(2, requires_grad=True), ValueError, r"must be a scalar, but has the shape \(2,\)"),
                (torch.ones(()), ValueError, r"has no gradient: compute it from the model's outputs, without detach"),
            )
        ),
        (lambda: attend(query=[1.0]), TypeError, "^query is a list, but must be a tensor"),
        (lambda: attend(value=STATES[:, :, 1:]), ValueError, "^key has 3 keys, but value 2; each key has one value$"),
        (lambda: attend(valid=NUMBERS[..., None].bool()), ValueError, SHAPE),
        (lambda: attend(dropout_p=1.0), ValueError, r"^dropout_p is 1.0, but must lie in \[0, 1\)$"),
        (lambda: attend(valid=[[True] * 3]), TypeError, MASK.format("list")),
        *(
            (lambda call=call: call(NUMBERS), TypeError, MASK.format("tensor of torch.float32"))
            for call in (
                lambda valid: attend(valid=valid),
                lambda valid: candidate_region(STATES, valid, 0.5),
                lambda valid: drop_candidates(STATES > 0, valid, 0.5),
            )
        ),
        # idle it would be a mask, active its 0 and 1 would be added to the scores
        *(
            (lambda dtype=dtype: attend(bias=torch.ones(3, 3, dtype=dtype)), TypeError, BIAS.format(dtype))
            for dtype in (torch.bool, torch.int64)
        ),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize(
    "objective, said",
    [
        (lambda outputs, inputs: None, "^the objective is of type NoneType"),
        (lambda outputs, inputs: 0.5, "^the objective is of type float"),
        (lambda outputs, inputs: outputs.sum(-1), r"^the objective must be a scalar, but has the shape \(2,\)"),
        (lambda outputs, inputs: outputs.detach().sum(), "^the objective depends on no selected attention site"),
    ],
)
def test_an_objective_that_is_no_scalar_is_refused_at_the_first_call(objective, said):
    model = TinyClassifier().train()
    with ADDrop(objective=objective).attach(model) as regularizer, pytest.raises((TypeError, ValueError), match=said):
        regularizer.begin_epoch(1)  # plain, but rehearsed
        model(IDS)
