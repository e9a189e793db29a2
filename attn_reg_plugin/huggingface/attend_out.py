"""A trainer as a method's `Training`, and AttendOut's defender, which takes the trainer's own steps."""

import copy
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import Trainer

from attn_reg_plugin.backends.huggingface.inputs import decoder_ids, described, transformers_model
from attn_reg_plugin.callbacks import example_outcomes
from attn_reg_plugin.regularizers import Outcome, Tokens
from attn_reg_plugin.regularizers.attend_out.defender import Defender
from attn_reg_plugin.regularizers.base.hooks.put_back import in_evaluation, same_randomness
from attn_reg_plugin.regularizers.base.outputs import logits_of
from attn_reg_plugin.regularizers.base.repeated_batch import tensors_in

#: keys of a dictionary of evaluation sets that `valid` means
VALID = ("valid", "validation", "eval")
PART = re.compile(r"train\[(-?\d+%?)?:(-?\d+%?)?\]")


class TrainerProblem:
    """A trainer as AttendOut's `Problem`; its inputs hold the trainer's batch as `batch`.

    Args:
        trainer: that trains.
        subset: the data that rewards are measured on, see `reward_data`.

    Raises:
        ValueError: the model has a learned prompt.
    """

    def __init__(self, trainer: Trainer, subset: str) -> None:
        prompt = getattr(transformers_model(trainer.model), "active_peft_config", None)
        if getattr(prompt, "num_virtual_tokens", None):
            raise ValueError("AttendOut's generator reads token ids, which a learned prompt has none of; use ad_drop")
        self.trainer = trainer
        self.dataset, self.indices, self.collate = reward_data(trainer, subset)

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Outcome:
        """Give in evaluation each example's loss, and its share of right answers if that is clear."""
        batch = dict(inputs["batch"])
        outputs = model(**batch)
        targets = described(model, batch).get("targets")
        kind = getattr(getattr(transformers_model(model), "config", None), "problem_type", "")
        clear = targets is not None and kind != "multi_label_classification"
        told = example_losses(outputs, targets) if clear else None
        return told or self._one_by_one(model, batch)

    def _one_by_one(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        """For any other head: the trainer's loss of each example by itself."""
        size = max(value.size(0) for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0)
        split = {name: value for name, value in batch.items() if isinstance(value, Tensor) and len(value) == size}
        examples = [{**batch, **{name: value[i : i + 1] for name, value in split.items()}} for i in range(size)]
        return Outcome(torch.stack([self.trainer.compute_loss(model, example) for example in examples]))

    def tokens(self, inputs: Mapping[str, Any]) -> dict[str, Tokens]:
        """Ids of the encoder's and of the decoder's input; a batch of several texts an example is flattened.

        Raises:
            ValueError: the batch has no token ids.
        """
        batch, model = inputs["batch"], transformers_model(self.trainer.model) or self.trainer.model
        read, valid, config = batch.get("input_ids"), batch.get("attention_mask"), getattr(model, "config", None)
        if not isinstance(read, Tensor):
            raise ValueError(
                f"AttendOut's generator reads token ids, but the batch has no input_ids; it has: {', '.join(batch)}"
            )
        if valid is None or valid.shape != read.shape:
            padding = getattr(config, "pad_token_id", None)
            valid = torch.ones_like(read) if padding is None else read.ne(padding)
        first = Tokens(read.flatten(0, -2), valid.bool().flatten(0, -2))
        if not getattr(config, "is_encoder_decoder", False):
            return {"encoder": first, "decoder": first}
        if (ids := batch.get("decoder_input_ids")) is None:
            ids = decoder_ids(model, batch)
        if ids is None:
            raise ValueError(
                "AttendOut's generator reads token ids, but neither the batch nor the model has the decoder's"
            )
        valid = described(model, {**batch, "decoder_input_ids": ids}).get("token_mask")
        return {"encoder": first, "decoder": Tokens(ids, torch.ones_like(ids).bool() if valid is None else valid)}

    def validation(self, n: int) -> Iterable[dict[str, Any]]:
        """n examples of the reward data, drawn at random by torch's generator, collated as the trainer does."""
        chosen = torch.randperm(len(self.indices))[:n].tolist()
        size = self.trainer.args.per_device_eval_batch_size
        for start in range(0, len(chosen), size):
            batch = self.collate([self.dataset[self.indices[i]] for i in chosen[start : start + size]])
            yield {"batch": dict(send_to_device(batch, self.trainer.args.device))}


def example_losses(outputs: Any, targets: Tensor) -> Outcome | None:
    """Take the `example_outcomes` of a model of transformers.

    Args:
        outputs: of a model, with logits (B, C) or (B, T, V); (B, 1) for regression.
        targets: (B,) or (B, T), -100 is ignored.

    Returns:
        None where outputs and targets do not fit together so.
    """
    try:
        logits = logits_of(outputs)
    except ValueError:
        return None
    if logits.dim() == 2 and logits.size(1) == 1 and targets.numel() == logits.size(0):
        return example_outcomes(logits, targets.float())
    if targets.is_floating_point() or targets.shape != logits.shape[:-1]:
        return None
    return example_outcomes(logits, targets)


def reward_data(trainer: Trainer, subset: str) -> tuple[Any, range, Callable]:
    """The data that rewards are measured on: a dataset, the indices to draw from, and how to collate.

    Args:
        trainer: has the data.
        subset: `valid`, the evaluation set; the key of one of several; `train`; or a part such as `train[90%:]`.

    Raises:
        ValueError: there is no such data, it is empty, or it has no length.
    """
    given = trainer.eval_dataset
    part = PART.fullmatch(subset)
    if subset == "train" or part:
        loader = trainer.callback_handler.train_dataloader
    elif isinstance(given, Mapping):
        names = VALID if subset == "valid" else (subset,)
        name = next((key for key in names if key in given), None)
        if name is None:
            raise ValueError(
                f"reward_subset is {subset!r}, but the evaluation sets are {', '.join(given)}; name one of them, or "
                "'train', or a part of the training set such as 'train[90%:]'"
            )
        loader = trainer.get_eval_dataloader(name)
    elif subset == "valid" and given is not None:
        loader = trainer.get_eval_dataloader()
    else:
        raise ValueError(
            f"reward_subset is {subset!r}, but the trainer has {'no' if given is None else 'one unnamed'} "
            "eval_dataset; give it one, or use 'train', or a part of the training set such as 'train[90%:]'"
        )
    dataset = loader.dataset
    if not hasattr(dataset, "__len__"):
        raise ValueError("AttendOut draws reward examples at random, so their dataset needs a length; it is iterable")
    bounds = [
        text and (round(int(text[:-1]) * len(dataset) / 100) if text.endswith("%") else int(text))
        for text in (part.groups() if part else (None, None))
    ]
    indices = range(len(dataset))[slice(*bounds)]
    if not indices:
        raise ValueError(f"reward_subset is {subset!r}, which is empty: there are {len(dataset)} examples")
    return dataset, indices, loader.collate_fn


class TrainerDefender(Defender):
    """A defender that trains by the trainer's own step: its loss, precision, accumulation and clipping.

    Args:
        trainer: that trains the attacker.
        step: its `training_step`, as it is without us.
        given: as `Defender` has them.
    """

    def __init__(self, trainer: Trainer, step: Callable[..., Tensor], *given: Any) -> None:
        super().__init__(*given)
        self.trainer, self.training_step = trainer, step
        self.scaler = copy.deepcopy(trainer.accelerator.scaler)
        self.learned: list[Tensor] = []  # the tensors of the last batch

    def learn(self, problem: TrainerProblem, inputs: Mapping[str, Any]) -> None:
        """The trainer's step on the defender, once for each batch however often the model ran on it."""
        tensors = list(tensors_in(inputs["batch"]))
        if tensors and len(tensors) == len(self.learned) and all(map(operator.is_, tensors, self.learned)):
            return
        self.learned = tensors
        self.follow()
        accelerator = self.trainer.accelerator
        theirs, accelerator.scaler = accelerator.scaler, self.scaler
        try:
            self.training_step(self.model, dict(inputs["batch"]), inputs.get("num_items"))
        finally:
            accelerator.scaler = theirs

    def step(self) -> None:
        """As `Defender.step`."""
        self.learned = []
        super().step()


class TrainerTraining:
    """A trainer as a method's `Training`.

    Args:
        trainer: that trains.
        step: its `training_step`, as it is without us.
    """

    def __init__(self, trainer: Trainer, step: Callable[..., Tensor]) -> None:
        self.trainer = trainer
        self.optimizer = trainer.optimizer
        self.clip_norm = float(trainer.args.max_grad_norm or 0.0)
        self.copy_of = partial(TrainerDefender, trainer, step)

    def problem(self, subset: str) -> tuple[TrainerProblem, int]:
        """See `Training`; one example of the reward data is measured before anything is trained.

        Raises:
            ValueError: it has no loss.
        """
        trainer, model, problem = self.trainer, self.trainer.model, TrainerProblem(self.trainer, subset)
        with same_randomness(trainer.args.device), in_evaluation(model), torch.no_grad():
            (inputs,) = problem.validation(1)
            reason: Any = "the loss is not a number for each example"
            try:
                loss = problem.loss(model, inputs).loss
                if isinstance(loss, Tensor) and loss.numel() == 1:
                    return problem, len(problem.indices)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                reason = error
        batch = inputs["batch"]
        held = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(
            f"the loss of each example is needed, but an example of {subset!r} gives {type(model).__name__} "
            f"none (the batch has: {held}): {str(reason).splitlines()[0] if str(reason) else type(reason).__name__}; "
            "use data with gold labels, such as reward_subset='train[90%:]', or another method, such as AD-DROP"
        )
