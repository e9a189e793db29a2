"""Every registered method trains under the callback, and the log says what it did."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_reg_plugin.attention.sites import find_sites
from attn_reg_plugin.regularizers import AttendOut, AttentionLayerDrop, Regularizer, ScheduledDropout
from attn_reg_plugin.regularizers import build as make
from tests.huggingface.test_trainer_added_loss import METHODS
from tests.huggingface.trainers import ad_drop, trainer_of, weights
from tests.regularizers.registered import besides

DROPPING: dict[str, Callable[[], Regularizer]] = {
    "ad_drop": lambda: ad_drop(),
    "attend_out": lambda: AttendOut(steps=2, sites="*"),
    "attention_layer_drop": lambda: AttentionLayerDrop(p=0.5, sites="*"),
    "scheduled_dropout": lambda: ScheduledDropout(schedule="drop *: 0:0.4", sites="*"),
    "weights": lambda: make("attention_dropout", p=0.4, sites="*"),
    "scores": lambda: make("attention_dropout", p=0.4, where="scores", sites="*"),
    "head_drop": lambda: make("head_drop", p=0.5, sites="*"),
    "layer_drop": lambda: make("layer_drop", p=0.5, sites="*"),
}
#: what a loop of one's own does with them, test_trainer_added_loss.py compares with Trainer
ADDING = {part for method in METHODS for part in method.split("+")}
#: the others that are registered, such as a new method, with the options of their first presets
OTHERS = besides({*ADDING, *(one().name for one in DROPPING.values())})


@pytest.mark.parametrize("name", ["bert", "marian"])
@pytest.mark.parametrize("method", DROPPING)
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_every_method_that_drops_attention_trains_and_says_so(
    tmp_path: Path, name: str, method: str, options: dict[str, Any]
) -> None:
    regularizer = DROPPING[method]()
    trainer = trainer_of(tmp_path, name, regularizer, max_steps=8, logging_steps=8, **options)
    before = weights(trainer.model)
    trainer.train()
    log = trainer.state.log_history[0]
    rates = [log[f"drop_{site.name}"] for site in find_sites(trainer.model, "*")]
    assert 0 < sum(rates) / len(rates) < 0.9 and all(0 <= rate <= 1 for rate in rates)
    assert log["regularized"] == 1.0 and all(math.isfinite(value) for value in log.values())
    if method == "ad_drop":
        assert 0 < log["probe_share"] < 1 and log["probe_fallbacks"] == 0
    if method == "attend_out":
        assert regularizer.state_dict()["rounds"] == 4
        assert 0 <= log["attacker_won"] <= 1 and log["attacker_score"] < 0
    assert weights(trainer.model).isfinite().all() and not torch.equal(before, weights(trainer.model))


def test_every_other_method_trains(tmp_path: Path) -> None:
    """A loop, since there may be none."""
    for method, options in OTHERS.items():
        trainer = trainer_of(tmp_path, "bert", make(method, **options), max_steps=4, logging_steps=4)
        before = weights(trainer.model)
        trainer.train()
        log = trainer.state.log_history[0]
        assert 0 <= log["regularized"] <= 1 and all(math.isfinite(value) for value in log.values()), method
        assert weights(trainer.model).isfinite().all() and not torch.equal(before, weights(trainer.model)), method
