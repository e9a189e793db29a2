"""An encoder as it would come out of a run, and what a comparison of encoders is given."""

from pathlib import Path

import pytest

from attn_reg_plugin.experiments.trained import Trained
from attn_reg_plugin.labelled import find_task
from tests.models.hf_folders import make_encoder, make_model, make_rte, tokenizer


@pytest.fixture
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Trained:
    """An encoder for a row of the table, as it would come out of a run."""
    row = getattr(request, "param", "mnli")
    model = make_model(tmp_path / "encoder", row).eval()
    return Trained(model, tokenizer(), find_task(row), 40, tmp_path / "checkpoint_best.pt")


@pytest.fixture
def rte(tmp_path: Path) -> list[str]:
    """The first arguments of a comparison on made-up data."""
    encoder, data = make_encoder(tmp_path / "encoder"), make_rte(tmp_path / "data")
    return ["rte", str(data), "--out", str(tmp_path / "out"), "--model", str(encoder), "--cpu"]
