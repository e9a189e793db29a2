"""Documents in folders named by their label, as the IMDB reviews come: `train/pos/0_9.txt`, `train/neg/0_3.txt`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attn_reg_plugin.files import read_lines
from attn_reg_plugin.labelled.examples import TextExample
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, LabelledTask


def is_document_folder(folder: Path, task: LabelledTask) -> bool:
    """Whether any of the task's labels is a subfolder of this folder."""
    single = task.kind == CLASSIFICATION and len(task.text) == 1
    return single and any((folder / label).is_dir() for label in task.labels or ())


def read_documents(folder: Path, task: LabelledTask) -> Iterator[TextExample]:
    """The documents `LABEL/*.txt` of a folder, label by label, each by name; line breaks become spaces.

    Args:
        folder: holds one folder for each label of the task (IMDB's `unsup` is not read).
        task: classification of one text.

    Raises:
        ValueError: a label's folder is missing or empty; a document is empty or not UTF-8.
    """
    number = 0
    for index, label in enumerate(task.labels or ()):
        if not (folder / label).is_dir():
            raise ValueError(f"{folder} has no folder {label!r} for a label of task {task.name}")
        paths = sorted([*(folder / label).glob("*.txt"), *(folder / label).glob("*.txt.gz")])
        if not paths:
            raise ValueError(f"{folder / label} has no document (*.txt or *.txt.gz)")
        for path in paths:
            number += 1
            text = " ".join(read_lines(path))
            if not text.strip():
                raise ValueError(f"{path}, line 1: the document is empty")
            yield TextExample(number, text, None, index)
