"""`attn-reg average`: the mean of a run's last checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from attn_reg_plugin.checkpoints import load_checkpoint
from attn_reg_plugin.cli import main


def checkpoints(folder: Path, names: list[str], dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    """Write a checkpoint for each name; their weights."""
    folder.mkdir(parents=True, exist_ok=True)
    models = []
    for i, name in enumerate(names):
        generator = torch.Generator().manual_seed(i)
        model = {"w": torch.randn(3, 4, generator=generator).to(dtype), "version": torch.tensor([3])}
        torch.save({"model": model, "args": argparse.Namespace(i=i), "extra_state": {"i": i}}, folder / name)
        models.append(model)
    return models


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_last_epochs_are_averaged(dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["checkpoint2.pt", "checkpoint9.pt", "checkpoint10.pt", "checkpoint_1_500.pt", "checkpoint_last.pt"]
    models = checkpoints(tmp_path / "checkpoints", names, dtype)
    assert main(["average", str(tmp_path), "--last", "2"]) == 0
    assert "the mean of checkpoint9.pt, checkpoint10.pt" in capsys.readouterr().out
    state = load_checkpoint(tmp_path / "checkpoints" / "average_last_2.pt")
    mean = (models[1]["w"].double() + models[2]["w"].double()) / 2
    assert state["model"]["w"].dtype == torch.float32 and torch.equal(state["model"]["w"], mean.float())
    assert state["model"]["version"].tolist() == [3] and state["extra_state"] == {"i": 2}


def test_updates_are_averaged_where_epochs_are_too_few(tmp_path: Path) -> None:
    models = checkpoints(tmp_path, ["checkpoint1.pt", "checkpoint_1_900.pt", "checkpoint_2_1000.pt"])
    assert main(["average", str(tmp_path), "--last", "2", "--out", str(tmp_path / "mine.pt")]) == 0
    mean = (models[1]["w"].double() + models[2]["w"].double()) / 2
    assert torch.equal(load_checkpoint(tmp_path / "mine.pt")["model"]["w"], mean.float())


def test_one_checkpoint_is_its_own_mean(tmp_path: Path) -> None:
    (model,) = checkpoints(tmp_path, ["checkpoint1.pt"])
    assert main(["average", str(tmp_path), "--last", "1"]) == 0
    assert torch.equal(load_checkpoint(tmp_path / "average_last_1.pt")["model"]["w"], model["w"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--last", "0"], "--last is 0, but must be at least 1"),
        (["--last", "3"], "--last 3 needs 3 checkpoints, but there are 2 of epochs"),
        (["--last", "2", "--by", "update"], "there are 0 of updates"),
        (["--last", "3"], "train with --save-interval-updates N, in attn-reg compare and finetune behind --, or"),
        (["--last", "2", "--out", "nowhere/x.pt"], "nowhere isn't a folder"),
        (["--last", "1", "--out", "checkpoint1.pt"], "checkpoint1.pt is there already"),
    ],
)
def test_bad_input_is_one_sentence(
    given: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints(tmp_path, ["checkpoint1.pt", "checkpoint2.pt"])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["average", ".", *given]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("damage", ["truncated", "other weights"])
def test_checkpoints_that_do_not_fit_are_named(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints(tmp_path, ["checkpoint1.pt", "checkpoint2.pt"])
    odd = tmp_path / "checkpoint1.pt"
    if damage == "truncated":
        odd.write_bytes(odd.read_bytes()[:700])
    else:
        torch.save({"model": {"w": torch.zeros(3, 5), "version": torch.tensor([3])}}, odd)
    assert main(["average", str(tmp_path), "--last", "2"]) == 2
    assert str(odd) in capsys.readouterr().err
    assert not list(tmp_path.glob("average*")) and not list(tmp_path.glob("*.tmp*"))
