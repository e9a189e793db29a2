"""Losses against torch's, metrics over a whole validation set against the libraries on all predictions, refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import f1_score as entity_f1
from seqeval.metrics import precision_score, recall_score
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

pytest.importorskip("fairseq")

from fairseq.logging import metrics
from torch import Tensor, nn

from attn_reg_plugin.criterions.classification import ClassificationCriterion
from attn_reg_plugin.criterions.collecting import packed, unpacked
from attn_reg_plugin.criterions.tagging import TaggingCriterion
from attn_reg_plugin.labelled import LabelledTask, find_task

NER = find_task("wnut17")
SIZES = [7, 1, 20, 12]
COUNT = sum(SIZES)


def task_for(row: LabelledTask | str) -> SimpleNamespace:
    """A task as far as a criterion looks at it."""
    return SimpleNamespace(labelled=find_task(row) if isinstance(row, str) else row)


class Fixed(nn.Module):
    """Returns given logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.ones(())), logits

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        return {"logits": self.table[rows] * self.weight}


def sample_of(rows: Tensor, target: Tensor | None) -> dict[str, Any]:
    """A batch: the numbers of the rows of logits, and their labels."""
    counts = {"ntokens": 3 * len(rows), "nsentences": len(rows)}
    return {"id": rows, "net_input": {"rows": rows}, "target": target, **counts}


def validate(criterion: Any, model: nn.Module, target: Tensor, sizes: list[int]) -> dict[str, float]:
    """The logged values of a validation in batches of these sizes."""
    model.eval()
    with metrics.aggregate(new_root=True) as aggregator, torch.no_grad():
        for rows in torch.arange(sum(sizes)).split(sizes):
            _, _, log = criterion(model, sample_of(rows, target[rows]))
            with metrics.aggregate():
                type(criterion).reduce_metrics([log])
        return aggregator.get_smoothed_values()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def tags(count: int = COUNT, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (count, width, labels) that are often right, and targets with gaps; one sentence has no word."""
    target = torch.randint(len(NER.labels), (count, width))
    target[torch.rand(count, width) < 0.5] = 0
    target[torch.rand(count, width) < 0.3] = -100
    target[3] = -100
    logits = torch.randn(count, width, len(NER.labels))
    logits += 3 * F.one_hot(target.clamp(min=0), len(NER.labels))
    return logits, target


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_classes_is_torchs(smoothing: float, dtype: torch.dtype) -> None:
    logits, target = torch.randn(6, 3).to(dtype), torch.randint(3, (6,))
    criterion = ClassificationCriterion(task_for("mnli"), label_smoothing=smoothing)
    loss, size, log = criterion(Fixed(logits).train(), sample_of(torch.arange(6), target))
    expected = F.cross_entropy(logits.float(), target, reduction="sum", label_smoothing=smoothing)
    assert torch.allclose(loss, expected, rtol=1e-6) and loss.dtype == torch.float32 and size == 6
    assert (log["loss"], log["sample_size"], log["nsentences"], log["ntokens"]) == (loss, 6, 6, 18)
    assert torch.allclose(log["nll_loss"], F.cross_entropy(logits.float(), target, reduction="sum"))
    assert log["n_correct"] == (logits.argmax(-1) == target).sum()


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_the_loss_of_a_regression_is_the_squared_error(shape: tuple[int, ...]) -> None:
    logits, target = torch.randn(shape), torch.rand(6) * 5
    loss, size, log = ClassificationCriterion(task_for("stsb"))(Fixed(logits), sample_of(torch.arange(6), target))
    assert torch.equal(loss, F.mse_loss(logits.view(-1), target, reduction="sum")) and size == 6
    assert "n_correct" not in log


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_tags_counts_words_alone(smoothing: float) -> None:
    logits, target = tags()
    criterion = TaggingCriterion(task_for(NER), label_smoothing=smoothing)
    loss, size, log = criterion(Fixed(logits), sample_of(torch.arange(COUNT), target))
    expected = F.cross_entropy(logits.transpose(1, 2), target, reduction="sum", label_smoothing=smoothing)
    assert torch.allclose(loss, expected, rtol=1e-6) and size == (target != -100).sum()
    assert log["n_correct"] == ((logits.argmax(-1) == target) & (target != -100)).sum()


def test_a_batch_without_any_word_has_a_loss_of_zero_and_a_gradient() -> None:
    logits, target = torch.randn(2, 4, len(NER.labels)), torch.full((2, 4), -100)
    model = Fixed(logits).train()
    loss, size, _ = TaggingCriterion(task_for(NER))(model, sample_of(torch.arange(2), target))
    loss.backward()
    assert (loss.item(), size, model.weight.grad.item()) == (0.0, 0, 0.0)


def test_scores_of_classes_over_the_whole_set() -> None:
    logits, target = torch.randn(COUNT, 2), torch.randint(2, (COUNT,))
    gold, predicted = target.tolist(), logits.argmax(-1).tolist()
    mrpc = validate(ClassificationCriterion(task_for("mrpc")), Fixed(logits), target, SIZES)
    accuracy, f1 = accuracy_score(gold, predicted), f1_score(gold, predicted)
    assert mrpc["accuracy"] == pytest.approx(100 * accuracy) and mrpc["f1"] == pytest.approx(100 * f1)
    assert mrpc["accuracy_f1"] == pytest.approx(50 * (accuracy + f1))
    assert mrpc["loss"] == pytest.approx(F.cross_entropy(logits, target).item() / math.log(2), abs=1e-4)
    cola = validate(ClassificationCriterion(task_for("cola")), Fixed(logits), target, SIZES)
    assert cola["mcc"] == pytest.approx(100 * matthews_corrcoef(gold, predicted)) and "f1" not in cola
    # not the mean of the batches' scores
    parts = zip(target.split(SIZES), logits.argmax(-1).split(SIZES), strict=True)
    mean = sum(len(g) * matthews_corrcoef(g, p) for g, p in parts) / COUNT
    assert abs(100 * mean - cola["mcc"]) > 0.1


def test_correlations_over_the_whole_set() -> None:
    target = torch.rand(COUNT) * 5
    logits = target + torch.randn(COUNT)
    logged = validate(ClassificationCriterion(task_for("stsb")), Fixed(logits.unsqueeze(-1)), target, SIZES)
    pearson, spearman = pearsonr(logits, target)[0], spearmanr(logits, target)[0]
    assert logged["pearson"] == pytest.approx(100 * pearson) and logged["spearman"] == pytest.approx(100 * spearman)
    assert logged["pearson_spearman"] == pytest.approx(50 * (pearson + spearman))
    assert logged["loss"] == pytest.approx(F.mse_loss(logits, target).item(), abs=1e-4)
    assert "accuracy" not in logged and isinstance(logged["pearson"], float)


def test_multiple_choice_has_an_accuracy() -> None:
    logits, target = torch.randn(COUNT, 4), torch.randint(4, (COUNT,))
    logged = validate(ClassificationCriterion(task_for("swag")), Fixed(logits), target, SIZES)
    assert logged["accuracy"] == pytest.approx(100 * accuracy_score(target, logits.argmax(-1)))


def test_entity_scores_over_the_whole_set() -> None:
    logits, target = tags()
    logged = validate(TaggingCriterion(task_for(NER)), Fixed(logits), target, SIZES)
    words = target != -100
    gold = [[NER.labels[tag] for tag in row[some]] for row, some in zip(target, words, strict=True) if some.any()]
    predicted = [
        [NER.labels[tag] for tag in row[some]] for row, some in zip(logits.argmax(-1), words, strict=True) if some.any()
    ]
    assert 0.2 < entity_f1(gold, predicted) < 0.95
    assert logged["f1"] == pytest.approx(100 * entity_f1(gold, predicted))
    assert logged["precision"] == pytest.approx(100 * precision_score(gold, predicted))
    assert logged["recall"] == pytest.approx(100 * recall_score(gold, predicted))
    right = (logits.argmax(-1) == target)[words]
    assert logged["accuracy"] == pytest.approx(100 * right.double().mean().item())


def test_tags_that_name_no_entities_have_an_accuracy_alone() -> None:
    labels = find_task("upos").labels
    logits, target = torch.randn(COUNT, 5, len(labels)), torch.randint(len(labels), (COUNT, 5))
    logged = validate(TaggingCriterion(task_for("upos")), Fixed(logits), target, SIZES)
    assert logged["accuracy"] == pytest.approx(100 * (logits.argmax(-1) == target).double().mean().item())
    assert "f1" not in logged


def test_metrics_can_be_chosen() -> None:
    logits, target = torch.randn(COUNT, 3), torch.randint(3, (COUNT,))
    criterion = ClassificationCriterion(task_for("mnli"), validation_metrics="macro_f1, mcc")
    logged = validate(criterion, Fixed(logits), target, SIZES)
    assert logged["macro_f1"] == pytest.approx(100 * f1_score(target, logits.argmax(-1), average="macro"))
    assert {"mcc", "accuracy", "loss"} <= set(logged)


def test_in_training_sums_alone_are_logged() -> None:
    logits, target = torch.randn(4, 2), torch.randint(2, (4,))
    criterion = ClassificationCriterion(task_for("cola"))
    _, _, log = criterion(Fixed(logits).train(), sample_of(torch.arange(4), target))
    assert set(log) == {"loss", "nll_loss", "ntokens", "nsentences", "sample_size", "n_correct"}
    with metrics.aggregate(new_root=True) as aggregator:
        type(criterion).reduce_metrics([log, log])
        assert set(aggregator.get_smoothed_values()) == {"loss", "accuracy"}


def test_nothing_is_logged_of_empty_batches() -> None:
    with metrics.aggregate(new_root=True) as aggregator:
        ClassificationCriterion.reduce_metrics([{"loss": 0.0, "sample_size": 0, "n_correct": 0}])
        assert aggregator.get_smoothed_values() == {}


def test_slots_hold_rows_of_any_number() -> None:
    rows = torch.tensor([[1.5, 2.0], [0.0, -1.0]])
    assert packed(rows).shape == (1, 3, 2) and torch.equal(unpacked(packed(rows)), rows.double())
    assert unpacked(packed(rows[:0])).shape == (0, 2)
    # two processes' slots, as fairseq adds them up
    both = torch.zeros(2, 3, 2, dtype=torch.float64)
    both[0, :2] = packed(rows[:1])[0]
    both[1] = packed(rows)[0]
    assert torch.equal(unpacked(both), torch.cat([rows[:1], rows]).double())


def test_example_outcomes() -> None:
    logits, target = torch.randn(5, 3), torch.randint(3, (5,))
    sample = sample_of(torch.arange(5), target)
    outcome = ClassificationCriterion(task_for("mnli"), label_smoothing=0.1).example_outcomes(Fixed(logits), sample)
    assert torch.equal(outcome.loss, F.cross_entropy(logits, target, reduction="none"))
    assert outcome.metric.tolist() == (logits.argmax(-1) == target).float().tolist()
    values = ClassificationCriterion(task_for("stsb")).example_outcomes(
        Fixed(logits[:, :1]), sample_of(torch.arange(5), target.float())
    )
    assert torch.equal(values.loss, (logits[:, 0] - target) ** 2) and torch.equal(values.metric, -values.loss)
    logits, target = tags()
    found = TaggingCriterion(task_for(NER)).example_outcomes(Fixed(logits), sample_of(torch.arange(COUNT), target))
    for row in (0, 5):
        words = target[row] != -100
        assert found.loss[row].item() == pytest.approx(F.cross_entropy(logits[row], target[row]).item(), rel=1e-5)
        right = (logits[row].argmax(-1) == target[row])[words]
        assert found.metric[row].item() == pytest.approx(right.float().mean().item())
    assert (found.loss[3].item(), found.metric[3].item()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("criterion", "task", "options", "message"),
    [
        (ClassificationCriterion, NER, {}, "is for tasks of classification, .* but the task is one of tagging"),
        (TaggingCriterion, "rte", {}, "for tasks of tagging, but the task is one of classification"),
        (TaggingCriterion, 3, {}, "for tasks of tagging, but the task is SimpleNamespace"),
        (ClassificationCriterion, "rte", {"label_smoothing": 1.0}, r"--label-smoothing is 1\.0, .* in \[0, 1\)"),
        (ClassificationCriterion, "stsb", {"label_smoothing": 0.1}, r"is 0\.1, but must be 0, for a regression"),
        (ClassificationCriterion, "rte", {"validation_metrics": "f2"}, "unknown metric 'f2' of classification"),
    ],
)
def test_refusals(criterion: type, task: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criterion(task_for(task), **options)


def test_a_split_without_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="a split of task rte without labels has no loss; use attn-reg export"):
        ClassificationCriterion(task_for("rte"))(Fixed(torch.randn(2, 2)), sample_of(torch.arange(2), None))
