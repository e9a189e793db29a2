"""The predictions of a run on its validation sets, example by example, beside the gold labels, as text.

`python -m attn_reg_plugin.experiments.predicted RUN SOURCE SUBSET ...` writes `predictions/SUBSET.tsv` into the run's
folder: a header, and a line `prediction<TAB>gold` per example, with the names of labels; of taggers a line per word,
and an empty one after each sentence.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from attn_reg_plugin.files import read_lines, write_text
from attn_reg_plugin.labelled import LabelledTask
from attn_reg_plugin.labelled.metrics import SENTENCE_END, tag_codes
from attn_reg_plugin.labelled.task_table import REGRESSION, TAGGING

MODULE = "attn_reg_plugin.experiments.predicted"
_HEADER = "prediction\tgold"
#: all examples of a test of another distribution, beside those of its groups
ALL = "test"


def file_of(folder: Path, subset: str) -> Path:
    """Where a run's predictions on a subset are."""
    return folder / "predictions" / f"{subset}.tsv"


def files_of_test(folder: Path, groups: Sequence[str]) -> dict[str, Path]:
    """Where decisions on a test are, of all and of each group, whose names come from the data and are no files' names.

    Args:
        groups: their names, sorted.
    """
    numbered = {group: file_of(folder, f"group{number}") for number, group in enumerate(groups)}
    return {ALL: file_of(folder, ALL), **numbered}


def read_predictions(path: Path, task: LabelledTask) -> tuple[np.ndarray, np.ndarray]:
    """What was predicted and what is gold, (N,) each, as metrics take them.

    Raises:
        ValueError: the file is not one of such predictions (with the line).
        OSError: it cannot be read.
    """
    labels = task.labels or ()
    numbers = dict(zip(labels, tag_codes(labels) if task.kind == TAGGING else range(len(labels)), strict=True))
    pairs: list[tuple[float, ...]] = []
    for line, text in enumerate(read_lines(path), start=1):
        if line == 1:
            continue
        try:
            if task.kind == TAGGING and not text:
                pairs.append((SENTENCE_END, SENTENCE_END))
                continue
            predicted, gold = text.split("\t")
            pairs.append(
                (float(predicted), float(gold)) if task.kind == REGRESSION else (numbers[predicted], numbers[gold])
            )
        except (ValueError, KeyError):
            raise ValueError(f"{path}, line {line}: {text!r} isn't a prediction and its gold label") from None
    if not pairs:
        raise ValueError(f"{path} holds no predictions")
    predicted, gold = np.array(pairs).T
    return predicted, gold


def labels_in(path: Path) -> tuple[str, ...]:
    """The labels that a file of predictions names, sorted: of tasks that took theirs from the training file."""
    below = itertools.islice(read_lines(path), 1, None)  # the header
    return tuple(sorted({label for text in below for label in text.split("\t") if label}))


def write_predictions(run: Path, source: str, subsets: Sequence[str], cpu: bool) -> None:
    """Predict with the best checkpoint of a run.

    Raises:
        ValueError: the run or the data cannot be read.
        FileNotFoundError: there is no checkpoint.
    """
    from attn_reg_plugin.experiments.trained import load_trained
    from attn_reg_plugin.labelled import read_split

    trained = load_trained(run, cpu)
    for subset in subsets:
        examples = trained.corruption.of_evaluation(read_split(trained.labelled, source, subset), subset)
        rows = trained.encode(examples, subset)
        logits = [row.numpy() for row in trained.logits(rows)]
        path = file_of(run, subset)
        path.parent.mkdir(exist_ok=True)
        lines = _lines(trained.labelled, logits, [row.label for row in rows])
        write_text(path, "".join(f"{line}\n" for line in (_HEADER, *lines)))


def write_decisions(path: Path, task: LabelledTask, predicted: np.ndarray, gold: np.ndarray) -> None:
    """Write classes, (N,) each, as `read_predictions` reads them."""
    names = task.labels or ()
    lines = (f"{names[one]}\t{names[other]}" for one, other in zip(predicted, gold, strict=True))
    path.parent.mkdir(exist_ok=True)
    write_text(path, "".join(f"{line}\n" for line in (_HEADER, *lines)))


def _lines(task: LabelledTask, logits: Sequence[np.ndarray], golds: Sequence[object]) -> Iterator[str]:
    """The lines below the header."""
    from attn_reg_plugin.labelled.encoding import IGNORED

    names = task.labels or ()
    for row, gold in zip(logits, golds, strict=True):
        if task.kind == REGRESSION:
            yield f"{float(row[0])!r}\t{float(gold)!r}"  # type: ignore[arg-type]
        elif task.kind == TAGGING:
            words = np.asarray(gold) != IGNORED
            for tag, label in zip(row.argmax(-1)[words], np.asarray(gold)[words], strict=True):
                yield f"{names[tag]}\t{names[label]}"
            yield ""
        else:
            yield f"{names[int(row.argmax())]}\t{names[int(gold)]}"  # type: ignore[call-overload]


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Predictions of a run, as text.")
    parser.add_argument("run", type=Path)
    parser.add_argument("source")
    parser.add_argument("subsets", nargs="+")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args(argv)
    write_predictions(arguments.run, arguments.source, arguments.subsets, arguments.cpu)


if __name__ == "__main__":
    main()
