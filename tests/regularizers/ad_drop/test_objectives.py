"""Objectives, each against its sum written out."""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attn_reg_plugin.regularizers.ad_drop.objectives import (
    OfOutputs,
    PseudoLabels,
    label_logit,
    likeliest,
    logits_of,
    token_log_likelihood,
)
from attn_reg_plugin.regularizers.base.context import Supplied
from attn_reg_plugin.regularizers.base.outputs import NoObjective

CLASSES, TOKENS = (4, 3), (3, 5, 7)
MASK = torch.arange(5) < torch.tensor([[5], [3], [0]])
GOLD = torch.tensor([0, 2, 1, 1])
TARGETS = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(1))
TARGETS[0, 1] = TARGETS[2, 0] = -100
SEVERAL = torch.tensor([[1.0, -100, 0], [0, 1, 1], [-100, -100, -100], [0, 0, 0]])


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def spans(seed=0):
    return {"start_logits": numbers(4, 6, seed=seed), "end_logits": numbers(4, 6, seed=seed + 1)}


def literal(labels, outputs, inputs):
    """F, a number at a time: Σ of labels' logits, Σ log P of tokens' labels, Σ of predictions or minus their error."""
    if isinstance(outputs, dict):
        total = 0.0
        for end in ("start", "end"):
            gold = inputs.get(f"{end}_positions")  # what was cut off is taken for the last one
            gold = None if gold is None else gold.clamp(max=5)
            total += literal(labels, outputs[f"{end}_logits"], {"labels": gold})
        return total
    gold, rows = inputs.get("targets", inputs.get("labels")), outputs.float().tolist()
    if outputs.dim() < 2 or outputs.size(-1) == 1 or inputs.get("regression"):
        values, wanted = outputs.float().flatten().tolist(), None if gold is None else gold.flatten().tolist()
        return sum(values) if labels == "pseudo" else -sum((v - w) ** 2 for v, w in zip(values, wanted, strict=True))
    total = 0.0
    if outputs.dim() == 2:
        for b, row in enumerate(rows):
            if labels == "pseudo":
                total += max(row)
            elif gold.shape == outputs.shape:
                total += sum(value for value, holds in zip(row, gold[b].tolist(), strict=True) if holds == 1)
            elif int(gold.flatten()[b]) != -100:
                total += row[int(gold.flatten()[b])]
        return total
    mask = inputs.get("token_mask")
    for b, example in enumerate(rows):
        for t, row in enumerate(example):
            columns = [column for column in range(len(row)) if column != inputs.get("padding_label")]
            label = max(columns, key=row.__getitem__) if labels == "pseudo" else int(gold[b, t])
            real = mask is None or mask.shape != outputs.shape[:2] or bool(mask[b, t])
            known = inputs.get("targets") if labels == "pseudo" else gold
            if real and (known is None or int(known[b, t]) != -100):
                total += row[label] - max(row) - math.log(sum(math.exp(x - max(row)) for x in row))
    return total


CASES = [
    ("pseudo", CLASSES, {}),
    ("pseudo", CLASSES, {"labels": GOLD}),
    *(("gold", CLASSES, {name: gold}) for name in ("labels", "targets") for gold in (GOLD, GOLD.view(4, 1), SEVERAL)),
    *(("gold", CLASSES, {"labels": GOLD.masked_fill(GOLD == 1, -100).view(shape)}) for shape in ((4,), (4, 1))),
    ("gold", CLASSES, {"targets": GOLD, "labels": torch.ones(4, dtype=torch.long)}),
    *((labels, TOKENS, {"targets": TARGETS}) for labels in ("pseudo", "gold")),
    *(
        (labels, TOKENS, {name: TARGETS, "token_mask": MASK})
        for labels in ("pseudo", "gold")
        for name in ("labels", "targets")
    ),
    *(("pseudo", TOKENS, {"token_mask": mask}) for mask in (None, MASK)),
    # an audio model's raw samples; prompts that the mask does not know
    *(
        (labels, TOKENS, {"token_mask": torch.zeros(shape, dtype=torch.bool), "targets": TARGETS})
        for labels in ("pseudo", "gold")
        for shape in ((3, 16000), (3, 3), (2, 5))
    ),
    # also where padding scores best, as it may in Marian; a number that is no column means nothing
    *(("pseudo", TOKENS, {"padding_label": padding}) for padding in (0, 1, 3, 6, 7)),
    *(
        (labels, shape, {name: numbers(*shape[:1] or (1,), seed=1).view(gold)})
        for labels in ("pseudo", "gold")
        for shape in ((4,), (4, 1), ())
        for name, gold in (("targets", -1), ("labels", (-1, 1)))
    ),
    *((labels, CLASSES, {"labels": numbers(4, 3, seed=1), "regression": True}) for labels in ("pseudo", "gold")),
    *(("pseudo", shape, {}) for shape in ((4,), (4, 1))),  # rewards without gold values
    ("pseudo", "spans", {}),
    (
        "gold",
        "spans",
        {"start_positions": torch.tensor([0, 2, -100, 1]), "end_positions": torch.tensor([1, 7, 9, -100])},
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("labels, shape, inputs", CASES)
def test_it_is_the_sum_written_out(labels, shape, inputs, dtype):
    outputs = spans() if shape == "spans" else numbers(*shape).to(dtype)
    if (padding := inputs.get("padding_label", 7)) < 7:
        outputs[..., padding] = 99.0
    expected = pytest.approx(literal(labels, outputs, inputs), rel=1e-5, abs=1e-5)
    ours = OfOutputs(labels)(outputs, inputs)
    assert (ours.dtype, ours.dim()) == (torch.float32, 0) and ours.item() == expected


def test_padding_is_excluded_from_the_gradient_and_pseudo_labels_are_constants():
    logits = numbers(3, 5, 7).requires_grad_()
    objective = token_log_likelihood(logits, None, MASK)
    (gradient,) = torch.autograd.grad(objective, logits)
    expected = torch.nn.functional.one_hot(logits.argmax(-1), 7) - logits.softmax(-1)
    torch.testing.assert_close(gradient, expected * MASK[..., None])
    changed = torch.where(MASK[..., None], logits, numbers(3, 5, 7, seed=2))
    assert token_log_likelihood(changed, None, MASK).equal(objective)


@pytest.mark.parametrize("beside", [{}, {"targets": torch.zeros(3, 5, dtype=torch.long)}])
@pytest.mark.parametrize(
    "mask, given",
    [
        (torch.ones(3, 6).bool(), "has the shape (3, 6)"),
        (torch.ones(5, 3).bool(), "has the shape (5, 3)"),
        (torch.ones(3, 5), "is torch.float32"),
    ],
)
def test_a_token_mask_of_the_loop_has_to_fit(mask, given, beside):
    """A mask that a face read off its batch need not fit, nor one beside outputs that have no tokens."""
    supplied, logits = Supplied(token_mask=mask, **beside), numbers(3, 5, 7)
    with pytest.raises((ValueError, TypeError)) as refused:
        OfOutputs()(logits, supplied.named())
    expected = f"{given}, but logits of shape (3, 5, 7) need a bool tensor of shape (3, 5), True at real tokens"
    assert str(refused.value) == f"the supplied token_mask {expected}"
    OfOutputs()(numbers(3, 7), Supplied(token_mask=mask).named())
    if given.startswith("has"):
        read = OfOutputs()(logits, replace(supplied, read_off=True).named())
        assert read.equal(OfOutputs()(logits, beside))


@pytest.mark.parametrize("kind", ["classes", "tokens", "spans"])
def test_pseudo_labels_of_the_first_pass_hold_for_the_later_ones(kind):
    def outputs(seed):
        return spans(seed) if kind == "spans" else numbers(*(CLASSES if kind == "classes" else TOKENS), seed=seed)

    objective, bare = OfOutputs(), {"token_mask": MASK, "padding_label": 0}
    inputs = {**bare, "pseudo_labels": PseudoLabels()}
    first, second = outputs(0), outputs(5)
    assert objective(first, inputs).equal(objective(first, bare))
    if kind == "spans":
        gold = {f"{end}_positions": first[f"{end}_logits"].argmax(-1) for end in ("start", "end")}
    else:
        gold = {"labels": first.argmax(-1) if kind == "classes" else likeliest(first, 0)}
    frozen = objective(second, inputs)
    torch.testing.assert_close(frozen, OfOutputs("gold")(second, {**gold, "token_mask": MASK}))
    assert not frozen.allclose(objective(second, bare))


@pytest.mark.parametrize(
    "labels, outputs, inputs, said",
    [
        ("pseudo", numbers(2, 3), {}, "the pseudo labels' logits: outputs of shape (2, 3) as 3 classes"),
        ("gold", numbers(2, 3), {"labels": GOLD[:2]}, "the gold labels' logits: outputs of shape (2, 3) as"),
        ("pseudo", numbers(2, 5, 7), {}, "log-likelihoods: outputs of shape (2, 5, 7) as tokens over 7 labels"),
        ("pseudo", numbers(2, 1), {"labels": numbers(2)}, "the predicted values: outputs of shape (2, 1) as a regr"),
        ("gold", numbers(2), {"labels": numbers(2)}, "minus the squared error: outputs of shape (2,) as a regression"),
        ("pseudo", torch.tensor(0.5), {"labels": numbers(1)}, "the predicted values: outputs of shape () as a regress"),
        ("pseudo", spans(), {}, "pseudo answers' start and end"),
    ],
)
def test_the_log_says_once_what_the_outputs_were_read_as(caplog, labels, outputs, inputs, said):
    caplog.set_level(logging.INFO)
    objective = OfOutputs(labels)
    for _ in range(2):
        objective(outputs, inputs)
    assert [said in message for message in caplog.messages] == [True]


def test_half_precision_is_summed_in_fp32():
    logits = torch.full((1, 4000, 2), 8.0, dtype=torch.float16)
    assert token_log_likelihood(logits).item() == pytest.approx(-4000 * math.log(2), rel=1e-5)
    assert label_logit(torch.full((20_000, 2), 8.0, dtype=torch.float16)).item() == 160_000


@pytest.mark.parametrize(
    "outputs",
    [
        lambda logits: logits,
        lambda logits: SimpleNamespace(logits=logits, loss=torch.tensor(1.0)),
        lambda logits: {"loss": torch.tensor(1.0), "logits": logits},
        lambda logits: (logits, {"attn": None}),
        lambda logits: (torch.tensor(0.5), logits, numbers(2, 4, 3)),
        lambda logits: [logits],
    ],
)
def test_logits_are_found(outputs):
    logits = numbers(2, 3)
    assert logits_of(outputs(logits)) is logits


@pytest.mark.parametrize(
    "outputs, held",
    [
        *((outputs, "") for outputs in (None, 3.0, "logits", {}, (), torch.ones(2, 3).long())),
        ({"embeddings": numbers(2, 3)}, r" \(it has embeddings, but no logits, log_probs or scores\)"),
    ],
)
def test_outputs_without_logits_are_refused(outputs, held):
    """The sentence names the way out, and the methods that need none."""
    said = f"^cannot find logits in the model's output of type {type(outputs).__name__}{held}; give an objective="
    with pytest.raises(NoObjective, match=f"{said}.* or use a method that needs none: attention_dropout, attention"):
        OfOutputs()(outputs, {})


NO_GOLD = r"needs gold labels: .* regularizer\.supply\(targets=\.\.\.\)"
UNFIT = r"^the gold labels have the shape \(.*\), which does not fit the logits' "


@pytest.mark.parametrize(
    "labels, outputs, inputs, said",
    [
        ("pseudo", numbers(2, 3, 4, 5), {}, r"no objective for outputs of shape \(2, 3, 4, 5\); give objective=functi"),
        ("pseudo", torch.tensor(1.0), {"labels": GOLD[:1]}, r"no objective for outputs of shape \(\)"),  # a loss
        ("gold", spans(), {}, "cannot find logits"),
        *(("gold", numbers(*shape), {}, NO_GOLD) for shape in ((2, 3), (2, 3, 4), (2,), (2, 1))),
        ("gold", numbers(2, 3), {"labels": None}, NO_GOLD),
        *(
            ("gold", numbers(*shape), {"labels": torch.zeros(gold, dtype=torch.long)}, UNFIT)
            for shape, gold in ((TOKENS, (3, 4)), (TOKENS, (15,)), (CLASSES, (4, 2)), ((4,), (3,)))
        ),
    ],
)
def test_what_no_objective_fits_is_refused(labels, outputs, inputs, said):
    with pytest.raises(ValueError, match=said):
        OfOutputs(labels)(outputs, inputs)
