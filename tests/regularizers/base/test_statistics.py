"""How statistics are shown, and that a new method's reach the logs of both faces."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from attn_reg_plugin.regularizers.base import REGISTRY, Regularizer, register
from attn_reg_plugin.regularizers.base.forward import Forward
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
    ]
    expected = {"loss_sum": Shown(7.0, None), "loss": Shown(7 / 3, 3.0), "share": Shown(0.5 / 7, 7.0)}
    assert summary(quantities, statistics.take()) == {**expected, "never": Shown(0.0, None)}


@pytest.fixture
def counting():
    """A method of a few lines that drops nothing and counts its forwards."""

    @register("counting")
    @dataclass(eq=False)
    class Counting(Regularizer):
        logged: ClassVar[tuple[Quantity, ...]] = (Quantity("seen", "forwards", "seen_per_forward"),)

        def before_forward(self, forward: Forward) -> None:
            self.statistics.add("seen", 3.0)

    yield Counting
    del REGISTRY["counting"]


def test_a_new_methods_statistics_reach_the_trainers_log(counting, classifier, batch):
    pytest.importorskip("transformers")
    from attn_reg_plugin.regularizers.base.statistics import quantities

    with counting().attach(classifier) as method:
        classifier(batch[0])
        assert quantities(method, torch.device("cpu")) == {"regularized": 1.0, "seen_per_forward": 3.0}


def test_a_copy_leaves_out_what_a_device_has_not_finished():
    """Events of a GPU cannot be copied; a lock stands for one."""
    statistics = Statistics()
    statistics.add("forwards", 1.0)
    statistics._running.append(("step_seconds", threading.Lock(), threading.Lock()))
    for twin in (copy.deepcopy(statistics), pickle.loads(pickle.dumps(statistics))):
        twin.add("forwards", 2.0)
        assert twin.take() == {"forwards": 3.0}
    assert statistics._sums == {"forwards": 1.0} and len(statistics._running) == 1
