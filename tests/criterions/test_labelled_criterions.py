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

from attn_reg_plugin.criterions.labelled import ClassificationCriterion, TaggingCriterion, packed, unpacked
from attn_reg_plugin.labelled import LabelledTask, find_task

NER = find_task("wnut17")
SIZES = [7, 1, 20, 12]
COUNT = sum(SIZES)


def task_for(row: LabelledTask | str | int) -> SimpleNamespace:
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


def validate(criterion: Any, logits: Tensor, target: Tensor) -> dict[str, float]:
    """The logged values of a validation in batches of SIZES."""
    model = Fixed(logits).eval()
    with metrics.aggregate(new_root=True) as aggregator, torch.no_grad():
        for rows in torch.arange(COUNT).split(SIZES):
            _, _, log = criterion(model, sample_of(rows, target[rows]))
            with metrics.aggregate():
                type(criterion).reduce_metrics([log])
        return aggregator.get_smoothed_values()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def tags(width: int = 9) -> tuple[Tensor, Tensor]:
    """Logits (COUNT, width, labels) that are often right, and targets with gaps; one sentence has no word."""
    target = torch.randint(len(NER.labels), (COUNT, width))
    target[torch.rand(COUNT, width) < 0.5] = 0
    target[torch.rand(COUNT, width) < 0.3] = -100
    target[3] = -100
    return torch.randn(COUNT, width, len(NER.labels)) + 3 * F.one_hot(target.clamp(min=0), len(NER.labels)), target


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_classes_is_torchs(smoothing: float, dtype: torch.dtype) -> None:
    logits, target = torch.randn(6, 3).to(dtype), torch.randint(3, (6,))
    criterion = ClassificationCriterion(task_for("mnli"), label_smoothing=smoothing)
    sample = sample_of(torch.arange(6), target)
    loss, size, log = criterion(Fixed(logits).train(), sample)
    losses = F.cross_entropy(logits.float(), target, reduction="none")
    expected = F.cross_entropy(logits.float(), target, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)
    assert (log["loss"], log["sample_size"], size, log["nsentences"], log["ntokens"]) == (loss, 6, 6, 6, 18)
    torch.testing.assert_close(log["nll_loss"], losses.sum())
    assert log["n_correct"] == (logits.argmax(-1) == target).sum()
    assert set(log) == {"loss", "nll_loss", "ntokens", "nsentences", "sample_size", "n_correct"}, "of training"
    outcome = criterion.example_outcomes(Fixed(logits), sample)
    torch.testing.assert_close(outcome.loss, losses)
    assert outcome.metric.tolist() == (logits.argmax(-1) == target).float().tolist()


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_the_loss_of_a_regression_is_the_squared_error(shape: tuple[int, ...]) -> None:
    logits, sample = torch.randn(shape), sample_of(torch.arange(6), torch.rand(6) * 5)
    criterion, losses = ClassificationCriterion(task_for("stsb")), (logits.view(-1) - sample["target"]) ** 2
    loss, size, log = criterion(Fixed(logits), sample)
    torch.testing.assert_close(loss, losses.sum())
    assert size == 6 and "n_correct" not in log
    outcome = criterion.example_outcomes(Fixed(logits), sample)
    assert torch.equal(outcome.loss, losses) and torch.equal(outcome.metric, -losses)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_tags_counts_words_alone(smoothing: float) -> None:
    (logits, target), criterion = tags(), TaggingCriterion(task_for(NER), label_smoothing=smoothing)
    loss, size, log = criterion(Fixed(logits), sample_of(torch.arange(COUNT), target))
    expected = F.cross_entropy(logits.transpose(1, 2), target, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)
    words, right = target != -100, (logits.argmax(-1) == target)
    assert size == words.sum() and log["n_correct"] == (right & words).sum()
    found = criterion.example_outcomes(Fixed(logits), sample_of(torch.arange(COUNT), target))
    for row in (0, 5):
        torch.testing.assert_close(found.loss[row], F.cross_entropy(logits[row], target[row]))
        torch.testing.assert_close(found.metric[row], right[row][words[row]].float().mean())
    assert (found.loss[3].item(), found.metric[3].item()) == (0.0, 0.0)
    model = Fixed(logits)
    loss, size, _ = criterion(model, sample_of(torch.tensor([3]), target[3:4]))
    loss.backward()
    assert (loss.item(), size, model.weight.grad.item()) == (0.0, 0, 0.0), "a batch without any word"


# -- metrics over a whole validation set ------------------------------------------------------------------------------


def test_scores_of_classes() -> None:
    logits, target = torch.randn(COUNT, 2), torch.randint(2, (COUNT,))
    gold, predicted = target.tolist(), logits.argmax(-1).tolist()
    mrpc = validate(ClassificationCriterion(task_for("mrpc")), logits, target)
    accuracy, f1 = accuracy_score(gold, predicted), f1_score(gold, predicted)
    assert mrpc["accuracy"] == pytest.approx(100 * accuracy) and mrpc["f1"] == pytest.approx(100 * f1)
    assert mrpc["accuracy_f1"] == pytest.approx(50 * (accuracy + f1))
    assert mrpc["loss"] == pytest.approx(F.cross_entropy(logits, target).item() / math.log(2), abs=1e-4)
    cola = validate(ClassificationCriterion(task_for("cola")), logits, target)
    assert cola["mcc"] == pytest.approx(100 * matthews_corrcoef(gold, predicted)) and "f1" not in cola
    # not the mean of the batches' scores
    parts = zip(target.split(SIZES), logits.argmax(-1).split(SIZES), strict=True)
    mean = sum(len(g) * matthews_corrcoef(g, p) for g, p in parts) / COUNT
    assert abs(100 * mean - cola["mcc"]) > 0.1
    chosen = validate(ClassificationCriterion(task_for("mnli"), validation_metrics="macro_f1, mcc"), logits, target)
    assert chosen["macro_f1"] == pytest.approx(100 * f1_score(gold, predicted, average="macro"))
    assert {"mcc", "accuracy", "loss"} <= set(chosen)


def test_correlations() -> None:
    target = torch.rand(COUNT) * 5
    logits = target + torch.randn(COUNT)
    logged = validate(ClassificationCriterion(task_for("stsb")), logits.unsqueeze(-1), target)
    pearson, spearman = pearsonr(logits, target)[0], spearmanr(logits, target)[0]
    assert logged["pearson"] == pytest.approx(100 * pearson) and logged["spearman"] == pytest.approx(100 * spearman)
    assert logged["pearson_spearman"] == pytest.approx(50 * (pearson + spearman))
    assert logged["loss"] == pytest.approx(F.mse_loss(logits, target).item(), abs=1e-4)
    assert "accuracy" not in logged and isinstance(logged["pearson"], float)


def test_entity_scores() -> None:
    logits, target = tags()
    logged = validate(TaggingCriterion(task_for(NER)), logits, target)
    words = target != -100
    gold, predicted = (
        [[NER.labels[tag] for tag in row[some]] for row, some in zip(all_tags, words, strict=True) if some.any()]
        for all_tags in (target, logits.argmax(-1))
    )
    assert 0.2 < entity_f1(gold, predicted) < 0.95
    for name, score in {"f1": entity_f1, "precision": precision_score, "recall": recall_score}.items():
        assert logged[name] == pytest.approx(100 * score(gold, predicted))
    right = (logits.argmax(-1) == target)[words]
    assert logged["accuracy"] == pytest.approx(100 * right.double().mean().item())


@pytest.mark.parametrize(("criterion", "row"), [(ClassificationCriterion, "swag"), (TaggingCriterion, "upos")])
def test_choices_and_tags_that_name_no_entities_have_an_accuracy_alone(criterion: type, row: str) -> None:
    labels = len(find_task(row).labels or "four")
    shape = (COUNT,) if row == "swag" else (COUNT, 5)
    logits, target = torch.randn(*shape, labels), torch.randint(labels, shape)
    logged = validate(criterion(task_for(row)), logits, target)
    assert logged["accuracy"] == pytest.approx(100 * (logits.argmax(-1) == target).double().mean().item())
    assert "f1" not in logged


def test_nothing_is_logged_of_empty_batches_and_no_metric_in_training() -> None:
    for log, logged in (
        ({"loss": 0.0, "sample_size": 0, "n_correct": 0}, set()),
        ({"loss": 1.0, "nll_loss": 1.0, "sample_size": 2, "n_correct": 1}, {"loss", "accuracy"}),
    ):
        with metrics.aggregate(new_root=True) as aggregator:
            ClassificationCriterion.reduce_metrics([log, log])
            assert set(aggregator.get_smoothed_values()) == logged


def test_slots_hold_rows_of_any_number() -> None:
    rows = torch.tensor([[1.5, 2.0], [0.0, -1.0]])
    assert packed(rows).shape == (1, 3, 2) and torch.equal(unpacked(packed(rows)), rows.double())
    assert unpacked(packed(rows[:0])).shape == (0, 2)
    # two processes' slots, as fairseq adds them up
    both = torch.zeros(2, 3, 2, dtype=torch.float64)
    both[0, :2] = packed(rows[:1])[0]
    both[1] = packed(rows)[0]
    assert torch.equal(unpacked(both), torch.cat([rows[:1], rows]).double())


@pytest.mark.parametrize(
    ("criterion", "task", "options", "message"),
    [
        (ClassificationCriterion, NER, {}, "is for tasks of classification, .* but the task is one of tagging"),
        (TaggingCriterion, 3, {}, "for tasks of tagging, but the task is SimpleNamespace"),
        (ClassificationCriterion, "rte", {"label_smoothing": 1.0}, r"--label-smoothing is 1\.0, .* in \[0, 1\)"),
        (ClassificationCriterion, "stsb", {"label_smoothing": 0.1}, r"is 0\.1, but must be 0, for a regression"),
        (ClassificationCriterion, "rte", {"validation_metrics": "f2"}, "unknown metric 'f2' of classification"),
        (ClassificationCriterion, "rte", {}, "a split of task rte without labels has no loss; use attn-reg export"),
    ],
)
def test_refusals(criterion: type, task: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criterion(task_for(task), **options)(Fixed(torch.randn(2, 2)), sample_of(torch.arange(2), None))
