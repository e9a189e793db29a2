"""With nothing to drop, the callback is not there: a stock Trainer's run, bit for bit; and evaluation never sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.backends.huggingface_models import build
from tests.huggingface.trainers import AtStepEnd, ad_drop, print_of, trainer_of, weights

TIMES = ("runtime", "per_second")


def history(trainer: Trainer) -> list[dict[str, Any]]:
    """What was logged, without times and without what the callback added."""
    added = ("drop_", "probe_", "regularized")
    kept = [key for entry in trainer.state.log_history for key in entry if not key.endswith(TIMES)]
    kept = [key for key in kept if not key.startswith(added)]
    return [{key: value for key, value in entry.items() if key in kept} for entry in trainer.state.log_history]


def accuracy(predicted: Any) -> dict[str, float]:
    """Share of right classes, or of right first tokens of a generated translation."""
    guesses = predicted.predictions
    if guesses.dtype.kind == "f":
        return {"accuracy": float((guesses.argmax(-1) == predicted.label_ids).mean())}
    return {"first": float((guesses[:, 1] == predicted.label_ids[:, 0]).mean()), "ids": float(numpy.sum(guesses))}


@pytest.mark.parametrize("name", ["bert", "marian", "llama", "deberta_v3"])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}], ids=["plain", "accumulated"]
)
def test_p_zero_is_the_stock_trainer(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    runs = []
    for regularizer in (None, ad_drop(p=0.0)):
        trainer = trainer_of(tmp_path, name, regularizer, **options)
        before = weights(trainer.model)
        trainer.train()
        state = [t for values in trainer.optimizer.state_dict()["state"].values() for t in values.values()]
        runs.append((weights(trainer.model), history(trainer), torch.get_rng_state(), state))
        assert not torch.equal(before, runs[-1][0])
    (stock, log, random, state), (ours, our_log, our_random, our_state) = runs
    assert torch.equal(stock, ours) and log == our_log and torch.equal(random, our_random)
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(state, our_state, strict=True))


class Weights(TrainerCallback):
    """The weights at every evaluation."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_evaluate(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.states.append({key: value.clone() for key, value in model.state_dict().items()})


@pytest.mark.parametrize("name", ["bert", "marian"])
def test_evaluation_and_generation_are_stock(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 3}
    if name == "marian":
        options |= {"predict_with_generate": True, "generation_max_length": 6, "generation_num_beams": 2}
    own = {"compute_metrics": accuracy}
    kept = Weights()
    trainer = trainer_of(tmp_path, name, ad_drop(), callbacks=(kept,), own=own, **options)
    trainer.train()
    evaluated = [entry for entry in history(trainer) if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [3, 6]
    for entry, state in zip(evaluated, kept.states, strict=True):
        stock = trainer_of(tmp_path, name, None, own=own, **options)
        stock.model.load_state_dict(state)
        metrics, measured = stock.evaluate(), {key for key in entry if key.startswith("eval_")}
        assert len(measured) >= 2 and {key: entry[key] for key in measured} == {key: metrics[key] for key in measured}


def test_what_is_saved_is_a_stock_model(tmp_path: Path) -> None:
    configs = []
    for regularizer in (None, ad_drop()):
        folder = tmp_path / str(regularizer is None)
        trainer = trainer_of(folder, "bert", regularizer, max_steps=2, save_strategy="steps", save_steps=2)
        trainer.train()
        trainer.model.save_pretrained(folder / "end")
        assert trainer.model.config._attn_implementation == "sdpa"
        saved = [json.loads((folder / part / "config.json").read_text()) for part in ("checkpoint-2", "end")]
        kept = {path.name for path in (folder / "checkpoint-2").iterdir()} - {"attn_reg_ad_drop.pt"}
        configs.append((saved, kept))
    assert configs[0] == configs[1]


def test_a_configuration_that_names_its_attention_is_saved(tmp_path: Path) -> None:
    """With `output_attentions` a configuration is only saved if its attention is called eager."""
    model = build("bert", attention="eager")
    model.config.output_attentions = True
    trainer = trainer_of(tmp_path, "bert", ad_drop(), model, max_steps=2, save_strategy="steps", save_steps=1)
    dropped = []
    trainer.add_callback(AtStepEnd(lambda: dropped.append(model.config._attn_implementation)))
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "config.json").exists()
    assert dropped == ["attn_reg_eager"] * 2, "and training went on with ours"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_afterwards_the_model_is_as_it_was(tmp_path: Path, attention: str) -> None:
    model = build("marian", attention=attention)
    trainer = trainer_of(tmp_path, "marian", ad_drop(), model, max_steps=2)
    before, own = print_of(model), set(vars(trainer))
    trainer.train()
    assert print_of(model) == before
    assert {name for name in set(vars(trainer)) - own if callable(vars(trainer)[name])} == set()
    assert "call_event" not in vars(trainer.callback_handler)
