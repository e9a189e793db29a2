"""What is attributed: each objective against its sum written out."""

from __future__ import annotations

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
    negative_regression_loss,
    scale_against_underflow,
    token_log_likelihood,
)
from attn_reg_plugin.regularizers.base.context import Supplied
from attn_reg_plugin.regularizers.base.outputs import NoObjective

HALVES = [torch.float32, torch.float16, torch.bfloat16]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def log_probability(row: list[float], label: int) -> float:
    largest = max(row)
    return row[label] - largest - math.log(sum(math.exp(x - largest) for x in row))


def pseudo(row: list[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


def token_sum(logits, labels=None, mask=None) -> float:
    total = 0.0
    for b, example in enumerate(logits.float().tolist()):
        for t, row in enumerate(example):
            label = pseudo(row) if labels is None else int(labels[b, t])
            if (mask is None or mask[b, t]) and label != -100:
                total += log_probability(row, label)
    return total


@pytest.mark.parametrize("dtype", HALVES)
def test_label_logit(dtype):
    logits, gold = numbers(4, 3).to(dtype), torch.tensor([0, 2, 1, 1])
    rows = logits.float().tolist()
    for objective in (label_logit(logits), OfOutputs()(logits, {"labels": gold})):
        assert objective.dtype == torch.float32
        assert objective.dim() == 0
        assert objective.item() == pytest.approx(sum(max(row) for row in rows))
    expected = sum(row[label] for row, label in zip(rows, gold.tolist(), strict=True))
    assert label_logit(logits, gold).item() == pytest.approx(expected)
    assert OfOutputs("gold")(logits, {"labels": gold}).item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("labelled", [False, True])
def test_token_log_likelihood(dtype, masked, labelled):
    logits = numbers(3, 5, 7).to(dtype)
    mask = torch.arange(5) < torch.tensor([[5], [3], [0]]) if masked else None
    labels = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(1)) if labelled else None
    if labelled:
        labels[0, 1] = labels[2, 0] = -100
    expected = token_sum(logits, labels, mask)
    ours = token_log_likelihood(logits, labels, mask)
    assert (ours.dtype, ours.dim()) == (torch.float32, 0)
    assert ours.item() == pytest.approx(expected, rel=1e-5)
    chosen = OfOutputs("gold" if labelled else "pseudo")
    assert chosen(logits, {"targets": labels, "token_mask": mask}).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("padding", [None, 0, 1, 3, 6, 7])
def test_padding_is_no_pseudo_label(dtype, padding):
    """Also where it scores best, as padding may in Marian; a number that is no column means nothing."""
    logits = numbers(3, 5, 7).to(dtype)
    columns = [column for column in range(7) if column != padding]
    if padding is not None and padding < 7:
        logits[..., padding] = 99.0
    expected = torch.tensor([[max(columns, key=row.__getitem__) for row in rows] for rows in logits.tolist()])
    assert torch.equal(likeliest(logits, padding), expected)
    ours = OfOutputs()(logits, {"padding_label": padding})
    assert ours.item() == pytest.approx(token_sum(logits, expected), rel=1e-5)


def test_padding_is_excluded_from_the_objective_and_its_gradient():
    mask = torch.arange(5) < torch.tensor([[5], [3], [1]])
    logits = numbers(3, 5, 7).requires_grad_()
    objective = token_log_likelihood(logits, None, mask)
    (gradient,) = torch.autograd.grad(objective, logits)
    assert gradient[~mask].eq(0).all()
    changed = torch.where(mask[..., None], logits, numbers(3, 5, 7, seed=2))
    assert token_log_likelihood(changed, None, mask).equal(objective)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_gold_labels_that_losses_ignore_are_left_out(shape):
    """Also on (B, C), where -100 is no column."""
    logits, gold = numbers(4, 3).requires_grad_(), torch.tensor([2, -100, 0, -100]).view(shape)
    objective = OfOutputs("gold")(logits, {"labels": gold})
    (gradient,) = torch.autograd.grad(objective, logits)
    assert objective.item() == pytest.approx(float((logits[0, 2] + logits[2, 0]).detach()))
    assert gradient.count_nonzero() == 2
    several = torch.tensor([[1.0, -100, 0], [0, 1, 1], [-100, -100, -100], [0, 0, 0]])
    assert label_logit(logits, several).item() == pytest.approx(
        float((logits[0, 0] + logits[1, 1] + logits[1, 2]).detach())
    )
    spans = {"start_logits": numbers(2, 3), "end_logits": numbers(2, 3, seed=1)}
    positions = {"start_positions": torch.tensor([1, -100]), "end_positions": torch.tensor([-100, 7])}
    expected = spans["start_logits"][0, 1] + spans["end_logits"][1, 2]
    assert OfOutputs("gold")(spans, positions).item() == pytest.approx(float(expected))


@pytest.mark.parametrize("logits, gold", [((3, 5, 7), (3, 4)), ((3, 5, 7), (15,)), ((4, 3), (4, 2)), ((4,), (3,))])
def test_gold_labels_of_another_shape_are_refused(logits, gold):
    with pytest.raises(ValueError, match=r"^the gold labels have the shape \(.*\), which does not fit the logits' "):
        OfOutputs("gold")(numbers(*logits), {"labels": torch.zeros(gold, dtype=torch.long)})


@pytest.mark.parametrize("shape", [(3, 16000), (3, 3), (2, 5)])
def test_a_token_mask_of_another_shape_is_left_out(shape):
    """An audio model's raw samples; prompts that the mask does not know."""
    logits, mask = numbers(3, 5, 7), torch.zeros(shape, dtype=torch.bool)
    targets = torch.randint(0, 7, (3, 5)).index_fill(1, torch.tensor([2]), -100)
    assert OfOutputs()(logits, {"token_mask": mask}).item() == pytest.approx(token_sum(logits), rel=1e-5)
    for labels in ("gold", "pseudo"):
        ours = OfOutputs(labels)(logits, {"token_mask": mask, "targets": targets})
        expected = token_sum(logits, targets if labels == "gold" else None, targets != -100)
        assert ours.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("beside", [{}, {"targets": torch.zeros(3, 5, dtype=torch.long)}])
@pytest.mark.parametrize(
    "mask, given",
    [
        (torch.ones(3, 6).bool(), "has the shape (3, 6)"),
        (torch.ones(3, 1, 1, 5).bool(), "has the shape (3, 1, 1, 5)"),
        (torch.ones(5, 3).bool(), "has the shape (5, 3)"),
        (torch.ones(3, 5), "is torch.float32"),
    ],
)
def test_a_token_mask_of_the_loop_has_to_fit(mask, given, beside):
    """One that a face read off its batch need not, nor one beside outputs that have no tokens."""
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
        if kind == "spans":
            return {"start_logits": numbers(4, 6, seed=seed), "end_logits": numbers(4, 6, seed=seed + 1)}
        return numbers(*((4, 3) if kind == "classes" else (4, 5, 7)), seed=seed)

    objective, mask = OfOutputs(), torch.arange(5) < torch.tensor([[5], [3], [1], [4]])
    inputs = {"token_mask": mask, "padding_label": 0, "pseudo_labels": PseudoLabels()}
    bare = {"token_mask": mask, "padding_label": 0}
    first, second = outputs(0), outputs(5)
    assert objective(first, inputs).equal(objective(first, bare))
    if kind == "spans":
        gold = {f"{end}_positions": first[f"{end}_logits"].argmax(-1) for end in ("start", "end")}
    else:
        gold = {"labels": first.argmax(-1) if kind == "classes" else likeliest(first, 0)}
    frozen = objective(second, inputs)
    torch.testing.assert_close(frozen, OfOutputs("gold")(second, {**gold, "token_mask": mask}))
    assert not frozen.allclose(objective(second, bare))


def test_pseudo_labels_are_constants():
    logits = numbers(2, 4, 6).requires_grad_()
    (gradient,) = torch.autograd.grad(token_log_likelihood(logits), logits)
    expected = torch.nn.functional.one_hot(logits.argmax(-1), 6) - logits.softmax(-1)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("labels", ["pseudo", "gold"])
def test_regression_of_several_numbers_is_no_classification(labels):
    predictions, targets = numbers(4, 3), numbers(4, 3, seed=1)
    expected = predictions.sum() if labels == "pseudo" else negative_regression_loss(predictions, targets)
    assert OfOutputs(labels)(predictions, {"labels": targets, "regression": True}).equal(expected)


@pytest.mark.parametrize("shape", [(4,), (4, 1), ()], ids=["(B,)", "(B, 1)", "one example, squeezed"])
@pytest.mark.parametrize("labels", ["pseudo", "gold"])
@pytest.mark.parametrize("dtype", HALVES)
def test_regression_is_the_prediction_or_its_error(shape, labels, dtype):
    predictions, targets = numbers(*shape).to(dtype), numbers(*shape[:1] or (1,), seed=1)
    values = predictions.float().flatten().tolist()
    expected = -sum((p - t) ** 2 for p, t in zip(values, targets.tolist(), strict=True))
    assert negative_regression_loss(predictions, targets).item() == pytest.approx(expected, rel=1e-5)
    expected = expected if labels == "gold" else sum(values)
    for supplied in ({"targets": targets}, {"labels": targets.view(-1, 1)}):
        ours = OfOutputs(labels)(predictions, supplied)
        assert (ours.dtype, ours.dim()) == (torch.float32, 0)
        assert ours.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "labels, outputs, inputs, said",
    [
        ("pseudo", numbers(2, 3), {}, "the pseudo labels' logits: outputs of shape (2, 3) as 3 classes"),
        (
            "gold",
            numbers(2, 3),
            {"labels": torch.tensor([0, 1])},
            "the gold labels' logits: outputs of shape (2, 3) as",
        ),
        ("pseudo", numbers(2, 5, 7), {}, "log-likelihoods: outputs of shape (2, 5, 7) as tokens over 7 labels"),
        ("pseudo", numbers(2, 1), {"labels": numbers(2)}, "the predicted values: outputs of shape (2, 1) as a regr"),
        ("gold", numbers(2), {"labels": numbers(2)}, "minus the squared error: outputs of shape (2,) as a regression"),
        ("pseudo", torch.tensor(0.5), {"labels": numbers(1)}, "the predicted values: outputs of shape () as a regress"),
        (
            "pseudo",
            {"start_logits": numbers(2, 5), "end_logits": numbers(2, 5)},
            {},
            "logits: the pseudo answers' start and end",
        ),
    ],
)
def test_the_log_says_what_the_outputs_were_read_as(caplog, labels, outputs, inputs, said):
    caplog.set_level(logging.INFO)
    objective = OfOutputs(labels)
    for _ in range(2):
        objective(outputs, inputs)
    assert [said in message for message in caplog.messages] == [True]


def test_targets_come_before_labels():
    logits, right, wrong = numbers(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 1, 1])
    ours = OfOutputs("gold")(logits, {"targets": right, "labels": wrong})
    assert ours.equal(label_logit(logits, right))


def test_half_precision_logits_are_summed_in_fp32():
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
        lambda logits: [logits],
    ],
)
def test_logits_are_found(outputs):
    logits = numbers(2, 3)
    assert logits_of(outputs(logits)) is logits


@pytest.mark.parametrize(
    "outputs", [None, 3.0, "logits", {}, {"embeddings": numbers(2, 3)}, (), torch.ones(2, 3).long()]
)
def test_outputs_without_logits_are_refused(outputs):
    """The sentence names the way out, and the methods that need none."""
    held = (
        r" \(it has embeddings, but no logits, log_probs or scores\)" if isinstance(outputs, dict) and outputs else ""
    )
    message = f"^cannot find logits in the model's output of type {type(outputs).__name__}{held}; give an objective="
    with pytest.raises(
        NoObjective, match=message + r".* or use a method that needs none: attention_dropout, attention"
    ):
        OfOutputs()(outputs, {})


def test_what_no_objective_fits_is_refused():
    with pytest.raises(ValueError, match=r"no objective for outputs of shape \(2, 3, 4, 5\); give objective=function"):
        OfOutputs()(numbers(2, 3, 4, 5), {})
    with pytest.raises(ValueError, match=r"no objective for outputs of shape \(\)"):
        OfOutputs()(torch.tensor(1.0), {"labels": torch.tensor([1])})  # a loss, as it seems


@pytest.mark.parametrize(
    "logits", [numbers(2, 3), numbers(2, 3, 4), numbers(2), numbers(2, 1)], ids=["classes", "tokens", "(B,)", "(B, 1)"]
)
def test_missing_gold_labels_are_refused(logits):
    for supplied in ({}, {"labels": None}):
        with pytest.raises(ValueError, match=r"needs gold labels: .* regularizer\.supply\(targets=\.\.\.\)"):
            OfOutputs("gold")(logits, supplied)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_rewards_without_gold_values_are_summed(shape):
    rewards = numbers(*shape)
    assert OfOutputs()(rewards, {}).item() == pytest.approx(sum(rewards.flatten().tolist()))


def test_answers_have_a_start_and_an_end():
    start, end = numbers(2, 3), numbers(2, 3) * 2
    outputs = {"start_logits": start, "end_logits": end}
    expected = start.max(-1).values.sum() + end.max(-1).values.sum()
    assert torch.equal(OfOutputs()(outputs, {}), expected)
    inputs = {"start_positions": torch.tensor([0, 2]), "end_positions": torch.tensor([1, 7])}  # 7 was cut off
    expected = start[0, 0] + start[1, 2] + end[0, 1] + end[1, 2]
    assert OfOutputs("gold")(outputs, inputs).item() == pytest.approx(expected.item())
    with pytest.raises(ValueError, match="cannot find logits"):
        OfOutputs("gold")(outputs, {})


def test_several_gold_classes_of_an_example_all_count():
    logits, gold = numbers(3, 4), torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    expected = logits[0, 0] + logits[0, 3] + logits[2, 1]
    assert OfOutputs("gold")(logits, {"labels": gold}).item() == pytest.approx(expected.item())


def test_a_loss_in_front_of_the_logits_is_passed_over():
    logits = numbers(2, 3)
    assert logits_of((torch.tensor(0.5), logits, numbers(2, 4, 3))) is logits
    assert logits_of((logits, {"attn": None})) is logits


def test_scaling_in_fp16_is_by_a_power_of_two():
    objective = torch.tensor(0.3)
    assert math.log2(scale_against_underflow(objective, torch.float16) / objective) == 10
    for dtype in (torch.float32, torch.bfloat16):
        assert scale_against_underflow(objective, dtype) is objective
