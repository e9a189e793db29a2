"""The guide's loop with Accelerate, as it stands there."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification

from tests.backends.huggingface_models import build
from tests.huggingface.trainers import collate, examples, weights
from tests.processes import check, run_in_processes

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
LOOP = re.search(r"## Accelerate\n.*?```python\n(.*?)```", GUIDE, re.DOTALL)[1]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Accelerate keeps precision and processes for the whole program."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def parts(batch: int = 4, dropout: float = 0.1, words: int = 24) -> dict[str, Any]:
    """Make the model, optimizer and data that the loop starts from."""
    AcceleratorState._reset_state()
    set_seed(3)
    model = build("bert", dropout)
    batches = DataLoader(examples("bert", words), batch, collate_fn=collate)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}


def train(folder: Path, epochs: int, changes: tuple[tuple[str, str], ...] = (), **options: Any) -> dict[str, Any]:
    """The loop's names at its end; it keeps its checkpoint in `folder`."""
    code = LOOP
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    names = {**parts(**options), "epochs": epochs}
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        exec(code, names)
    return names


def test_it_trains_and_continues_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4)
    regularizer = whole["regularizer"]
    assert regularizer.updates == 12 and not regularizer.attached_sites
    taken = regularizer.statistics.take()
    assert taken["forwards"] == 24 and taken["regularized"] == 12, "every other epoch"
    train(tmp_path / "parts", 3)
    again = train(tmp_path / "parts", 4)
    assert again["first"] == 4 and again["regularizer"].updates == 12
    assert weights(again["model"]).equal(weights(whole["model"]))
    whole["model"].save_pretrained(tmp_path / "stock")
    stock = BertForSequenceClassification.from_pretrained(tmp_path / "stock")
    assert weights(stock).equal(weights(whole["model"]))


def test_without_p_it_is_plain_training(tmp_path: Path) -> None:
    ours = train(tmp_path / "zero", 2, (("p=0.3, q", "p=0.0, q"),))["model"]
    plain = train(tmp_path / "plain", 2, (("with regularizer.attach(accelerator.unwrap_model(model)):", "if True:"),))[
        "model"
    ]
    assert weights(plain).equal(weights(ours))
    assert not weights(train(tmp_path / "ad_drop", 2)["model"]).equal(weights(plain))


#: nothing is drawn, and nothing is rounded
STILL = (("q=0.3,", 'q=1.0, cross_tuning="off",'), ('"bf16"', '"no"'))


def in_two(folder: Path) -> None:
    """Train as a process of two: Accelerate gives it every other batch of 4."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    trained = train(folder / "two", 1, STILL, dropout=0.0)
    if trained["accelerator"].is_main_process:
        torch.save(weights(trained["model"]), folder / "weights.pt")


@pytest.mark.slow
def test_two_processes_are_one_with_the_joined_batch(tmp_path: Path) -> None:
    check(tmp_path, run_in_processes(tmp_path, in_two, tmp_path, processes=2))
    alone: Tensor = weights(train(tmp_path / "one", 1, STILL, dropout=0.0, batch=8)["model"])
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt", weights_only=True), alone, atol=1e-5, rtol=0)
