"""Predictions of a trained encoder, in the format that GLUE takes.

Classes, choices and values: a header, then a line per example, `index<TAB>prediction`, with the label's name; values
with three decimals, inside the task's bounds. Taggers: `word<TAB>label`, an empty line after each sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.labelled import Encoded, Example
from attn_reg_plugin.labelled.encoding import IGNORED
from attn_reg_plugin.labelled.task_table import REGRESSION, TAGGING

logger = logging.getLogger(__name__)


def lines(trained: Trained, examples: Sequence[Example], batch_size: int = 32) -> Iterator[str]:
    """The lines of the file of predictions."""
    names, kind = trained.labelled.labels, trained.labelled.kind
    if kind == TAGGING:  # any label for each word: it marks the word's first sub-token
        examples = [replace(example, labels=(0,) * len(example.words)) for example in examples]
    rows = trained.encode(examples, "prediction")
    logits = trained.logits(rows, batch_size)
    if kind == TAGGING:
        yield from _tagged(trained, examples, rows, [row.argmax(-1).numpy() for row in logits])
        return
    yield "index\tprediction"
    low, high = trained.labelled.bounds or (-np.inf, np.inf)
    for index, row in enumerate(logits):
        value = f"{min(max(float(row[0]), low), high):.3f}" if kind == REGRESSION else names[int(row.argmax())]
        yield f"{index}\t{value}"


def _tagged(
    trained: Trained, examples: Sequence[Example], rows: Sequence[Encoded], predicted: Sequence[np.ndarray]
) -> Iterator[str]:
    """One line per word. Words that truncation cut off get the label of ordinary words."""
    names, left_out = trained.labelled.labels, 0
    other = "O" if "O" in names else names[0]
    for example, row, tags in zip(examples, rows, predicted, strict=True):
        found = [names[tag] for tag in tags[row.label != IGNORED]]
        left_out += len(example.words) - len(found)
        found += [other] * (len(example.words) - len(found))
        yield from (f"{word}\t{label}" for word, label in zip(example.words, found, strict=True))
        yield ""
    if left_out:
        logger.warning(f"{left_out} words are beyond the {trained.longest} tokens of an input: labelled {other}")
