"""A small corpus, and preparations without fairseq's own work."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from attn_reg_plugin.corpora import preparation
from tests.corpora.small_corpus import write_corpus


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with 160 training pairs, a validation set and two test sets."""
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a file in the place of fairseq's binaries."""

    def preprocess(folder: Path, *rest: Any) -> None:
        (folder / "bin").mkdir()
        shutil.copyfile(min((folder / "pieces").glob("train.*")), folder / "bin" / "train.bin")

    monkeypatch.setattr(preparation, "preprocess", preprocess)
