"""Labelled tasks through the `datasets` library, with data sets made here in place of the hub's."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from attn_reg_plugin.labelled import (
    ChoiceExample,
    TaggedSentence,
    TextExample,
    find_task,
    labels_needed,
    plain_task,
    read_split,
)


class Loader:
    """Stands for `datasets.load_dataset`."""

    def __init__(self, data: Dataset) -> None:
        self.data, self.asked = data, None

    def __call__(self, path: str, name: str | None, split: str) -> Dataset:
        self.asked = (path, name, split)
        return self.data


def test_a_glue_task_with_other_column_names_and_split_names() -> None:
    columns = {"premise": ["a"], "hypothesis": ["b"], "label": [2], "idx": [0]}
    loader = Loader(Dataset.from_dict(columns))
    assert read_split(find_task("mnli"), "hub", "valid1", loader) == [TextExample(1, "a", "b", 2)]
    assert loader.asked == ("nyu-mll/glue", "mnli", "validation_mismatched")


def test_a_regression_and_a_test_set_without_labels() -> None:
    data = Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"], "label": [-1.0]})
    assert read_split(find_task("stsb"), "hub", "test", Loader(data)) == [TextExample(1, "a", "b")]
    with pytest.raises(ValueError, match=r"row 1: the value is '-1\.0', but must be a number from 0 to 5"):
        read_split(find_task("stsb"), "hub", "train", Loader(data))
    task = plain_task("regression", ("sentence1", "sentence2"))
    assert read_split(task, "hub:some/data", "train", Loader(data))[0].label == -1.0
    classes = Dataset.from_dict({"sentence": ["a"], "label": [-1]})
    assert read_split(find_task("cola"), "hub", "test", Loader(classes)) == [TextExample(1, "a")]
    with pytest.raises(ValueError, match=r"nyu-mll/glue cola train, row 1: there is no label"):
        read_split(find_task("cola"), "hub", "train", Loader(classes))


def test_multiple_choice() -> None:
    columns = {"startphrase": ["He"], **{f"ending{i}": [str(i)] for i in range(4)}, "label": [3]}
    examples = read_split(find_task("swag"), "hub", "train", Loader(Dataset.from_dict(columns)))
    assert examples == [ChoiceExample(1, "He", ("0", "1", "2", "3"), 3)]


def test_tags_are_matched_by_name_where_the_data_set_names_them() -> None:
    names = ["I-person", "O", "B-person"]
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=names))})
    data = Dataset.from_dict({"tokens": [["Ann", "Lee", "left"]], "ner_tags": [[2, 0, 1]]}, features=features)
    (sentence,) = read_split(find_task("wnut17"), "hub", "train", Loader(data))
    labels = find_task("wnut17").labels
    assert sentence.words == ("Ann", "Lee", "left")
    assert [labels[index] for index in sentence.labels] == ["B-person", "I-person", "O"]
    written = Dataset.from_dict({"tokens": [["Ann"]], "ner_tags": [["B-person"]]})
    expected = [TaggedSentence(1, ("Ann",), (labels.index("B-person"),))]
    assert read_split(find_task("wnut17"), "hub", "train", Loader(written)) == expected


def test_classes_are_matched_by_name_where_the_names_are_the_tasks() -> None:
    columns = {"sentence1": ["a", "a"], "sentence2": ["b", "b"], "label": [0, 1]}
    features = {"sentence1": Value("string"), "sentence2": Value("string")}
    for names, labels in ((["not_entailment", "entailment"], [1, 0]), (["yes", "no"], [0, 1])):
        data = Dataset.from_dict(columns, features=Features(label=ClassLabel(names=names), **features))
        assert [example.label for example in read_split(find_task("rte"), "hub", "train", Loader(data))] == labels


def test_imdb_is_validated_on_its_test_set(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loader = Loader(Dataset.from_dict({"text": ["good"], "label": [1]}))
    assert read_split(find_task("imdb"), "hub", "valid", loader) == [TextExample(1, "good", None, 1)]
    assert loader.asked == ("stanfordnlp/imdb", None, "test")
    assert caplog.messages == ["stanfordnlp/imdb has no validation set; as in the papers, test is taken for it"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"premise": ["a"], "label": [0]}, r"rte train has no column 'sentence1' for task rte; it has: premise, label"),
        ({"sentence1": ["a"], "sentence2": ["b"], "label": [2]}, r"row 1: the label is 2, but task rte has 2 labels"),
        ({"sentence1": ["a"], "sentence2": ["b"]}, r"row 1: there is no label, and training"),
        ({"sentence1": ["a"], "sentence2": ["b"], "label": ["yes"]}, r"row 1: the label is 'yes', but must be one of"),
    ],
)
def test_broken_rows(columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_split(find_task("rte"), "hub", "train", Loader(Dataset.from_dict(columns)))


def test_unequal_words_and_labels() -> None:
    data = Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[0]]})
    with pytest.raises(ValueError, match=r"leondz/wnut_17 train, row 1: 2 words, but 1 labels"):
        read_split(find_task("wnut17"), "hub", "train", Loader(data))


def test_a_failure_says_to_give_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = r"nyu-mll/glue rte train could not be read .*\(ConnectionError: no network\): give a folder instead$"
    with pytest.raises(ValueError, match=message):
        read_split(find_task("rte"), "hub", "train")


def test_another_place_on_the_hub_can_be_named() -> None:
    loader = Loader(Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"], "label": [1]}))
    assert read_split(find_task("paws-x"), "hub:some/paws:de", "valid", loader)[0].label == 1
    assert loader.asked == ("some/paws", "de", "validation")
    with pytest.raises(ValueError, match=r"task plain is not read from the hub; give a folder"):
        read_split(plain_task("regression", ("a",)), "hub", "train")


def test_only_test_splits_may_lack_labels() -> None:
    assert [labels_needed(split) for split in ("train", "valid", "valid1", "test", "test1")] == [True] * 3 + [False] * 2
