"""R-Drop against a literal evaluation of equation 4; evaluation is the plain criterion's; samples stay as they are."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("fairseq")

from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics

from attn_reg_plugin import ADDrop
from attn_reg_plugin.criterions.classification import ClassificationCriterion, ClassificationWithRDropCriterion
from attn_reg_plugin.criterions.doubled import repeated, supplied, symmetric_divergence
from attn_reg_plugin.criterions.label_smoothed_cross_entropy_with_r_drop import (
    LabelSmoothedCrossEntropyWithRDropCriterion,
)
from attn_reg_plugin.criterions.tagging import TaggingCriterion, TaggingWithRDropCriterion
from attn_reg_plugin.regularizers import Supplied
from tests.attention.tiny_model import TinyClassifier, tokens
from tests.criterions.criterion_problems import NER, Fixed, sample_of, task_for, validate

ALPHA, PAD = 0.7, 1


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(12)


def literal(first: list[float], second: list[float], label: int) -> tuple[float, float]:
    """Of one position: both passes' negative log-likelihoods added, and half of both divergences."""
    p, q = ([math.exp(x) / sum(math.exp(y) for y in row) for x in row] for row in (first, second))
    one = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    other = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    return -math.log(p[label]) - math.log(q[label]), (one + other) / 2


def halves(model: Fixed, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of both passes, as the first call of a copy of the model gives them."""
    model.calls.clear()
    first, second = model(torch.cat([rows, rows]))["logits"].detach().double().chunk(2)
    model.calls.clear()
    return first, second


@pytest.mark.parametrize("alpha", [0.0, ALPHA, 5.0])
def test_classes(alpha: float) -> None:
    model, target, rows = Fixed(torch.randn(5, 3), noise=1.0).train(), torch.randint(3, (5,)), torch.arange(5)
    first, second = halves(model, rows)
    terms = [literal(a.tolist(), b.tolist(), int(y)) for a, b, y in zip(first, second, target, strict=True)]
    likelihood, divergence = (sum(part) for part in zip(*terms, strict=True))
    loss, size, log = ClassificationWithRDropCriterion(task_for("mnli"), r_drop_alpha=alpha)(
        model, sample_of(rows, target)
    )
    assert divergence > 0.1
    assert loss.item() == pytest.approx(likelihood + alpha * divergence, rel=1e-5) and size == 5
    assert log["divergence"].item() == pytest.approx(divergence, rel=1e-5)
    assert log["nll_loss"].item() == pytest.approx(likelihood / 2, rel=1e-5)
    assert log["n_correct"] == (first.argmax(-1) == target).sum()
    assert (log["nsentences"], log["ntokens"], log["sample_size"]) == (5, 15, 5)
    assert len(model.calls) == 1 and model.calls[0].tolist() == [*range(5), *range(5)]


def test_tags_diverge_at_words_alone() -> None:
    model = Fixed(torch.randn(3, 4, len(NER.labels)), noise=1.0).train()
    target = torch.randint(len(NER.labels), (3, 4))
    target[0, 1:3] = target[2] = -100
    first, second = halves(model, torch.arange(3))
    places = (target != -100).nonzero().tolist()
    terms = [literal(first[b, t].tolist(), second[b, t].tolist(), int(target[b, t])) for b, t in places]
    likelihood, divergence = (sum(part) for part in zip(*terms, strict=True))
    loss, size, log = TaggingWithRDropCriterion(task_for(NER), r_drop_alpha=ALPHA)(
        model, sample_of(torch.arange(3), target)
    )
    assert loss.item() == pytest.approx(likelihood + ALPHA * divergence, rel=1e-5) and size == len(places) == 6
    assert log["divergence"].item() == pytest.approx(divergence, rel=1e-5)


def test_a_regression_diverges_by_the_squared_difference() -> None:
    model, target = Fixed(torch.randn(5, 1), noise=1.0).train(), torch.rand(5)
    first, second = (half.squeeze(-1) for half in halves(model, torch.arange(5)))
    loss, _, _ = ClassificationWithRDropCriterion(task_for("stsb"), r_drop_alpha=ALPHA)(
        model, sample_of(torch.arange(5), target)
    )
    expected = (first - target) ** 2 + (second - target) ** 2 + ALPHA * (first - second) ** 2
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-5)


def test_multiple_choice_repeats_all_choices() -> None:
    rows, target = torch.arange(12).view(3, 4), torch.tensor([0, 3, 1])
    logits = torch.randn(12)
    model = Fixed(logits).train()
    loss, size, _ = ClassificationWithRDropCriterion(task_for("swag"))(model, sample_of(rows, target))
    assert loss.item() == pytest.approx(2 * F.cross_entropy(logits.view(3, 4), target, reduction="sum").item())
    assert size == 3 and model.calls[0].shape == (6, 4)


def test_the_divergence_is_in_fp32_and_differentiable_on_both_sides() -> None:
    first, second = torch.randn(4, 5, dtype=torch.bfloat16), torch.randn(4, 5, dtype=torch.bfloat16)
    first.requires_grad_(), second.requires_grad_()
    divergence = symmetric_divergence(first, second)
    assert divergence.dtype == torch.float32 and divergence.shape == (4,)
    divergence.sum().backward()
    assert first.grad.abs().max() > 0 and second.grad.abs().max() > 0
    p, q = first.float().log_softmax(-1), second.float().log_softmax(-1)
    expected = (F.kl_div(p, q, log_target=True, reduction="sum") + F.kl_div(q, p, log_target=True, reduction="sum")) / 2
    assert torch.allclose(divergence.sum(), expected, rtol=1e-5)
    assert symmetric_divergence(first, first).abs().max() == 0


@pytest.mark.parametrize(
    ("plain", "ours", "row", "logits", "target"),
    [
        (ClassificationCriterion, ClassificationWithRDropCriterion, "cola", (40, 2), torch.randint(2, (40,))),
        (ClassificationCriterion, ClassificationWithRDropCriterion, "stsb", (40, 1), torch.rand(40)),
        (TaggingCriterion, TaggingWithRDropCriterion, "wnut17", (40, 6, 13), torch.randint(13, (40, 6))),
    ],
)
def test_validation_is_the_plain_criterions(plain: type, ours: type, row: str, logits: tuple, target: Any) -> None:
    model = Fixed(torch.randn(logits), noise=1.0)
    expected = validate(plain(task_for(row)), model, target, [13, 27])
    assert validate(ours(task_for(row), r_drop_alpha=3.0), model, target, [13, 27]) == expected
    sample = sample_of(torch.arange(40), target)
    (loss, size, log), (theirs, their_size, their_log) = (
        criterion(task_for(row))(model.eval(), sample) for criterion in (ours, plain)
    )
    assert torch.equal(loss, theirs) and size == their_size and set(log) == set(their_log)


def test_samples_stay_as_they_are() -> None:
    sample = sample_of(torch.arange(4), torch.randint(2, (4,)))
    sample["net_input"] |= {"scale": torch.tensor(2.0), "name": "x"}
    before, net_input = copy.deepcopy(sample), sample["net_input"]
    doubled = repeated(sample)
    assert sample["net_input"] is net_input and "repeated" not in sample
    for key in ("id", "target"):
        assert torch.equal(sample[key], before[key])
    assert torch.equal(net_input["rows"], before["net_input"]["rows"])
    assert doubled["net_input"]["rows"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert doubled["net_input"]["scale"] is net_input["scale"] and doubled["net_input"]["name"] == "x"
    assert (doubled["nsentences"], doubled["ntokens"]) == (4, 12)
    assert repeated(doubled) is doubled


def test_training_is_logged_with_the_divergence() -> None:
    model, sample = Fixed(torch.randn(4, 2), noise=1.0).train(), sample_of(torch.arange(4), torch.randint(2, (4,)))
    criterion = ClassificationWithRDropCriterion(task_for("cola"))
    log = criterion(model, sample)[2]
    with metrics.aggregate(new_root=True) as aggregator:
        type(criterion).reduce_metrics([log, log])
        logged = aggregator.get_smoothed_values()
    assert logged["r_drop"] == pytest.approx(log["divergence"].item() / 4 / math.log(2), abs=1e-4)
    assert logged["nll_loss"] == pytest.approx(log["nll_loss"].item() / 4 / math.log(2), abs=1e-4)
    assert set(logged) == {"loss", "nll_loss", "r_drop", "accuracy"}


@pytest.mark.parametrize("alpha", [-0.1, math.inf, math.nan])
def test_a_weight_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"--r-drop-alpha is .*, but must be a number of at least 0"):
        ClassificationWithRDropCriterion(task_for("cola"), r_drop_alpha=alpha)


def test_criterions_have_no_parameters() -> None:
    found = [ClassificationWithRDropCriterion(task_for("cola")), TaggingWithRDropCriterion(task_for(NER))]
    assert all(not list(criterion.parameters()) and not criterion.state_dict() for criterion in found)


class Classified(torch.nn.Module):
    """A tiny classifier under fairseq's argument names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyClassifier()

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return self.inner(source)


@pytest.mark.parametrize("labels", ["pseudo", "gold"])
def test_an_attached_regularizer_masks_both_halves(labels: str) -> None:
    """With gold labels it has to be told of the repeated targets; what it was told before comes back."""
    model, source = Classified().train(), tokens([6, 4, 2], 6, seed=1)
    target = torch.tensor([0, 1, 0])
    sample = {"net_input": {"source": source}, "target": target, "ntokens": 12, "nsentences": 3}
    regularizer = ADDrop(p=0.5, q=1.0, sites="*", cross_tuning="off", labels=labels)
    criterion = ClassificationWithRDropCriterion(task_for("rte", regularizer))
    with regularizer.attach(model):
        regularizer.supply(targets=target, batch=sample, update=3)
        loss, size, _ = criterion(model, sample)
        loss.backward()
        masks = [site.keep for site in regularizer.attached_sites]
        assert regularizer.supplied.targets is target and regularizer.supplied.batch is sample
    assert size == 3 and all(mask.size(0) == 6 for mask in masks)
    for mask in masks:  # without dropout both halves are attributed alike
        assert torch.equal(mask[:3], mask[3:]) and not mask.all()


def test_without_a_regularizer_or_outside_an_update_nothing_is_supplied() -> None:
    regularizer = ADDrop()
    for task in (SimpleNamespace(), SimpleNamespace(regularizer=None), SimpleNamespace(regularizer=regularizer)):
        with supplied(task, sample_of(torch.arange(2), torch.zeros(2))):
            assert regularizer.supplied == Supplied()


# -- translation ------------------------------------------------------------------------------------------------------


class Translator(Fixed):
    """A translation model as far as the criterion looks at it."""

    def get_normalized_probs(self, output: dict, log_probs: bool) -> torch.Tensor:
        assert log_probs
        return output["logits"].float().log_softmax(-1)

    def get_targets(self, sample: dict, output: dict) -> torch.Tensor:
        return sample["target"]


def translation(criterion: type, **options: Any) -> Any:
    task = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD), regularizer=None)
    return criterion(task, **{"sentence_avg": False, "label_smoothing": 0.0, **options})


@pytest.fixture
def sentences() -> tuple[Translator, dict[str, Any]]:
    """Three sentences of four target tokens over seven words; five tokens are padding."""
    target = torch.randint(2, 7, (3, 4))
    target[1, 2:] = target[2, 1:] = PAD
    sample = sample_of(torch.arange(3), target)
    sample["ntokens"] = 7
    return Translator(torch.randn(3, 4, 7), noise=1.0).train(), sample


@pytest.mark.parametrize("prefix", [0, 1])
def test_translation_diverges_at_real_tokens_alone(sentences: tuple[Translator, dict], prefix: int) -> None:
    model, sample = sentences
    first, second = halves(model, torch.arange(3))
    places = [(b, t) for b, t in (sample["target"] != PAD).nonzero().tolist() if t >= prefix]
    terms = [literal(first[b, t].tolist(), second[b, t].tolist(), int(sample["target"][b, t])) for b, t in places]
    likelihood, divergence = (sum(part) for part in zip(*terms, strict=True))
    ours = translation(
        LabelSmoothedCrossEntropyWithRDropCriterion,
        r_drop_alpha=ALPHA,
        ignore_prefix_size=prefix,
        report_accuracy=True,
    )
    loss, size, log = ours(model, sample)
    assert loss.item() == pytest.approx(likelihood + ALPHA * divergence, rel=1e-5) and size == 7
    assert log["nll_loss"].item() == pytest.approx(likelihood / 2, rel=1e-5)
    assert log["divergence"].item() == pytest.approx(divergence, rel=1e-5)
    right = [int(first[b, t].argmax()) == int(sample["target"][b, t]) for b, t in places]
    assert (log["n_correct"], log["total"]) == (sum(right), len(places))


def test_label_smoothing_is_the_stock_criterions(sentences: tuple[Translator, dict]) -> None:
    """With alpha 0 the loss is the stock one of the repeated batch; the sample size is not doubled."""
    model, sample = sentences
    options = {"label_smoothing": 0.1, "sentence_avg": True}
    loss, size, _ = translation(LabelSmoothedCrossEntropyWithRDropCriterion, r_drop_alpha=0.0, **options)(model, sample)
    model.calls.clear()
    stock, _, _ = translation(LabelSmoothedCrossEntropyCriterion, **options)(model, repeated(sample))
    assert torch.allclose(loss, stock) and size == 3


def test_validation_of_translation_is_the_stock_criterions(sentences: tuple[Translator, dict]) -> None:
    model, sample = sentences
    options = {"label_smoothing": 0.1, "report_accuracy": True}
    found = translation(LabelSmoothedCrossEntropyWithRDropCriterion, **options)(model.eval(), sample)
    stock = translation(LabelSmoothedCrossEntropyCriterion, **options)(model.eval(), sample)
    assert torch.equal(found[0], stock[0]) and found[1:] == stock[1:]
    assert len(model.calls) == 2 and model.calls[0].shape == (3,)


def test_translation_logs_the_divergence_in_training_alone(sentences: tuple[Translator, dict]) -> None:
    model, sample = sentences
    criterion = translation(LabelSmoothedCrossEntropyWithRDropCriterion)
    for training in (True, False):
        log = criterion(model.train(training), sample)[2]
        with metrics.aggregate(new_root=True) as aggregator:
            type(criterion).reduce_metrics([log, log])
            logged = aggregator.get_smoothed_values()
        assert ("r_drop" in logged) == training
        if training:
            assert logged["r_drop"] == pytest.approx(log["divergence"].item() / 7 / math.log(2), abs=1e-3)
