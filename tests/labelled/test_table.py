"""Rows of the table of labelled tasks, and tasks of the user's own."""

from pathlib import Path

import pytest

from attn_reg_plugin.labelled import (
    CLASSIFICATION,
    MULTIPLE_CHOICE,
    REGRESSION,
    TAGGING,
    TASKS,
    ChoiceExample,
    LabelledTask,
    TaggedSentence,
    TextExample,
    find_task,
    own_task,
    read_split,
    with_labels,
)
from attn_reg_plugin.labelled.task_table import flags_of
from attn_reg_plugin.tasks.labelled_task import LabelledTaskConfig, described_task
from tests.labelled.files import write


def test_a_new_task_is_one_row(tmp_path: Path) -> None:
    task = LabelledTask("boolq", CLASSIFICATION, ("question", "passage"), "answer", ("no", "yes"))
    write(tmp_path / "dev.tsv", "passage\tquestion\tanswer\nSnow is cold.\tIs it?\tyes\n")
    assert read_split(task, tmp_path, "valid") == [TextExample(2, "Is it?", "Snow is cold.", 1)]
    assert task.metrics == ("accuracy",)


@pytest.mark.parametrize(
    ("name", "content", "flags", "said"),
    [
        ("tsv", "a\ty\nx\tgood\nz\t\n", {"text_columns": "a", "label_column": "y"}, "line 3: the label '' is empty"),
        ("tsv", "a\tlabel\nx\tyes\nz\tyes \n", {"text_columns": "a"}, "line 3: the label 'yes ' has blanks around it"),
        ("csv", 'a,label\nx,"u\nv"', {"text_columns": "a"}, r"line 2: the label 'u\\nv' has .* a character that isn't"),
        ("tsv", "a\tlabel\nx\tyes\nz\tyes\n", {"text_columns": "a"}, "all examples have the label 'yes', but"),
        ("conll", "a X\n", {"label_column": "upos"}, "is 'upos', but in a file of words it must be a number"),
        ("conll", "a X\n", {"label_column": "-5"}, "line 1: no column -5 for the label"),
    ],
)
def test_labels_that_cannot_be_collected(tmp_path: Path, name: str, content: str, flags: dict, said: str) -> None:
    write(tmp_path / f"train.{name}", content)
    kind = TAGGING if name == "conll" else CLASSIFICATION
    with pytest.raises(ValueError, match=said):
        with_labels(own_task(kind, **flags, data=tmp_path), tmp_path)


def test_labels_of_any_script(tmp_path: Path) -> None:
    """Persian and Indic words have joiners, which no blank is."""
    labels = ("می\u200cخواهم", "हाँ\u200d", "n° 1")
    write(tmp_path / "train.tsv", "a\tlabel\n" + "".join(f"x\t{label}\n" for label in labels))
    assert set(with_labels(own_task(CLASSIFICATION, "a", data=tmp_path), tmp_path).labels) == set(labels)


def test_labels_must_be_known_before_reading(tmp_path: Path) -> None:
    write(tmp_path / "train.conllu", "1\tI\tI\tPRON\tPRP\t_\t2\tnsubj\t_\t_\n")
    with pytest.raises(ValueError, match=r"task xpos takes its labels from the training file: call with_labels"):
        read_split(find_task("xpos"), tmp_path, "train")
    with pytest.raises(ValueError, match=r"task xpos .* needs a folder, not the hub"):
        with_labels(find_task("xpos"), "hub")
    assert with_labels(find_task("xpos"), tmp_path).labels == ("PRP",)


def test_ones_own_files_of_the_penn_treebank(tmp_path: Path) -> None:
    """Words and tags in the first two columns, by tabs or spaces, whatever follows; the tags of the training file."""
    write(tmp_path / "train.txt", "Pierre NNP\n, ,\n\nWill MD\njoin VB\n")
    write(tmp_path / "dev.conll", "-DOCSTART- -X- O\n\nwill\tMD\tB-VP\n,\t,\tO\n")
    task = with_labels(find_task("ptb"), tmp_path)
    assert task.labels == (",", "MD", "NNP", "VB") and task.metrics == ("accuracy",)
    assert [one.words for one in read_split(task, tmp_path, "train")] == [("Pierre", ","), ("Will", "join")]
    assert read_split(task, tmp_path, "valid") == [TaggedSentence(3, ("will", ","), (1, 0))]
    write(tmp_path / "test.conll", "odd XX\n")
    with pytest.raises(ValueError, match=r"test\.conll, line 1: the label is 'XX', but must be one of ,, MD, NNP, VB"):
        read_split(task, tmp_path, "test")


@pytest.mark.parametrize(
    ("tags", "chief"), [("O B-PER I-PER", "f1"), ("B-x", "f1"), ("O", "accuracy"), ("NN B-x", "accuracy"), ("", "")]
)
def test_taggers_of_entities_are_chosen_by_f1(tmp_path: Path, tags: str, chief: str) -> None:
    """Whether the labels are given or those of the training file; until they are known there is no metric."""
    write(tmp_path / "train.conll", "\n".join(f"word {tag}" for tag in tags.split()))
    task = own_task(TAGGING, labels=tags.replace(" ", ","), data=tmp_path)
    assert "".join(task.metrics[:1]) == chief
    assert not tags or with_labels(own_task(TAGGING, data=tmp_path), tmp_path).metrics == task.metrics


#: file, its content, the flags that describe it, the examples
OWN = [
    (
        "train.csv",
        'stars,review\n10,good\n2,"bad, bad"\n',
        {"kind": CLASSIFICATION, "text_columns": "review", "label_column": "stars"},
        [TextExample(2, "good", None, 1), TextExample(3, "bad, bad", None, 0)],
    ),
    (
        "train.jsonl.gz",
        '{"a": "x", "b": "\\u00e9\\n", "y": -1}\n\n{"b": "z", "a": "y", "c": null, "y": 0.5}\n',
        {"kind": REGRESSION, "text_columns": "a, b", "label_column": "y"},
        [TextExample(1, "x", "é\n", -1.0), TextExample(3, "y", "z", 0.5)],
    ),
    (
        "train.jsonl",
        '{"text": "x", "label": true}\n{"text": "y", "label": 3}\n',
        {"kind": CLASSIFICATION, "text_columns": "text", "labels": "true,3"},
        [TextExample(1, "x", None, 0), TextExample(2, "y", None, 1)],
    ),
    (
        "train.tsv",
        "q\ta\tb\tlabel\nQ\tA\tB\ty\n",
        {"kind": MULTIPLE_CHOICE, "text_columns": "q,a,b", "labels": "x,y"},
        [ChoiceExample(2, "Q", ("A", "B"), 1)],
    ),
    ("train.conll", "a X N\nb Y V\n", {"kind": TAGGING}, [TaggedSentence(1, ("a", "b"), (0, 1))]),
    (
        "train.conllu",
        "1\tI\tI\tPRON\tPRP\t_\t2\tnsubj\t_\t_\n2\tgo\tgo\tVERB\tVBP\t_\t0\troot\t_\tSpaceAfter=No\n",
        {"kind": TAGGING},
        [TaggedSentence(1, ("I", "go"), (0, 1))],
    ),
]


@pytest.mark.parametrize(("file", "content", "flags", "examples"), OWN)
def test_a_task_of_flags(tmp_path: Path, file: str, content: str, flags: dict, examples: list) -> None:
    """The format is that of the training file; fairseq's task reads the flags as the same task."""
    write(tmp_path / file, content)
    task = own_task(**flags, data=tmp_path)
    assert read_split(with_labels(task, tmp_path), tmp_path, "train") == examples
    config = {name.replace("-", "_"): value for name, value in flags_of(task).items()}
    described = LabelledTaskConfig(**{name: value for name, value in config.items() if name != "regression"})
    described.regression = config.get("regression", False)
    assert described_task(described, ("classification", task.kind) if described.regression else (task.kind,)) == task
    assert flags_of(find_task("rte")) == {"labelled": "rte"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"kind": CLASSIFICATION}, "classification has 1 or 2 --text-columns, not 0"),
        ({"kind": CLASSIFICATION, "text_columns": "a"}, r"has no training file; it must be one of train\.tsv"),
        ({"kind": "ranking", "text_columns": "a", "file_format": "csv"}, "the kind is 'ranking', but must be one of"),
        ({"kind": TAGGING, "file_format": "csv"}, "--file-format csv is not for tagging"),
        ({"kind": REGRESSION, "text_columns": "a", "labels": "1,2", "file_format": "csv"}, "--labels 1,2 is not for"),
        ({"kind": CLASSIFICATION, "text_columns": "a,b,c", "file_format": "csv"}, "1 or 2 --text-columns, not 3"),
        ({"kind": MULTIPLE_CHOICE, "text_columns": "a,b", "file_format": "csv"}, "3 or more --text-columns, not 2"),
        ({"kind": TAGGING, "labels": "O,X,"}, "--labels O,X, must be different labels with commas between"),
        ({"kind": TAGGING, "labels": "O,X,X"}, "--labels O,X,X must be different labels"),
        (
            {"kind": CLASSIFICATION, "text_columns": "a,label", "file_format": "csv"},
            "another column, and none the label's",
        ),
        (
            {"kind": CLASSIFICATION, "text_columns": "a,a", "file_format": "csv"},
            "--text-columns a,a: each must be another",
        ),
        ({"kind": TAGGING, "text_columns": "a,b"}, "tagging has 1 --text-columns, not 2"),
        (
            {"kind": MULTIPLE_CHOICE, "text_columns": "q,a,b,c", "labels": "A,B", "file_format": "csv"},
            r"needs a label for each of its 3 endings, not 2 \(A, B\)",
        ),
    ],
)
def test_flags_that_describe_no_task(tmp_path: Path, flags: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        own_task(**flags, data=tmp_path)


def test_every_row_of_the_table_has_metrics_and_distinct_labels() -> None:
    from attn_reg_plugin.labelled.metrics import check_scores

    for task in TASKS.values():
        assert len(set(task.labels or ())) == len(task.labels or ())
        assert bool(task.metrics) is (task.labels is not None)  # else they come with the training file's labels
        if task.labels is not None:
            check_scores(task.metrics, task.kind, task.labels)
