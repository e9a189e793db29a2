"""The predictions of a run on its validation sets, example by example, beside the gold labels, as text.

`python -m attn_reg_plugin.experiments.predicted RUN SOURCE SUBSET ...` writes `predictions/SUBSET.tsv` into the run's
folder: a header, and a line `prediction<TAB>gold` per example, with the names of labels; of taggers a line per word,
and an empty line after each sentence.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_reg_plugin.files import read_lines, write_text
from attn_reg_plugin.labelled.metrics import SENTENCE_END, tag_codes
from attn_reg_plugin.labelled.task_table import REGRESSION, TAGGING, LabelledTask

MODULE = "attn_reg_plugin.experiments.predicted"
_HEADER = "prediction\tgold"


def file_of(folder: Path, subset: str) -> Path:
    """The file of a run's predictions on a subset."""
    return folder / "predictions" / f"{subset}.tsv"


def write_predictions(run: Path, source: str, subsets: Sequence[str], cpu: bool) -> None:
    """Predict with the best checkpoint of a run, on the CPU or on the GPU if there is one."""
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


def _lines(task: LabelledTask, logits: Sequence[np.ndarray], golds: Sequence[Any]) -> Iterator[str]:
    """The lines below the header."""
    from attn_reg_plugin.regularizers.base.outputs import IGNORED

    names = task.labels or ()
    for row, gold in zip(logits, golds, strict=True):
        if task.kind == REGRESSION:
            yield f"{float(row[0])!r}\t{float(gold)!r}"
        elif task.kind == TAGGING:
            words = np.asarray(gold) != IGNORED
            for tag, label in zip(row.argmax(-1)[words], np.asarray(gold)[words], strict=True):
                yield f"{names[tag]}\t{names[label]}"
            yield ""
        else:
            yield f"{names[int(row.argmax())]}\t{names[int(gold)]}"


def read_predictions(path: Path, kind: str, labels: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The predictions and the gold labels of a file, (N,) each, as metrics take them.

    Args:
        kind, labels: of the task; a line that does not fit them is refused.
    """
    numbers = dict(zip(labels, tag_codes(tuple(labels)) if kind == TAGGING else range(len(labels)), strict=True))
    pairs: list[tuple[float, ...]] = []
    for line, text in itertools.islice(enumerate(read_lines(path), start=1), 1, None):
        try:
            if kind == TAGGING and not text:
                pairs.append((SENTENCE_END, SENTENCE_END))
                continue
            both = text.split("\t")
            predicted, gold = ((float if kind == REGRESSION else numbers.__getitem__)(one) for one in both)
            pairs.append((predicted, gold))
        except (ValueError, KeyError):
            raise ValueError(f"{path}, line {line}: {text!r} isn't a prediction and its gold label") from None
    if not pairs:
        raise ValueError(f"{path} holds no predictions")
    predicted, gold = np.array(pairs).T
    return predicted, gold


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Predictions of a run, as text.")
    parser.add_argument("run", type=Path)
    parser.add_argument("source")
    parser.add_argument("subsets", nargs="+")
    parser.add_argument("--cpu", action="store_true")
    write_predictions(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
