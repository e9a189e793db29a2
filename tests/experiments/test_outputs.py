"""`attn-reg export` and `report` on outputs that cannot be written and on what is no run; malformed tables of text."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from types import SimpleNamespace

from transformers import AutoModel

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments import trained as trained_module
from attn_reg_plugin.labelled import find_task, read_file
from tests.models.hf_folders import make_encoder, tokenizer

RECORD = '{"epoch": 1, "num_updates": %s, "drop_encoder.self[0]": %s}\n'


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModel.from_pretrained(make_encoder(tmp_path / "encoder"))
    made = SimpleNamespace(model=SimpleNamespace(model=model), tokenizer=tokenizer(), checkpoint=tmp_path / "best.pt")
    monkeypatch.setattr(trained_module, "load_trained", lambda run: made)


def test_export_onto_a_full_disk(trained: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, limit = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
    try:
        assert main(["export", "run", str(tmp_path / "a" / "b")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert f"attn-reg export: {tmp_path / 'a' / 'b'}: the file is larger" in error  # after transformers' progress bar
    assert sorted(tmp_path.iterdir()) == before
    assert main(["export", "run", str(tmp_path / "a" / "b")]) == 0
    assert AutoModel.from_pretrained(tmp_path / "a" / "b") and [path.name for path in (tmp_path / "a").iterdir()] == [
        "b"
    ]


@pytest.mark.parametrize(
    ("out", "said"), [("encoder/config.json", "exists already"), ("encoder/config.json/x", "a file")]
)
def test_export_into_a_file(
    out: str, said: str, trained: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "run", str(tmp_path / out)]) == 2
    assert said in (error := capsys.readouterr().err) and str(tmp_path / "encoder" / "config.json") in error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe{}",
        b"{}",
        b'{"drop_encoder.self[0]": "x", "num_updates": 3}',
        b'{"drop_encoder.self[0]": NaN, "num_updates": 3}',
        b'{"drop_encoder.self[0]": 0.5, "num_updates": null}',
        b'{"drop_encoder.self[0]": 0.5, "num_updates": Infinity}',
        b'{"drop_encoder.self[0]": [0.5], "num_updates": {}}',
        b'{"drop_' + b"[" * 5000 + b"}",
    ],
)
def test_a_report_of_what_is_no_log(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_bytes(content)
    assert main(["report", "curves", str(tmp_path / "log"), "--out", str(tmp_path / "x.yaml")]) == 2
    assert f"{tmp_path / 'log'} holds no drop rates" in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()


def test_a_report_whose_plot_cannot_be_drawn_writes_no_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "log").write_text("".join(RECORD % (10 * n, n / 10) for n in range(1, 6)))
    words = ["report", "curves", str(tmp_path / "log"), "--out", str(tmp_path / "x.yaml"), "--plot"]
    for plot in ("x.mp3", "x", "log/x.png"):
        assert main([*words, str(tmp_path / plot)]) == 2
        assert str(tmp_path / plot.partition("/")[0]) in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert main([*words, str(tmp_path / "x.PNG")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "x.PNG", "x.yaml"]


SWAG = ",".join([*find_task("swag").text, find_task("swag").label]).encode()
HEAD = b"index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize(
    ("task", "content", "said"),
    [
        ("rte", b"", "line 1: the file is empty"),
        ("rte", HEAD, "line 2: the file has a header but no example"),
        ("rte", HEAD + b"1\ta\tb\n", "line 2: 3 fields"),
        ("rte", HEAD + b"1\ta\tb\tmaybe\n", "line 2"),
        ("rte", HEAD + b"1\ta\0\tb\tentailment\n", "line 2: not text (a NUL byte at position 4)"),
        ("rte", HEAD + b"1\t\xe9\tb\tentailment\n", "line 2: not UTF-8"),
        ("swag", b'a,"b\n', "line 1: not CSV"),
        ("wnut17", b"", "line 1: the file has no words"),
        ("wnut17", b"word\tO\nword\n", "line 2: 1 field, but each word's line must have 2"),
        ("wnut17", b"word\tO\nword\tB-x\n", "line 2"),
        ("wnut17", b"word\t\n", "line 1: 2 fields, some of them empty"),
        ("wnut17", b"wo\0rd\tO\n", "line 1: not text"),
    ],
)
def test_tables_and_words_that_are_malformed(task: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        list(read_file(find_task(task), path))
    assert said in str(caught.value) and str(path) in str(caught.value)
