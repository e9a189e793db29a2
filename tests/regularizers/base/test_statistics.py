"""How statistics are shown and copied."""

from __future__ import annotations

import copy
import pickle
import threading

import torch

from attn_reg_plugin.regularizers.base.statistics import Quantity, Shown, Statistics, summary


def test_sums_means_and_shares():
    statistics = Statistics()
    for value in (1.0, torch.tensor(2.0), 4.0):
        statistics.add("loss", value)
        statistics.add("updates", 1.0)
    statistics.add("part", 0.5)
    quantities = [
        Quantity("loss", title="loss_sum"),
        Quantity("loss", "updates"),
        Quantity("part", "loss", "share"),
        Quantity("part", "never"),
        Quantity("never"),
        Quantity("part", "loss", "of none", needs="never"),
    ]
    expected = {"loss_sum": Shown(7.0, None), "loss": Shown(7 / 3, 3.0), "share": Shown(0.5 / 7, 7.0)}
    assert summary(quantities, statistics.take()) == {**expected, "never": Shown(0.0, None)}


def test_a_copy_leaves_out_what_a_device_has_not_finished():
    """Events of a GPU cannot be copied; a lock stands for one."""
    statistics = Statistics()
    statistics.add("forwards", 1.0)
    statistics._running.append(("step_seconds", threading.Lock(), threading.Lock()))
    for twin in (copy.deepcopy(statistics), pickle.loads(pickle.dumps(statistics))):
        twin.add("forwards", 2.0)
        assert twin.take() == {"forwards": 3.0}
    assert statistics._sums == {"forwards": 1.0} and len(statistics._running) == 1
