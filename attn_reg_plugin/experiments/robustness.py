"""A trained classifier on data of another distribution, as the papers test robustness.

- HANS (McCoy, Pavlick & Linzen, ACL 2019), for a model of MNLI or RTE: entailment, or not. Three labels are folded to
  two after the decision: what is neutral or a contradiction is not entailed. Accuracy over all, and by heuristic and
  label.
- PAWS-X (Yang et al., EMNLP 2019), for a model of QQP, MRPC or PAWS-X itself: paraphrase, or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.labelled import LabelledTask, TextExample, find_task, is_hub, read_file, read_split
from attn_reg_plugin.labelled.metrics import accuracy, f1
from attn_reg_plugin.labelled.task_table import CLASSIFICATION

#: test -> label of a trained model -> label of the test
FOLDS: dict[str, dict[str, str]] = {
    "hans": {
        "entailment": "entailment",
        "neutral": "non-entailment",
        "contradiction": "non-entailment",
        "not_entailment": "non-entailment",
        "non-entailment": "non-entailment",
    },
    "paws-x": {"0": "0", "1": "1"},
}


def evaluate(
    trained: Trained, test: str, source: str, split: str = "test", batch_size: int = 32
) -> dict[str, float | int]:
    """The figures of a test, in percent: accuracy over all, what the test has beside it, and the number of examples.

    Raises:
        ValueError: the model's labels do not fit the test, or its data has no labels or cannot be read.
    """
    task = find_task(test)
    folding(trained.labelled, task)
    examples = read_test(task, source, split)
    predicted = predict(trained, task, examples, batch_size)
    return {"examples": len(examples), **figures_of(task, examples, predicted)}


def read_test(task: LabelledTask, source: str, split: str) -> list[Any]:
    """The examples of a test.

    Args:
        source: its folder or file, or the hub.

    Raises:
        ValueError: the data has no labels or cannot be read.
    """
    path = Path(source)
    examples: list[Any] = (
        list(read_file(task, path)) if not is_hub(source) and path.is_file() else read_split(task, source, split)
    )
    if any(example.label is None for example in examples):
        raise ValueError(f"{source} has no labels in the split {split!r}, so nothing can be measured on it")
    return examples


def predict(trained: Trained, task: LabelledTask, examples: Sequence[TextExample], batch_size: int = 32) -> np.ndarray:
    """The classes of the test that a model decides for, (N,).

    Raises:
        ValueError: the model's labels do not fit the test.
    """
    fold = folding(trained.labelled, task)
    logits = trained.logits(trained.encode(examples, task.name), batch_size)
    return fold[np.array([int(row.argmax()) for row in logits])]


def figures_of(task: LabelledTask, examples: Sequence[TextExample], predicted: np.ndarray) -> dict[str, float]:
    """The figures of decisions, (N,): accuracy over all, and what the test has beside it."""
    gold = np.array([example.label for example in examples])
    figures = {"accuracy": accuracy(predicted, gold)}
    if task.name == "paws-x":
        figures["f1"] = f1(predicted, gold)
    figures.update(_by_group(task, examples, predicted, gold))
    return figures


def folding(model: LabelledTask, test: LabelledTask) -> np.ndarray:
    """For each label of a model its index among the test's labels.

    Raises:
        ValueError: the model isn't a classifier, takes another number of texts, or has a label that means nothing
            there.
    """
    if model.kind != CLASSIFICATION:
        raise ValueError(f"{test.name} tests classifiers, but the model is one of {model.kind.replace('_', ' ')}")
    if len(model.text) != len(test.text):
        raise ValueError(
            f"{test.name} tests classifiers of {len(test.text)} texts, but the model was trained on {len(model.text)}"
        )
    fold = FOLDS[test.name]
    for label in model.labels or ():
        if label not in fold:
            raise ValueError(
                f"the model's label {label!r} means nothing in {test.name}, whose test takes: {', '.join(fold)}"
            )
    return np.array([test.labels.index(fold[label]) for label in model.labels])


def _by_group(
    task: LabelledTask, examples: Sequence[TextExample], predicted: np.ndarray, gold: np.ndarray
) -> Iterator[tuple[str, float]]:
    """Accuracy of each heuristic, whole and by gold label: models that always say entailment are right on one half."""
    if not task.groups:
        return
    groups = np.array([example.groups[0] for example in examples])
    for group in sorted(set(groups.tolist())):
        inside = groups == group
        yield group, accuracy(predicted[inside], gold[inside])
        for index, label in enumerate(task.labels):
            part = inside & (gold == index)
            if part.any():
                yield f"{group}, {label}", accuracy(predicted[part], gold[part])
