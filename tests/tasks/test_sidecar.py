"""A method's state in the checkpoint or beside it: written whole, and named where it is damaged or another's."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_reg_plugin.regularizers import build
from attn_reg_plugin.tasks.sidecar import Sidecar, resume
from tests.backends.fairseq_models import transformer
from tests.tasks.tasks_in_process import Optimizer, attached, criterion, sample

STATE = {"epoch": 1, "updates": 4, "model": {"w": torch.arange(4000.0)}}


def test_a_state_is_read_as_it_was_written_or_named(tmp_path: Path) -> None:
    sidecar = Sidecar(str(tmp_path))
    (tmp_path / ".attn_reg_state_3.pt.tmp-7-0").write_bytes(b"of a process that was killed")
    sidecar.save(4, STATE)
    assert torch.equal(sidecar.load(4)["model"]["w"], STATE["model"]["w"])
    assert [path.name for path in tmp_path.iterdir()] == ["attn_reg_state_4.pt"]
    assert Sidecar(str(tmp_path / "another")).load(4, tmp_path)["epoch"] == 1
    sidecar.path(4).write_bytes(b"")
    said = r"attn_reg_state_4\.pt.* cannot be read.*; move it away, and the method starts"
    with pytest.raises(ValueError, match=said):
        sidecar.load(4)


GAME = {"rounds": 0, "in_round": 0, "moving_baseline": 0.0, "moving_square": 0.0, "defender": {}}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "lacks generator"),
        ({**GAME, "generator": {"other.weight": torch.ones(2)}, "generator_optimizer": {}, "cache": []}, "Generator"),
        ({**GAME, "generator": [1], "generator_optimizer": {}, "cache": []}, "list"),
        (
            {**GAME, "generator": {}, "generator_optimizer": {}, "cache": [{"masks": {"decoder.self[7]": None}}]},
            r"sites are others: decoder.self\[7\]",
        ),
    ],
)
def test_a_game_of_another_model_is_named(state: dict[str, Any], told: str, tmp_path: Path) -> None:
    """Keep what the folder has, though fairseq saves a checkpoint of every crash: the flags may be corrected."""
    (here := tmp_path / "here").mkdir()
    folders = {"attn_save_dir": str(here), "attn_restore_file": str(tmp_path / "checkpoint7.pt")}
    task = attached(transformer(), attn_reg="attend_out", **folders)
    regularizer = task.regularizer
    regularizer.problem, regularizer.optimizer = object(), torch.optim.SGD(regularizer.model.parameters(), 0.1)
    regularizer._make_defender = lambda *_: None
    torch.save({"epoch": 1, "updates": 4, **state}, tmp_path / "attn_reg_state_4.pt")
    task.sidecar.path(4).touch()
    place = re.escape(str(tmp_path / "attn_reg_state_4.pt"))
    said = rf"{place}: the state .* does not fit --attn-reg attend_out.*({told})"
    with pytest.raises(ValueError, match=said):
        task._resume_method(None, 4)
    task.state_dict()
    assert [(path.name, path.read_bytes()) for path in here.iterdir()] == [("attn_reg_state_4.pt", b"")]


@pytest.mark.parametrize("state", [[1, 2], {"epoch": 1}, "text"])
@pytest.mark.parametrize("file", ["checkpoint_last.pt", "/elsewhere/checkpoint7.pt"])
def test_a_damaged_state_in_the_checkpoint_is_named(file: str, state: Any, tmp_path: Path) -> None:
    task = attached(transformer(), attn_restore_file=file, attn_save_dir=str(tmp_path))
    place = re.escape(str(tmp_path / file))
    with pytest.raises(ValueError, match=rf"{place}: the state of the method does not fit .*ad_drop"):
        task._resume_method(state, 4)


def test_the_parts_of_a_combination_stay_in_the_epoch_that_was_announced(tmp_path: Path) -> None:
    """The combination's state is read within an epoch, after that was announced."""
    saved, resumed = build("ad_drop+r_drop"), build("ad_drop+r_drop")
    saved.begin_epoch(3)
    resumed.begin_epoch(4)
    resume(resumed, {**saved.state_dict(), "updates": 9}, tmp_path, "")
    assert resumed.updates == 9 and [part.epoch for part in (resumed, *resumed.parts)] == [4, 4, 4]


@pytest.mark.parametrize(("method", "updates", "taken"), [("ad_drop", 7, 7), ("ad_drop", 8, 8), ("head_drop", 7, 7)])
def test_a_small_state_is_taken_from_the_checkpoint(method: str, updates: int, taken: int, tmp_path: Path) -> None:
    """Not another checkpoint's, nor another method's."""
    state = {"method": "ad_drop", "epoch": 9, "updates": 7}
    kept = {"task_state": {"attn_reg": state}, "optimizer_history": [{"num_updates": 7}]}
    torch.save(kept, tmp_path / "checkpoint_last.pt")
    task = attached(transformer(), attn_reg=method, attn_save_dir=str(tmp_path))
    loaded: list[Any] = []
    load = task.regularizer.resume
    task.regularizer.resume = lambda state: loaded.append(state) or load(state)
    task.begin_epoch(2, task.regularizer.model)
    task.train_step(sample(), task.regularizer.model.train(), criterion(), Optimizer(), updates)
    assert loaded == ([state] if (method, updates) == ("ad_drop", 7) else [])
    assert (task.regularizer.epoch, task.regularizer.updates) == (2, taken)
