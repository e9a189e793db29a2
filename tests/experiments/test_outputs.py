"""`attn-reg export` on outputs that cannot be written."""

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
