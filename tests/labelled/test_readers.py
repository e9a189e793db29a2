"""Readers of labelled data: every official format by hand, and rows and labels that are left out."""

from pathlib import Path

import pytest

from attn_reg_plugin.labelled import ChoiceExample, TaggedSentence, TextExample, find_task, own_task, read_split
from attn_reg_plugin.labelled.reading import read_file
from attn_reg_plugin.labelled.rows import read_records
from tests.labelled.files import SWAG_HEADER, write

#: task, split, file, content, the examples
OFFICIAL = [
    (
        "cola",
        "train",
        "train.tsv",
        'gj04\t1\t\tThe "cat sleeps.\nl-93\t0\t*\tCat the sleeps.\n',
        [TextExample(1, 'The "cat sleeps.', None, 1), TextExample(2, "Cat the sleeps.", None, 0)],
    ),
    (
        "mrpc",
        "train",
        "msr_paraphrase_train.txt",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tHe said " no .\tNo , he said .\r\n',
        [TextExample(2, 'He said " no .', "No , he said .", 1)],
    ),
    (
        "stsb",
        "valid",
        "dev.tsv",
        "index\tgenre\tsentence1\tsentence2\tscore\n0\tnews\tA plane.\tA boat.\t1.250\n",
        [TextExample(2, "A plane.", "A boat.", 1.25)],
    ),
    (
        "mnli",
        "valid1",
        "dev_mismatched.tsv",
        "sentence1\tsentence2\tgold_label\nA\tB\tneutral\n",
        [TextExample(2, "A", "B", 1)],
    ),
    (
        "imdb",
        "test",
        "test.tsv",
        "id\tlabel\ttext\ntest/pos/1_9\t1\tGood <br />film\ntest/neg/1_1\tneg\tBad\n",
        [TextExample(2, "Good <br />film", None, 1), TextExample(3, "Bad", None, 0)],
    ),
    (
        "swag",
        "train",
        "train.csv",
        f"{SWAG_HEADER},label\n"
        '0,v,1,"He, the cook",He ,the cook,gold,"cuts ""it"".",a.,b.,c.,2\n'
        "1,v,1,She,She,,gold,runs.,d.,e.,f.,0\n",
        [
            ChoiceExample(2, "He, the cook", ('cuts "it".', "a.", "b.", "c."), 2),
            ChoiceExample(3, "She", ("runs.", "d.", "e.", "f."), 0),
        ],
    ),
    (
        "swag",
        "test",
        "test.csv",
        f"{SWAG_HEADER}\n0,v,1,He,He,,gold,w.,x.,y.,z.\n",
        [ChoiceExample(2, "He", ("w.", "x.", "y.", "z."))],
    ),
    (
        "wnut17",
        "train",
        "wnut17train.conll",
        "Empire\tB-location\nState\tI-location\n\t\n.\tO\n\n\n",
        [TaggedSentence(1, ("Empire", "State"), (7, 8)), TaggedSentence(4, (".",), (0,))],
    ),
    (
        "conll2003",
        "valid",
        "eng.testa",
        "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n-DOCSTART- -X- -X- O\n\nBonn NNP I-NP B-LOC\n",
        [TaggedSentence(3, ("EU", "rejects"), (4, 0)), TaggedSentence(8, ("Bonn",), (5,))],
    ),
    (
        "upos",
        "valid",
        "en_ewt-ud-dev.conllu",
        "# sent_id = 1\n1\tI\tI\tPRON\tPRP\t_\t2\tnsubj\t_\t_\n"
        "2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_\n2\tdo\tdo\tAUX\tVBP\t_\t0\troot\t_\t_\n"
        "3\tn't\tnot\tPART\tRB\t_\t2\tadvmod\t_\t_\n3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t_\t_\n\n"
        "1\tNo\tno\tINTJ\tUH\t_\t0\troot\t_\t_\n",
        [TaggedSentence(2, ("I", "do", "n't"), (10, 3, 9)), TaggedSentence(8, ("No",), (6,))],
    ),
]


@pytest.mark.parametrize(("name", "split", "file", "content", "examples"), OFFICIAL)
def test_official_formats(tmp_path: Path, name: str, split: str, file: str, content: str, examples: list) -> None:
    write(tmp_path / f"{file}.gz", content)
    assert read_split(find_task(name), tmp_path, split) == examples


def test_imdb_is_validated_on_its_test_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    write(tmp_path / "test.tsv", "text\tlabel\nGood\t1\n")
    assert read_split(find_task("imdb"), tmp_path, "valid") == [TextExample(2, "Good", None, 1)]
    assert caplog.messages == [f"{tmp_path} has no validation set; as in the papers, test.tsv is taken for it"]
    write(tmp_path / "dev.tsv", "text\tlabel\nits own\tpos\n")
    assert [example.first for example in read_split(find_task("imdb"), tmp_path, "valid")] == ["its own"]


def test_broken_rows_of_qqp_are_left_out_of_labelled_files_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    path = write(tmp_path / "train.tsv", f"{header}0\t1\t2\ta\tb\t1\n1\t3\t4\ta\n2\n3\t1\t2\tc\td\t0\n")
    assert [example.line for example in read_split(find_task("qqp"), tmp_path, "train")] == [2, 5]
    assert caplog.messages == [f"{path}: 2 rows without 6 fields were left out, the first in line 3"]
    write(tmp_path / "test.tsv", "id\tquestion1\tquestion2\n0\ta\tb\n1\ta\n")
    with pytest.raises(ValueError, match=r"test\.tsv, line 3: 2 fields, but the file's columns are 3"):
        read_split(find_task("qqp"), tmp_path, "test")


def test_a_quoted_field_may_hold_a_line_break_and_lines_count_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\n"one\ntwo",1\nx,y\n')
    assert list(read_records(path, "csv")) == [(1, ["text", "label"]), (2, ["one\ntwo", "1"]), (4, ["x", "y"])]
    task = own_task("classification", "text", labels="1,y", file_format="csv")
    (blank,) = read_file(task, write(tmp_path / "test.csv", "text,label\nx,\n"), False)
    assert blank.label is None, "a test set's labels may be blank"
