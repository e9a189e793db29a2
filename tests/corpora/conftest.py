"""A small corpus, and preparations without fairseq's own work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentencepiece")
pytest.importorskip("fairseq")

from attn_reg_plugin.corpora import preparation
from tests.corpora.small_corpus import write_corpus


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with 160 training pairs, a validation set and two test sets."""
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that ran, in order; fairseq's own work is replaced by a file."""
    found: list[str] = []

    def preprocess(folder: Path, *rest: Any) -> None:
        (folder / "bin").mkdir()
        (folder / "bin" / "train.bin").write_bytes((folder / "pieces" / "train.en").read_bytes())

    def noted(name: str, stage: Any) -> Any:
        def run(work: preparation.Work) -> dict[str, Any]:
            found.append(name)
            return stage(work)

        return run

    monkeypatch.setattr(preparation, "preprocess", preprocess)
    monkeypatch.setattr(preparation, "check_counts", lambda *arguments: None)
    stages = tuple((name, noted(name, stage), files) for name, stage, files in preparation.STAGES)
    monkeypatch.setattr(preparation, "STAGES", stages)
    return found
