"""Losses against torch's, metrics over a whole validation set against the libraries on all predictions, refusals."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq.logging import metrics
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import accuracy_score as seqeval_accuracy
from seqeval.metrics import f1_score as entity_f1
from seqeval.metrics import precision_score, recall_score
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor, nn

from attn_reg_plugin.criterions.labelled import ClassificationCriterion, TaggingCriterion, packed, unpacked
from attn_reg_plugin.labelled import REGRESSION, TAGGING, LabelledTask, find_task

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


def tags(labels: Sequence[str], width: int = 9) -> tuple[Tensor, Tensor]:
    """Logits (COUNT, width, labels) that are often right, and targets with gaps; one sentence has no word."""
    target = torch.randint(len(labels), (COUNT, width))
    target[torch.rand(COUNT, width) < 0.5] = 0
    target[torch.rand(COUNT, width) < 0.3] = -100
    target[3] = -100
    return torch.randn(COUNT, width, len(labels)) + 3 * F.one_hot(target.clamp(min=0), len(labels)), target


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
    (logits, target), criterion = tags(NER.labels), TaggingCriterion(task_for(NER), label_smoothing=smoothing)
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


#: of rows of the table of tasks, the scores by their libraries, of the gold values and the predictions
SCORED: dict[str, dict[str, Callable[[Any, Any], float]]] = {
    "mrpc": {
        "accuracy": accuracy_score,
        "f1": f1_score,
        "accuracy_f1": lambda gold, predicted: (accuracy_score(gold, predicted) + f1_score(gold, predicted)) / 2,
    },
    "cola": {"mcc": matthews_corrcoef, "accuracy": accuracy_score},
    "mnli": {"macro_f1": partial(f1_score, average="macro"), "mcc": matthews_corrcoef, "accuracy": accuracy_score},
    "swag": {"accuracy": accuracy_score},
    "stsb": {
        "pearson": lambda gold, predicted: pearsonr(predicted, gold)[0],
        "spearman": lambda gold, predicted: spearmanr(predicted, gold)[0],
        "pearson_spearman": lambda gold, predicted: (pearsonr(predicted, gold)[0] + spearmanr(predicted, gold)[0]) / 2,
    },
    "wnut17": {"f1": entity_f1, "precision": precision_score, "recall": recall_score, "accuracy": seqeval_accuracy},
    "upos": {"accuracy": seqeval_accuracy},
}


@pytest.mark.parametrize("row", SCORED)
def test_metrics_are_those_of_all_predictions(row: str) -> None:
    """Not the mean of the batches' scores."""
    task, options = find_task(row), {"validation_metrics": "macro_f1, mcc"} if row == "mnli" else {}
    criterion: Any = ClassificationCriterion
    if task.kind == TAGGING:
        criterion, (logits, target) = TaggingCriterion, tags(task.labels)
        gold, predicted = (
            [[task.labels[tag] for tag in line[some]] for line, some in zip(lines, target != -100, strict=True)]
            for lines in (target, logits.argmax(-1))
        )
        loss = F.cross_entropy(logits.transpose(1, 2), target) / math.log(2)
    elif task.kind == REGRESSION:
        gold = target = torch.rand(COUNT) * 5
        predicted = target + torch.randn(COUNT)
        logits, loss = predicted.unsqueeze(-1), F.mse_loss(predicted, target)
    else:
        labels = len(task.labels or "four")
        logits, target = torch.randn(COUNT, labels), torch.randint(labels, (COUNT,))
        gold, predicted, loss = target, logits.argmax(-1), F.cross_entropy(logits, target) / math.log(2)
    logged = validate(criterion(task_for(row), **options), logits, target)
    assert logged["loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert {name for name in logged if name not in ("loss", "nll_loss", "ppl")} == set(SCORED[row])
    for name, score in SCORED[row].items():
        assert logged[name] == pytest.approx(100 * score(gold, predicted)), name
        assert isinstance(logged[name], float)


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
        (ClassificationCriterion, "rte", {"validation_metrics": "f2"}, "'f2' of classification; the metrics are: acc"),
        (ClassificationCriterion, "mnli", {"validation_metrics": "f1"}, "f1 is of two classes, .*; use macro_f1"),
        (TaggingCriterion, "upos", {"validation_metrics": "recall"}, "recall of entities needs labels such as B-PER, "),
        (ClassificationCriterion, "rte", {}, "a split of task rte without labels has no loss; use attn-reg export"),
    ],
)
def test_refusals(criterion: type, task: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criterion(task_for(task), **options)(Fixed(torch.randn(2, 2)), sample_of(torch.arange(2), None))
