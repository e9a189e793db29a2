"""Labelled tasks through the `datasets` library, with data sets made here in place of the hub's."""

from typing import Any
from unittest import mock

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from attn_reg_plugin.labelled import TaggedSentence, TextExample, find_task, own_task, read_split


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for `datasets.load_dataset`: what it gives next, and then what it was asked for."""
    found: list[Any] = []

    def load_dataset(path: str, name: str | None, split: str) -> Dataset:
        (data,) = found
        found[:] = (path, name, split)
        return data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return found


def read(
    hub: list[Any], task: Any, columns: dict[str, list[Any]] | Dataset, split: str = "train", source: str = "hub"
) -> list:
    """The examples of a split with these columns."""
    hub[:] = [columns if isinstance(columns, Dataset) else Dataset.from_dict(columns)]
    return read_split(find_task(task) if isinstance(task, str) else task, source, split)


def test_a_glue_task_with_other_column_names_and_split_names(hub: list[Any]) -> None:
    columns = {"premise": ["a"], "hypothesis": ["b"], "label": [2], "idx": [0]}
    assert read(hub, "mnli", columns, "valid1") == [TextExample(1, "a", "b", 2)]
    assert hub == ["nyu-mll/glue", "mnli", "validation_mismatched"]


def test_a_regression_and_a_test_set_without_labels(hub: list[Any]) -> None:
    columns = {"sentence1": ["a"], "sentence2": ["b"], "label": [-1.0]}
    assert read(hub, "stsb", columns, "test") == [TextExample(1, "a", "b")]
    with pytest.raises(ValueError, match=r"row 1: the value is '-1\.0', but must be a number from 0 to 5"):
        read(hub, "stsb", columns)
    task = own_task("regression", "sentence1,sentence2", file_format="tsv")
    assert read(hub, task, columns, source="hub:some/data")[0].label == -1.0
    classes = {"sentence": ["a"], "label": [-1]}
    assert read(hub, "cola", classes, "test") == [TextExample(1, "a")]
    with pytest.raises(ValueError, match=r"nyu-mll/glue cola train, row 1: there is no label"):
        read(hub, "cola", classes)
    own = own_task("classification", "sentence", labels="2,-1,1", file_format="tsv")
    for given, classes in (([-1, 1, 2], [1, 2, 0]), ([-1.0, 1.0, 2.0], [1, 2, 0]), ([0, 1, 2], [0, 1, 2])):
        found = read(hub, own, {"sentence": ["a"] * 3, "label": given}, source="hub:some/data")
        assert [one.label for one in found] == classes, "labels where all are, else places among them"


def test_tags_are_matched_by_name_where_the_data_set_names_them(hub: list[Any]) -> None:
    names = ["I-person", "O", "B-person"]
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=names))})
    data = Dataset.from_dict({"tokens": [["Ann", "Lee", "left"]], "ner_tags": [[2, 0, 1]]}, features=features)
    (sentence,) = read(hub, "wnut17", data)
    labels = find_task("wnut17").labels
    assert sentence.words == ("Ann", "Lee", "left")
    assert [labels[index] for index in sentence.labels] == ["B-person", "I-person", "O"]
    written = {"tokens": [["Ann"]], "ner_tags": [["B-person"]]}
    assert read(hub, "wnut17", written) == [TaggedSentence(1, ("Ann",), (labels.index("B-person"),))]


@pytest.mark.parametrize(("names", "labels"), [(["not_entailment", "entailment"], [1, 0]), (["yes", "no"], [0, 1])])
def test_classes_are_matched_by_name_where_the_names_are_the_tasks(
    names: list[str], labels: list[int], hub: list[Any]
) -> None:
    columns = {"sentence1": ["a", "a"], "sentence2": ["b", "b"], "label": [0, 1]}
    features = {"sentence1": Value("string"), "sentence2": Value("string"), "label": ClassLabel(names=names)}
    data = Dataset.from_dict(columns, features=Features(features))
    assert [example.label for example in read(hub, "rte", data)] == labels


def test_imdb_is_validated_on_its_test_set(hub: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert read(hub, "imdb", {"text": ["good"], "label": [1]}, "valid") == [TextExample(1, "good", None, 1)]
    assert hub == ["stanfordnlp/imdb", None, "test"]
    assert caplog.messages == ["stanfordnlp/imdb has no validation set; as in the papers, test is taken for it"]


@pytest.mark.parametrize(
    ("task", "columns", "message"),
    [
        ("rte", {"premise": ["a"], "label": [0]}, r"rte train has no column 'sentence1' .*; it has: premise, label"),
        ("rte", {"sentence1": ["a"], "sentence2": ["b"], "label": [2]}, "row 1: the label is 2, but task rte has 2"),
        ("rte", {"sentence1": ["a"], "sentence2": ["b"]}, "rte train has no column 'label'"),
        ("rte", {"sentence1": ["a"], "sentence2": ["b"], "label": ["yes"]}, "row 1: the label is 'yes', but must be"),
        ("rte", {"sentence1": ["a"], "sentence2": ["b"], "label": [0.5]}, "row 1: the label is 0.5, but must be a"),
        ("rte", {"sentence1": ["a"], "sentence2": ["b"], "label": [[1]]}, r"row 1: the label is \[1\], but must be a"),
        ("wnut17", {"tokens": [["a", "b"]], "ner_tags": [[0]]}, "leondz/wnut_17 train, row 1: 2 words, but 1 labels"),
        ("wnut17", {"tokens": [None], "ner_tags": [[0]]}, "row 1: 0 words, but 1 labels"),
    ],
)
def test_broken_rows(task: str, columns: dict[str, list[Any]], message: str, hub: list[Any]) -> None:
    with pytest.raises(ValueError, match=message):
        read(hub, task, columns)


def test_a_failure_says_to_give_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", mock.Mock(side_effect=ConnectionError("no network\nat all")))
    message = r"nyu-mll/glue rte train could not be read .*\(ConnectionError: no network\): give a folder instead$"
    with pytest.raises(ValueError, match=message):
        read_split(find_task("rte"), "hub", "train")


def test_another_place_on_the_hub_can_be_named(hub: list[Any]) -> None:
    columns = {"sentence1": ["a"], "sentence2": ["b"], "label": [1]}
    assert read(hub, "paws-x", columns, "valid", "hub:some/paws:de")[0].label == 1
    assert hub == ["some/paws", "de", "validation"]
    with pytest.raises(ValueError, match=r"task own is not read from the hub; give a folder"):
        read_split(own_task("regression", "a", file_format="tsv"), "hub", "train")
