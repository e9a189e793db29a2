"""Limit cases of the official metrics, which tests/criterions compares with their libraries."""

import math
import warnings

import numpy as np
import pytest

from attn_reg_plugin.experiments.report.examples import of_predictions
from attn_reg_plugin.labelled import CLASSIFICATION, REGRESSION, TAGGING
from attn_reg_plugin.labelled.metrics import SCORES, SENTENCE_END, tag_codes

CLASSES, VALUES, TAGS = SCORES[CLASSIFICATION], SCORES[REGRESSION], SCORES[TAGGING]


@pytest.mark.parametrize("values", [[2.0, 2.0, 2.0], [1.0], [1.0, math.nan, 2.0], [1.0, math.inf, 2.0]])
def test_what_is_not_defined_counts_as_nothing_and_warns_nobody(values: list[float]) -> None:
    gold = np.arange(len(values), dtype=float)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [score(np.array(values), gold) for score in VALUES.values()] == [0.0, 0.0, 0.0]
        nothing = np.zeros(4)
        assert CLASSES["mcc"](nothing, nothing) == CLASSES["f1"](nothing, nothing) == 0.0
        assert TAGS["f1"](nothing, nothing) == 0.0 and TAGS["accuracy"](nothing, nothing) == 100.0


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
