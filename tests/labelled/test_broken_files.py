"""Every way in which a file of labelled data can be broken: what is said, and in which line."""

import gzip
from pathlib import Path

import pytest

from attn_reg_plugin.labelled import find_task, own_task, read_file, read_split, with_labels
from tests.labelled.files import CONLLU, RTE, SWAG_HEADER, write

#: task -> contents, and what is said of them
BROKEN = {
    "rte": [
        ("", r"line 1: the file is empty$"),
        (RTE, r"line 2: the file has a header but no example"),
        (
            "index\tpremise\tsentence2\tlabel\n0\ta\tb\tentailment\n",
            r"line 1: no column 'sentence1' for task rte; the columns are: index, premise, sentence2, label",
        ),
        ("index\tsentence1\tsentence2\n0\ta\tb\n", r"line 1: no column 'label' with the labels of task rte"),
        ("sentence1\tsentence2\tlabel\tlabel\na\tb\t0\t0\n", r"line 1: there are 2 columns 'label'"),
        (
            f"{RTE}0\ta\tb\tentailment\n1\ta\tb\tentails\n",
            r"line 3: the label is 'entails', but must be one of entailment, not_entailment$",
        ),
        (f"{RTE}0\ta\tb\tentailment\n1\ta b\tentailment\n", r"line 3: 3 fields, but the file's columns are 4 \(index"),
        (f"{RTE}0\ta\tb\tentailment\n\n2\ta\tb\tentailment\n", r"line 3: 0 fields, but the file's columns are 4"),
        (RTE.encode() + "0\té\tb\tentailment\n".encode("latin-1"), r"line 2: not UTF-8 \(byte 0xe9 at position 3"),
    ],
    "cola": [
        ("gj04\t1\tA cat.\n", r"line 1: 3 fields, but the file's columns are 4 \(source, label, mark, sentence\)"),
    ],
    "stsb": [
        ("sentence1\tsentence2\tscore\na\tb\t5.5\n", r"line 2: the value is '5\.5', but must be .* from 0 to 5"),
        ("sentence1\tsentence2\tscore\na\tb\tnan\n", r"line 2: the value is 'nan', but must be a number"),
    ],
    "swag": [(f'{SWAG_HEADER},label\n0,v,1,"He,,,gold,a,b,c,d,1\n', r"line 2: not CSV \(")],
    "wnut17": [
        ("\n\t\n", r"line 1: the file has no words$"),
        ("a\tO\nb\n", r"line 2: 1 field, but each word's line must have 2"),
        ("a\tO\n\tO\n", r"line 2: 2 fields, some of them empty, but"),
        ("a\tO\n\nb\tB-animal\n", r"line 3: the label is 'B-animal', but must be one of O, B-corporation"),
    ],
    "upos": [
        (CONLLU.replace("\t", " "), r"line 1: 1 field, but a line of CoNLL-U must have 10, separated by tabs"),
        (CONLLU + CONLLU, r"line 2: the word's number is '1', but must be 2"),
    ],
}

#: lines of JSON, and what is said of them
JSON = [
    ('{"text": "a", "label": "x"}\n[1]\n', "line 2: not a JSON object; each line must hold one"),
    ('{"text": ["a"], "label": "x"}\n', "line 1: 'text' is list, but must be text"),
    ('{"text": "half \\ud83d", "label": "x"}\n', "line 1: a text is missing, or holds half a character"),
    ('{"text": null, "label": "x"}\n', "line 1: no column 'text' for task own; the columns are: label"),
    ('{"text": "a", "label": "x"}\n{"text": "a"}\n', "line 2: no column 'label' with the labels of task own"),
    ('{"text": "a", "label": NaN}\n', "line 1: the label is nan, but must be a text"),
    ("", "line 1: the file has no example"),
]


@pytest.mark.parametrize(("content", "message"), JSON)
def test_broken_lines_of_json(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "train.jsonl", content)
    with pytest.raises(ValueError, match=rf"train\.jsonl, {message}"):
        list(read_file(own_task("classification", "text", labels="x,z", file_format="jsonl"), path))


@pytest.mark.parametrize(
    ("name", "content", "message"), [(name, *case) for name, cases in BROKEN.items() for case in cases]
)
def test_broken_files_are_refused_with_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = write(tmp_path / "broken.txt", content)
    with pytest.raises(ValueError, match=rf"broken\.txt, {message}") as caught:
        list(read_file(find_task(name), path))
    assert "\n" not in str(caught.value)


def test_a_broken_gzip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress((RTE + "0\ta\tb\tentailment\n" * 99).encode())[:-12])
    with pytest.raises(ValueError, match=r"train\.tsv\.gz, after line \d+: not a whole gzip file"):
        read_split(find_task("rte"), tmp_path, "train")


def test_missing_folder_and_missing_file_say_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent is no folder; give the one .* of task rte"):
        read_split(find_task("rte"), tmp_path / "absent", "train")
    write(tmp_path / "dev.tsv", RTE)
    with pytest.raises(ValueError, match=r"has no train\.tsv \(plain or \.gz\) for the split 'train' .* has: dev\.tsv"):
        read_split(find_task("rte"), tmp_path, "train")


def test_two_files_of_a_split_are_refused(tmp_path: Path) -> None:
    for name in ("a-ud-train.conllu", "b-ud-train.conllu.gz"):
        write(tmp_path / name, CONLLU)
    with pytest.raises(ValueError, match=r"has 2 files \*-ud-train\.conllu: a-ud"):
        with_labels(find_task("xpos"), tmp_path)
