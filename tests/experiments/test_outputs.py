"""`attn-reg export` and `report` on outputs that cannot be written and on what is no run."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from types import SimpleNamespace

from transformers import AutoModel

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments import trained as trained_module
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
    "content",
    [
        b"",
        b"\xff\xfe{}",
        b'{"drop_encoder.self[0]": "x", "num_updates": 3}',
        b'{"drop_encoder.self[0]": NaN, "num_updates": 3}',
        b'{"drop_encoder.self[0]": 0.5, "num_updates": Infinity}',
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
