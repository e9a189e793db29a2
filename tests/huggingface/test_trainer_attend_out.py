"""AttendOut under Trainer: the defender is what a lone Trainer makes of the model; rewards come from the right data."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin.huggingface.attend_out import TrainerDefender, TrainerProblem, example_losses, reward_data
from attn_reg_plugin.regularizers import AttendOut, Outcome
from tests.attention.tiny_model import Around
from tests.backends.huggingface_models import batch, build
from tests.huggingface.trainers import On, collate, examples, lone_and_game, trainer_of, weights

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "max_grad_norm": 0.5},
    "uneven": {"gradient_accumulation_steps": 4, "max_steps": 5, "warmup_steps": 2, "weight_decay": 0.1},
    "bf16": {"bf16": True, "max_grad_norm": 0.0},
    "checkpointed": {"gradient_checkpointing": True},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "cosine"},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*(("marian", way) for way in WAYS), ("bert", "uneven"), ("llama", "accumulated"), ("llama", "bf16")],
)
def test_the_defender_is_what_a_lone_trainer_makes(tmp_path: Path, name: str, way: str) -> None:
    lone, trainer, defender = lone_and_game(tmp_path, name, **{"max_steps": 6, **WAYS[way]})
    for key, value in lone.model.state_dict().items():
        assert torch.equal(defender["model"][key], value), key
    assert not torch.equal(weights(lone.model), weights(trainer.model))


def test_a_continuation_without_updates_is_not_the_next_trainings_game(tmp_path: Path) -> None:
    """The state of a checkpoint that a training found already at its end."""
    game = AttendOut(steps=4, sites="*")
    trainer = trainer_of(tmp_path, "bert", game, max_steps=6, save_strategy="steps", save_steps=6)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert game.state_dict()["rounds"] == 1
    starts = []
    trainer.add_callback(On("on_step_end", lambda *_, **__: starts.append((game.game.rounds, game.game.in_round))))
    trainer.train()
    assert starts[0] == (0, 1)


def test_a_batch_that_the_model_sees_twice_is_learned_once(tmp_path: Path) -> None:
    trainer, calls = trainer_of(tmp_path, "bert", AttendOut(steps=4, sites="*"), max_steps=2), []
    step, loss = trainer.training_step, trainer.compute_loss
    trainer.training_step = lambda *given, **named: calls.append(1) or step(*given, **named)
    trainer.compute_loss = lambda model, inputs, **named: model(**inputs) and loss(model, inputs, **named)
    trainer.train()
    assert len(calls) == 4, "two players, two updates"


def literal_outcomes(name: str, logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[list, list]:
    """Each example's loss and share of right answers, by itself."""
    labels = inputs["labels"]
    if name == "llama":
        logits, labels = logits[:, :-1], labels[:, 1:]
    right = [(logits[i].argmax(-1) == labels[i])[labels[i] != -100].float().mean().item() for i in range(3)]
    return [F.cross_entropy(logits[i], labels[i]).item() for i in range(3)], right


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("name", ["bert", "marian", "llama"])
def test_losses_of_examples(tmp_path: Path, name: str, around: bool) -> None:
    model, inputs = build(name).eval(), batch(name)
    model = Around(model).eval() if around else model
    trainer = trainer_of(tmp_path, "llama", None, model)
    trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
    problem = TrainerProblem(trainer, "valid")
    outcome = problem.loss(model, {"batch": inputs})
    expected, right = literal_outcomes(name, model(**inputs).logits, inputs)
    assert outcome.loss.tolist() == pytest.approx(expected, abs=1e-5)
    assert outcome.metric.tolist() == pytest.approx(right)
    one_by_one = problem._one_by_one(model, inputs).loss.tolist()
    assert one_by_one == pytest.approx(expected, abs=1e-5)


def test_a_regression_is_rewarded_by_its_squared_error() -> None:
    logits, targets = torch.randn(3, 1), torch.tensor([1, 0, 4])
    outcome = example_losses({"logits": logits}, targets)
    assert torch.equal(outcome.loss, (logits[:, 0] - targets) ** 2) and torch.equal(outcome.metric, -outcome.loss)


@pytest.mark.parametrize("name", ["marian", "bart", "t5"])
def test_the_generator_reads_what_the_decoder_reads(tmp_path: Path, name: str) -> None:
    model, inputs = build(name), batch(name)
    trainer = trainer_of(tmp_path, "marian", None, model)
    trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
    problem = TrainerProblem(trainer, "train")
    tokens = problem.tokens({"batch": inputs})
    trainer.model = Around(model)
    around = problem.tokens({"batch": inputs})
    assert all(torch.equal(a, b) for key in tokens for a, b in zip(tokens[key], around[key], strict=True))
    labels = inputs["labels"]
    start = model.config.decoder_start_token_id
    assert tokens["decoder"].ids[:, 0].tolist() == [start] * 3
    real = labels[:, :-1] != -100
    assert torch.equal(tokens["decoder"].ids[:, 1:][real], labels[:, :-1][real])
    assert torch.equal(tokens["decoder"].valid, labels != -100)
    assert torch.equal(tokens["encoder"].valid, inputs["attention_mask"].bool())
    assert torch.equal(tokens["decoder"].ids, model.prepare_decoder_input_ids_from_labels(labels=labels))
    with pytest.raises(ValueError, match=r"neither the batch nor the model has the decoder's$"):
        problem.tokens({"batch": {**inputs, "decoder_inputs_embeds": labels}})


PARTS = {"valid": range(8), "train": range(24), "train[75%:]": range(18, 24), "train[:5]": range(5)}


@pytest.mark.parametrize(("subset", "expected"), [*PARTS.items(), ("train[-4:-1]", range(20, 23))])
def test_where_rewards_come_from(tmp_path: Path, subset: str, expected: range) -> None:
    trainer = trainer_of(tmp_path, "bert")
    trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
    dataset, indices, _ = reward_data(trainer, subset)
    assert dataset is (trainer.eval_dataset if subset == "valid" else trainer.train_dataset)
    assert indices == expected


def test_the_defender_trains_what_the_attacker_trains(tmp_path: Path) -> None:
    model = (trainer := trainer_of(tmp_path, "bert")).model
    defender = TrainerDefender(trainer, lambda *_: None, model, torch.optim.SGD(model.parameters(), 0.1), 0.0)
    model.requires_grad_(False)
    defender.learn(None, {"batch": {}})
    assert not any(parameter.requires_grad for parameter in defender.model.parameters())


def test_a_problem_of_the_users(tmp_path: Path) -> None:
    class Mine:
        calls = 0

        def loss(self, model: Any, inputs: Any) -> Outcome:
            self.calls += 1
            return Outcome(model(**inputs["batch"]).logits.sum(-1))

        def tokens(self, inputs: Any) -> Any:
            return TrainerProblem.tokens(self, inputs)

        def validation(self, n: int) -> Any:
            return [{"batch": collate(examples("bert", n))}]

    game = AttendOut(steps=2, sites="*", problem=(mine := Mine()))
    trainer = mine.trainer = trainer_of(tmp_path, "bert", game, own={"eval_dataset": None}, max_steps=4)
    trainer.train()
    assert mine.calls == 4 and game.problem is mine
