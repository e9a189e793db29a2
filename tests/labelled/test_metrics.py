"""Official metrics against direct evaluation of their definitions, and their limit cases."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy.stats import rankdata

pytest.importorskip("fairseq")

from attn_reg_plugin.experiments.report.examples import of_predictions
from attn_reg_plugin.labelled import CLASSIFICATION, MULTIPLE_CHOICE, REGRESSION, TAGGING, find_task
from attn_reg_plugin.labelled.metrics import SCORES, SENTENCE_END, check_scores, tag_codes

CLASSES, VALUES, TAGS = SCORES[CLASSIFICATION], SCORES[REGRESSION], SCORES[TAGGING]


@pytest.fixture
def binary() -> tuple[np.ndarray, np.ndarray]:
    gold = np.random.default_rng(3).integers(0, 2, 200).astype(float)
    return np.where(np.random.default_rng(4).random(200) < 0.3, 1 - gold, gold), gold


def test_scores_of_two_classes(binary: tuple[np.ndarray, np.ndarray]) -> None:
    predicted, gold = binary
    right = {(p, g): float(((predicted == p) & (gold == g)).sum()) for p in (0, 1) for g in (0, 1)}
    both, neither, missed, false = right[1, 1], right[0, 0], right[0, 1], right[1, 0]
    f1 = 2 * both / (2 * both + missed + false)
    other = 2 * neither / (2 * neither + missed + false)
    margins = (both + false) * (both + missed) * (neither + false) * (neither + missed)
    assert CLASSES["accuracy"](predicted, gold) == pytest.approx(100 * (both + neither) / 200)
    assert CLASSES["f1"](predicted, gold) == pytest.approx(100 * f1)
    assert CLASSES["macro_f1"](predicted, gold) == pytest.approx(50 * (f1 + other))
    assert CLASSES["mcc"](predicted, gold) == pytest.approx(
        100 * (both * neither - missed * false) / math.sqrt(margins)
    )
    assert CLASSES["accuracy_f1"](predicted, gold) == pytest.approx(50 * ((both + neither) / 200 + f1))
    assert SCORES[MULTIPLE_CHOICE] is CLASSES


def test_correlations() -> None:
    generator = np.random.default_rng(5)
    gold = generator.integers(0, 6, 50).astype(float)
    predicted = gold**3 + generator.normal(size=50)

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a - a.mean(), b - b.mean()
        return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))

    pearson, spearman = correlation(predicted, gold), correlation(rankdata(predicted), rankdata(gold))
    assert VALUES["pearson"](predicted, gold) == pytest.approx(100 * pearson)
    assert VALUES["spearman"](predicted, gold) == pytest.approx(100 * spearman)
    assert VALUES["pearson_spearman"](predicted, gold) == pytest.approx(50 * (pearson + spearman))
    assert abs(pearson - spearman) > 0.01


@pytest.mark.parametrize("values", [[2.0, 2.0, 2.0], [1.0], [1.0, math.nan, 2.0], [1.0, math.inf, 2.0]])
def test_what_is_not_defined_counts_as_nothing_and_warns_nobody(values: list[float]) -> None:
    gold = np.arange(len(values), dtype=float)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [score(np.array(values), gold) for score in VALUES.values()] == [0.0, 0.0, 0.0]
        nothing = np.zeros(4)
        assert CLASSES["mcc"](nothing, nothing) == CLASSES["f1"](nothing, nothing) == 0.0
        assert TAGS["f1"](nothing, nothing) == 0.0 and TAGS["accuracy"](nothing, nothing) == 100.0


def spans(tags: list[str]) -> set[tuple[int, int, str]]:
    """The entities of a BIO sentence: start, end, type."""
    found, start = set(), 0
    for end in range(1, len(tags) + 1):
        if tags[start] == "O":
            start = end
        elif end == len(tags) or tags[end] != f"I-{tags[start][2:]}":
            found.add((start, end, tags[start][2:]))
            start = end
    return found


def test_entity_scores_count_whole_entities() -> None:
    """On well-formed BIO; both sides have entities that the other lacks, and one with a wrong type or end."""
    gold = [["B-x", "I-x", "O", "B-y"], ["O", "B-x"], ["B-y", "I-y", "B-y"]]
    predicted = [["B-x", "I-x", "O", "B-x"], ["B-y", "B-x"], ["B-y", "O", "B-y"]]
    labels = ["B-y", "I-y", "O", "B-x", "I-x"]
    codes = dict(zip(labels, tag_codes(labels), strict=True))
    rows = [
        np.array([code for tags in side for code in (*(codes[tag] for tag in tags), SENTENCE_END)], dtype=float)
        for side in (predicted, gold)
    ]
    pairs = [(spans(p), spans(g)) for p, g in zip(predicted, gold, strict=True)]
    right = sum(len(p & g) for p, g in pairs)
    precision, recall = right / sum(len(p) for p, _ in pairs), right / sum(len(g) for _, g in pairs)
    assert (right, precision, recall) == (3, 0.5, 0.6)
    assert TAGS["precision"](*rows) == pytest.approx(50) and TAGS["recall"](*rows) == pytest.approx(60)
    assert TAGS["f1"](*rows) == pytest.approx(200 * precision * recall / (precision + recall))
    assert TAGS["accuracy"](*rows) == pytest.approx(100 * 6 / 9)


@pytest.mark.parametrize(
    ("begin", "inside", "end", "single"), [("B-x", "I-x", "E-x", "S-x"), ("B-x", "I-x", "L-x", "U-x")]
)
def test_adjacent_entities_of_one_type(begin: str, inside: str, end: str, single: str) -> None:
    """IOBES and BILOU say where each ends: one of two found is a precision of 100 and a recall of 50 %."""
    labels = ["O", begin, inside, end, single]
    codes = dict(zip(labels, tag_codes(labels), strict=True))
    for gold, predicted in [
        ([begin, end, begin, inside, end], [begin, end, "O", "O", "O"]),
        ([begin, end, begin, end], ["O", "O", begin, end]),
        ([single, single], [single, "O"]),
    ]:
        rows = [np.array([*(codes[tag] for tag in tags), SENTENCE_END], dtype=float) for tags in (predicted, gold)]
        assert [TAGS[name](*rows) for name in ("precision", "recall")] == [pytest.approx(100), pytest.approx(50)]
        assert of_predictions(TAGGING, ["f1"], *rows)["f1"].scores(np.ones((1, 1))) == pytest.approx([200 / 3])


@pytest.mark.parametrize(
    ("names", "kind", "labels", "message"),
    [
        (["mcc", "bleu"], CLASSIFICATION, ("0", "1"), "unknown metric 'bleu' of classification; the metrics are: acc"),
        (["pearson"], CLASSIFICATION, ("0", "1"), "unknown metric 'pearson' of classification"),
        (["f1"], CLASSIFICATION, ("a", "b", "c"), "f1 is of two classes, but the labels are a, b, c; use macro_f1"),
        (["recall"], TAGGING, find_task("upos").labels, "recall of entities needs labels such as B-PER, but .* 'ADJ'"),
    ],
)
def test_metrics_that_a_task_cannot_have(names: list[str], kind: str, labels: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_scores(names, kind, labels)
