"""`AttnRegCallback`: a stock Trainer trains with an attention regularizer.

    Trainer(..., callbacks=[AttnRegCallback(ADDrop(p=0.3, q=0.3))])

It attaches at the start of training, announces epochs and updates, keeps the method's state in the checkpoints, adds
what the method does to the log, and detaches at the end, also when an exception ends the training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from attn_reg_plugin.backends.huggingface import as_unattached
from attn_reg_plugin.backends.huggingface.inputs import described
from attn_reg_plugin.checkpoints import allow_checkpoint_types, load_state, refuse_state, save_state
from attn_reg_plugin.huggingface.attend_out import TrainerTraining
from attn_reg_plugin.huggingface.running import Interception, calling_trainer, refuse, refuse_unused_parameters
from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.base.distributed import object_from_first_rank, rank
from attn_reg_plugin.regularizers.base.statistics import quantities

logger = logging.getLogger(__name__)


class AttnRegCallback(TrainerCallback):
    """Give it to a `transformers.Trainer` or `Seq2SeqTrainer`; nothing else changes.

    The regularizer is attached to the unwrapped model while `train()` runs. A checkpoint keeps its state in a file
    `attn_reg_METHOD.pt`; the model in it is a stock one, and `resume_from_checkpoint` continues exactly.

    AttendOut takes its rewards from the trainer's `eval_dataset`, or from what its `reward_subset` names: a key of a
    dictionary of evaluation sets, `train`, or a part of the training set such as `train[90%:]` or `train[:500]`.

    Args:
        regularizer: the method, not attached.

    Raises:
        TypeError: it isn't a regularizer.
        ValueError: where the trainer is made, one that cannot be regularized; as training starts, sites that match
            nothing, rewards without data, or a checkpoint with a damaged state.
    """

    def __init__(self, regularizer: Regularizer) -> None:
        if not isinstance(regularizer, Regularizer):
            raise TypeError(
                f"AttnRegCallback takes a regularizer, such as ADDrop(p=0.3, q=0.3), not {type(regularizer).__name__}"
            )
        self.regularizer = regularizer
        self.trainer: Trainer | None = None
        self.interceptions: list[Interception] = []
        self.epoch = 0
        self.saved: int | None = None  # the update whose state was written last

    # -- what Trainer calls -----------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse a trainer that cannot be regularized as soon as it is made."""
        refuse(calling_trainer()[0])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach, and continue from the checkpoint's state if training does."""
        self.end()
        trainer, checkpoint = calling_trainer()
        try:
            refuse(trainer)
            refuse_unused_parameters(trainer, self.regularizer)
            self._refuse_twin(trainer)
            self.regularizer.attach(trainer.model)
            self.trainer, self.saved, self.epoch = trainer, None, int(state.epoch or 0)
            self._intercept()
            self.regularizer.bind(TrainerTraining(trainer, self._original("training_step")))
            self.regularizer.begin_training(state.max_steps if state.max_steps > 0 else None, state.num_train_epochs)
            self._load(checkpoint)
        except BaseException:
            for callback in trainer.callback_handler.callbacks:  # those that began before this one, too
                if isinstance(callback, AttnRegCallback):
                    callback.end()
            raise
        self.regularizer.begin_update(state.global_step)
        self.regularizer.statistics.take()  # what an earlier training did not log

    def _refuse_twin(self, trainer: Trainer) -> None:
        """Refuse a second callback whose large state would be written to this one's file.

        Raises:
            ValueError: there is one.
        """
        callbacks = [one for one in trainer.callback_handler.callbacks if isinstance(one, AttnRegCallback)]
        twins = sum(one.regularizer.name == self.regularizer.name for one in callbacks)
        if twins > 1 and self.regularizer.large_state:
            raise ValueError(f"{twins} callbacks have {self.regularizer.name}; use one, with the sites of all")

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Announce the epoch, counted from 1."""
        self.epoch += 1
        self.regularizer.begin_epoch(self.epoch)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Announce the number of updates made so far."""
        self.regularizer.begin_update(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Announce that an update was made; Trainer counts those that an overflow skipped as well."""
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.regularizer.forget_unfinished()
        else:
            self.regularizer.end_update()
        self.regularizer.begin_update(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the state in the checkpoint if saving the model has not done so."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.saved != state.global_step and folder.is_dir():
            self._save(folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach: the model is a stock one again."""
        self.end()

    def end(self) -> None:
        """Give model and trainer back as they were; nothing happens if no training runs."""
        for interception in reversed(self.interceptions):
            interception.undo()
        self.interceptions, self.trainer = [], None
        self.regularizer.supply()
        self.regularizer.detach()
        self.regularizer.unbind()
        allow_checkpoint_types()  # Trainer forgets them as it continues from a checkpoint

    # -- the trainer's methods while training runs ------------------------------------------------------------------

    def _intercept(self) -> None:
        trainer = self.trainer
        # what the loop of training calls: an exception that leaves one of them ends the training
        guarded = [(trainer.callback_handler, "call_event"), (trainer, "_evaluate")]
        guarded += [(trainer, "_run_epoch"), (trainer, "_finalize_training")]
        intercepted = [(owner, name, self._guarded) for owner, name in guarded if hasattr(owner, name)]
        intercepted += [(trainer, "training_step", self._training_step), (trainer, "compute_loss", self._compute_loss)]
        intercepted += [(trainer, "log", self._log), (trainer, "save_model", self._save_model)]
        for owner, name, around in intercepted:
            self.interceptions.append(Interception(owner, name, around))

    def _original(self, name: str) -> Any:
        return next(i.original for i in self.interceptions if i.name == name and i.owner is self.trainer)

    def _guarded(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Detach also when training ends by an exception."""
        try:
            return original(*args, **kwargs)
        except BaseException:
            self.end()
            raise

    def _training_step(self, original: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Supply what the forward's arguments may not show: label smoothing takes the labels away."""
        device, statistics = self.trainer.args.device, self.regularizer.statistics
        self._supply(inputs, args[0] if args else kwargs.get("num_items_in_batch"))
        try:
            with statistics.seconds("step_seconds", device):
                return original(model, inputs, *args, **kwargs)
        finally:
            self.regularizer.supply()

    def _supply(self, inputs: Any, items: Tensor | int | None) -> None:
        """A batch: what goes to the model by name, or what it is made of, such as a list of prompts."""
        batch = send_to_device(inputs, self.trainer.args.device)
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        told = described(self.regularizer.model, batch) if isinstance(batch, dict) else {}
        self.regularizer.supply(batch=batch, num_items=items, read_off=True, **told)

    def _compute_loss(self, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's loss; in a step of training, with what the method adds to it."""
        supplied = self.regularizer.supplied
        ours = model is self.trainer.model_wrapped or model is self.regularizer.model
        if not model.training or not ours or supplied.batch is None:
            return original(model, inputs, *args, **kwargs)
        if not isinstance(supplied.batch, dict) and isinstance(inputs, Mapping):
            self._supply(inputs, supplied.num_items)  # the trainer has made it of what it was given
        if self.regularizer.passes == 1 or args or kwargs.keys() - {"num_items_in_batch"}:
            return original(model, inputs, *args, **kwargs)
        return added_loss(self.trainer, self.regularizer, partial(original, model), inputs, **kwargs)

    def _log(self, original: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the method's quantities to each line of the training log."""
        if "loss" in logs:
            logs = {**logs, **quantities(self.regularizer, self.trainer.args.device)}
        original(logs, *args, **kwargs)

    # -- state ------------------------------------------------------------------------------------------------------

    def _save_model(self, original: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Write the state with the model: before the file that makes a checkpoint whole, the trainer's state."""
        with as_unattached(self.regularizer.model):
            original(output_dir, *args, **kwargs)
        if output_dir is not None and Path(output_dir).name == f"checkpoint-{self.trainer.state.global_step}":
            self._save(Path(output_dir))

    def _file(self, folder: Path) -> Path:
        return folder / f"attn_reg_{self.regularizer.name}.pt"

    def _save(self, folder: Path) -> None:
        """Write the state, whole or not at all; rank 0 does it for all ranks."""
        self.saved = self.trainer.state.global_step
        if rank() == 0 and not self.trainer.args.save_only_model:
            folder.mkdir(parents=True, exist_ok=True)  # Trainer makes it later where the model is written in shards
            save_state(self._file(folder), self.regularizer.state_dict())

    def _load(self, checkpoint: Path | None) -> None:
        """Continue from the state in a checkpoint; without one a method begins anew, which a large one says.

        Raises:
            ValueError: the state is damaged or another's; every process raises what the first one read.
        """
        if checkpoint is None:
            return
        path = self._file(checkpoint)
        state: dict[str, Any] | None = None
        error = ""
        if rank() == 0 and path.exists():
            try:
                state = load_state(path)
            except ValueError as refused:
                error = str(refused)
        state, error = object_from_first_rank((state, error))
        if error:
            raise ValueError(error)
        if state is not None:
            with refuse_state(path, self.regularizer.name):
                self.regularizer.resume(state)
        elif self.regularizer.large_state:
            logger.warning(
                f"no {path.name} in {checkpoint}: {self.regularizer.name} starts anew from the checkpoint's weights"
            )


def added_loss(
    trainer: Trainer,
    regularizer: Regularizer,
    compute_loss: Callable[..., Tensor],
    inputs: dict[str, Any],
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """The loss of a training step with what a method adds to it: the trainer's own loss on the repeated batch.

    The trainer's losses are means, over the items of the batch or, where a model or `compute_loss_func` does so, over
    those of all accumulated batches; the method's share is a mean over the same items.

    Args:
        compute_loss: the trainer's own, of a batch.
        num_items_in_batch: labels in all accumulated batches, if the trainer counts them.

    Raises:
        ValueError: the batch has no labels, so the trainer pairs its rows in a way of its own.
    """
    names = trainer.label_names or ["labels"]
    if not any(name in inputs for name in names):
        raise ValueError(
            f"{regularizer.name} repeats the batch and compares what the model says of each copy, but the batch has no "
            f"{' or '.join(names)}, so {type(trainer).__name__} reads it in a way of its own; use another method"
        )
    times, args, items = regularizer.passes, trainer.args, num_items_in_batch
    divisor: Tensor | None = None

    def compute(batch: dict[str, Any]) -> Tensor:
        nonlocal divisor
        told = regularizer.supplied
        regularizer.supply(replace(told, batch=batch, read_off=True, **described(regularizer.model, batch)))
        count = None if items is None else torch.as_tensor(items, device=args.device).float() * times
        count = None if count is None else count.requires_grad_()
        try:
            loss = compute_loss(dict(batch), num_items_in_batch=count)
        finally:
            regularizer.supply(told)
        # a loss that depends on the count was divided by it
        if count is not None and torch.autograd.grad(loss, count, retain_graph=True, allow_unused=True)[0] is not None:
            divisor = count.detach() / times
        return loss

    # the trainer multiplies what it divided by a count over all processes, and for some models what it did not
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func
    spread = args.average_tokens_across_devices and items is not None and counts
    scale = float(trainer.accelerator.num_processes) if spread else 1.0

    def share(total: Tensor, count: int) -> Tensor:
        return scale * total / (max(count, 1) if divisor is None else divisor)

    return regularizer.loss(compute, inputs, share)
