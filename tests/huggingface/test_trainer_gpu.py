"""Trainer on a GPU: reduced precision with its loss scale."""

import math
from pathlib import Path

import pytest
import torch

from attn_reg_plugin.regularizers import AttendOut
from tests.huggingface.trainers import ad_drop, lone_and_game, trainer_of, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", ["bert", "marian"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_reduced_precision_trains(tmp_path: Path, name: str, precision: str) -> None:
    for regularizer in (ad_drop(), AttendOut(steps=2, sites="*")):
        options = {precision: True, "use_cpu": False, "label_smoothing_factor": 0.1}
        trainer = trainer_of(tmp_path, name, regularizer, **options)
        trainer.train()
        assert weights(trainer.model).isfinite().all()
        assert all(math.isfinite(v) for entry in trainer.state.log_history for k, v in entry.items() if "drop_" in k)


def test_the_defender_has_a_loss_scale_of_its_own(tmp_path: Path) -> None:
    lone, _, state = lone_and_game(tmp_path, "bert", fp16=True, use_cpu=False, max_steps=6)
    assert state["scaler"] == lone.accelerator.scaler.state_dict()
    torch.testing.assert_close(state["model"], lone.model.cpu().state_dict(), rtol=1e-3, atol=1e-4)
