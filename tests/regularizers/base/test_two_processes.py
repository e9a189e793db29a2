"""Every method in two data-parallel processes, one after the other: gradients are the mean of what each process's own
share gives, weights stay equal, and what is drawn differs between processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from attn_reg_plugin.regularizers import Regularizer, build
from tests.attention.tiny_model import TinyClassifier, tokens
from tests.huggingface.processes import check, run_in_processes
from tests.regularizers.registered import besides

UPDATES, DROPOUT = 3, 0.1
AD_DROP: dict[str, Any] = {"p": 0.5, "q": 0.5, "cross_tuning": "off"}
OWN, NOTHING, UNSAID = "another one on each", "nothing is drawn", "anything"
#: the methods, their options, and what they draw; attend_out's two processes are tested by themselves
METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ad_drop": ("ad_drop", AD_DROP, OWN),
    "ad_drop, all candidates": ("ad_drop", {**AD_DROP, "q": 1.0}, NOTHING),
    "attention_layer_drop": ("attention_layer_drop", {"p": 0.5}, OWN),
    "scheduled_dropout": ("scheduled_dropout", {"schedule": "drop *: 0:0.5"}, OWN),
    "attention_dropout, weights": ("attention_dropout", {"p": 0.4}, OWN),
    "attention_dropout, scores": ("attention_dropout", {"p": 0.4, "where": "scores"}, OWN),
    "head_drop": ("head_drop", {"p": 0.5}, OWN),
    "layer_drop": ("layer_drop", {"p": 0.5}, OWN),
    "hidden_cut": ("hidden_cut", {"cut": 0.4, "weight": 2.0}, OWN),
    "r_drop": ("r_drop", {"weight": 2.0}, NOTHING),
    "several": (
        "ad_drop+head_drop+layer_drop+r_drop",
        {"ad_drop": AD_DROP, "head_drop": {"p": 0.5}, "layer_drop": {"p": 0.3}},
        OWN,
    ),
}
LISTED = {part for method, _, _ in METHODS.values() for part in method.split("+")}
METHODS |= {name: (name, options, UNSAID) for name, options in besides({*LISTED, "attend_out"}).items()}


def share(update: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A process's part of a batch: the same one in the first update, then another one, and fewer examples."""
    rank = rank if update else 0
    ids = tokens([6, 4, 3, 5][: 4 - rank], 6, seed=2 * update + rank)
    return ids, ids[:, 0] % 3


def model_of(dropout: float) -> TinyClassifier:
    torch.manual_seed(5)
    return TinyClassifier(dropout).train()


def loss_of(regularizer: Regularizer, model: Any, update: int, rank: int) -> torch.Tensor:
    """From random numbers that are the process's own."""
    torch.manual_seed(100 * update + rank)
    return regularizer.loss(lambda b: F.cross_entropy(model(b[0]), b[1]), share(update, rank))


def train(name: str, dropout: float) -> dict[str, list[Any]]:
    """A training by this process and the other one; what an update began with, and what it gave."""
    from attn_reg_plugin.regularizers.base.statistics import quantities

    method, options, _ = METHODS[name]
    rank, model, regularizer = dist.get_rank(), model_of(dropout), build(method, **options)
    kept: dict[str, list[Any]] = {key: [] for key in ("weights", "state", "loss", "gradient", "sums", "logged")}
    with regularizer.attach(model):
        wrapped = DistributedDataParallel(model, find_unused_parameters=regularizer.leaves_unused())
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        for update in range(UPDATES):
            kept["weights"].append(copy.deepcopy(model.state_dict()))
            kept["state"].append(copy.deepcopy(regularizer.state_dict()))
            loss = loss_of(regularizer, wrapped, update, rank)
            loss.backward()
            kept["loss"].append(loss.detach())
            kept["gradient"].append(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
            sums = regularizer.statistics.take()
            kept["sums"].append({key: float(value) for key, value in sums.items() if "seconds" not in key})
            for key, value in sums.items():
                regularizer.statistics.add(key, value)
            kept["logged"].append(quantities(regularizer, torch.device("cpu")))
            optimizer.step()
            optimizer.zero_grad()
            regularizer.end_update()
        kept["weights"].append(copy.deepcopy(model.state_dict()))
    return kept


def all_methods(folder: Path) -> None:
    """One of two processes."""
    dist.init_process_group("gloo")
    found = {(name, dropout): train(name, dropout) for name in METHODS for dropout in (0.0, DROPOUT)}
    torch.save(found, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, float], dict[str, list[Any]]]]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("processes")
    check(folder, run_in_processes(folder, all_methods, folder, processes=2))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_is_the_mean_of_what_each_share_gives(processes: Any, name: str, one_thread: None) -> None:
    """Each share's gradient is computed again, in this process alone, from the weights and the state of the update."""
    method, options, drawn = METHODS[name]
    losses = [process[name, 0.0]["loss"][0] for process in processes]  # of the same examples, without dropout
    assert drawn == UNSAID or losses[0].equal(losses[1]) == (drawn == NOTHING)
    for dropout in (0.0, DROPOUT):
        ours, theirs = (process[name, dropout] for process in processes)
        for first, second in zip(ours["weights"], theirs["weights"], strict=True):
            assert all(value.equal(second[key]) for key, value in first.items()), "both have the same model"
        assert any(not value.equal(ours["weights"][0][key]) for key, value in ours["weights"][-1].items())
        for update in range(1, UPDATES):
            expected: dict[str, Any] = {}
            for rank, process in enumerate((ours, theirs)):
                model, regularizer = model_of(dropout), build(method, **options)
                model.load_state_dict(ours["weights"][update])
                with regularizer.attach(model):
                    regularizer.load_state_dict(ours["state"][update])
                    loss = loss_of(regularizer, model, update, rank)
                    loss.backward()
                torch.testing.assert_close(loss.detach(), process["loss"][update])
                for key, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        expected[key] = expected.get(key, 0) + parameter.grad / 2
            for key, gradient in expected.items():
                for process in (ours, theirs):
                    torch.testing.assert_close(process["gradient"][update][key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_the_log_has_the_sums_of_both(processes: Any, name: str) -> None:
    from attn_reg_plugin.regularizers.base.statistics import summary

    method, options, _ = METHODS[name]
    ours, theirs = (process[name, DROPOUT] for process in processes)
    regularizer = build(method, **options)
    with regularizer.attach(model_of(0.0)):
        wanted = [quantity for quantity in regularizer.quantities if "seconds" not in quantity.key]
    for update in range(UPDATES):
        sums = ours["sums"][update], theirs["sums"][update]
        keys = sums[0].keys() | sums[1].keys()
        mean = {key: (sums[0].get(key, 0.0) + sums[1].get(key, 0.0)) / 2 for key in keys}
        shown = {title: value.value for title, value in summary(wanted, mean).items()}
        logged = {key: value for key, value in ours["logged"][update].items() if key in shown}
        assert logged == pytest.approx(shown) and (METHODS[name][2] == UNSAID or logged["regularized"] == 1.0)
        assert ours["logged"][update] == theirs["logged"][update]
