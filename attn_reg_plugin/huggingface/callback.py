"""`AttnRegCallback`: a stock Trainer trains with an attention regularizer.

    Trainer(..., callbacks=[AttnRegCallback("ad_drop", p=0.3, q=0.3)])

It attaches at the start of training, announces epochs and updates, keeps the method's state in the checkpoints, adds
what the method does to the log, and detaches at the end, also when an exception ends the training.

transformers does not tell a callback its trainer, and announces neither the batch of a step, nor an exception, nor
what is about to be logged. So the trainer is found among our callers, and for the time of one training some of its
methods run through ours.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState

from attn_reg_plugin.attention.selection import find_sites
from attn_reg_plugin.backends.huggingface import as_unattached
from attn_reg_plugin.backends.huggingface.inputs import described
from attn_reg_plugin.callbacks import (
    MethodCallback,
    attached,
    logged,
    refuse_unused_parameters,
    special_ids_of,
    state_in,
)
from attn_reg_plugin.checkpoints import allow_checkpoint_types, refuse_state, save_state
from attn_reg_plugin.huggingface.attend_out import TrainerTraining
from attn_reg_plugin.regularizers.base.distributed import average, rank
from attn_reg_plugin.regularizers.base.hooks.put_back import (
    same_randomness,
    unchanged,
    without_dropout,
    without_gradients,
)

logger = logging.getLogger(__name__)
UNUSED = (
    "set ddp_find_unused_parameters=True, and with gradient checkpointing "
    "gradient_checkpointing_kwargs={'use_reentrant': False}"
)


class AttnRegCallback(MethodCallback, TrainerCallback):
    """Give it to a `transformers.Trainer` or `Seq2SeqTrainer`; nothing else changes.

    The regularizer is attached to the unwrapped model while `train()` runs. A checkpoint keeps its state in a file
    `attn_reg_METHOD.pt`; the model in it is a stock one, and `resume_from_checkpoint` continues exactly.

    AttendOut takes its rewards from the trainer's `eval_dataset`, or from what its `reward_subset` names: a key of a
    dictionary of evaluation sets, `train`, or a part of the training set such as `train[90%:]` or `train[:500]`.

    Args:
        regularizer, rates_by_site, options: as `MethodCallback` has them, such as `"ad_drop", p=0.3`.

    Raises:
        TypeError: it isn't a regularizer.
        ValueError: where the trainer is made, one that cannot be regularized, sites that match nothing in its model, or
            another callback; as training starts, rewards without data, or a checkpoint with a damaged state.
    """

    trainer: Trainer | None = None
    interceptions: Sequence[Interception] = ()
    epoch = 0
    saved: int | None = None  # the update whose state was written last
    special_ids: frozenset[int] | None = None
    divides: bool | None = None  # whether the trainer's loss is divided by the count of items, once that is known

    # -- what Trainer calls -----------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a trainer or a model that cannot be regularized as soon as the trainer is made."""
        trainer, *_ = calling_trainer()
        refuse(trainer)
        for method in self.regularizer.parts if isinstance(trainer.model, nn.Module) else ():
            if method.needs_sites:
                find_sites(trainer.model, method.sites)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Attach, and continue from the checkpoint's state if training does."""
        self.end()
        trainer, checkpoint, epochs = calling_trainer()
        try:
            refuse(trainer)
            refuse_unused_parameters(trainer.model_wrapped, self.regularizer, UNUSED)
            self.regularizer.attach(trainer.model)
            self.trainer, self.saved, self.divides, self.epoch = trainer, None, None, epochs
            self.special_ids = special_ids_of(getattr(trainer, "processing_class", None))
            training = TrainerTraining(trainer, trainer.training_step)
            self._intercept()
            self.regularizer.bind(training)
            self.regularizer.begin_training(state.max_steps if state.max_steps > 0 else None, state.num_train_epochs)
            self._load(checkpoint)
        except BaseException:
            self.end()
            raise
        self.regularizer.begin_update(state.global_step)
        self.regularizer.statistics.take()  # what an earlier training did not log
        if trainer.is_world_process_zero():
            logger.info(attached(self.regularizer))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce the epoch, counted from 1."""
        self.epoch += 1
        self.regularizer.begin_epoch(self.epoch)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Announce the number of updates made so far."""
        self.regularizer.begin_update(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Announce that an update was made; Trainer counts those that an overflow skipped as well."""
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.regularizer.forget_unfinished()
        else:
            self.regularizer.end_update()
        self.regularizer.begin_update(state.global_step)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Keep the state in the checkpoint if saving the model has not done so."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.saved != state.global_step and folder.is_dir():
            self._save(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach: the model is a stock one again."""
        self.end()

    def end(self) -> None:
        """Give model and trainer back as they were; nothing happens if no training runs."""
        for interception in reversed(self.interceptions):
            interception.undo()
        self.interceptions, self.trainer = (), None
        self.regularizer.supply()
        self.regularizer.detach()
        self.regularizer.unbind()
        allow_checkpoint_types()  # Trainer forgets them as it continues from a checkpoint

    # -- the trainer's methods while training runs ------------------------------------------------------------------

    def _intercept(self) -> None:
        trainer, handler = self.trainer, self.trainer.callback_handler
        others = [one for one in handler.callbacks if not isinstance(one, AttnRegCallback)]
        intercepted = [
            # what the loop of training calls: an exception that leaves one of them ends the training
            (handler, "call_event", self._guarded),
            *((trainer, name, self._guarded) for name in ("_evaluate", "_run_epoch", "_finalize_training")),
            *((one, "on_train_begin", self._guarded) for one in others),  # and of the event that runs now
            (trainer, "training_step", self._training_step),
            (trainer, "compute_loss", self._compute_loss),
            (trainer, "log", self._log),
            (trainer, "save_model", self._save_model),
        ]
        self.interceptions = [Interception(*one) for one in intercepted if hasattr(*one[:2])]

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
        self.regularizer.supply(batch=batch, num_items=items, read_off=True, special_ids=self.special_ids, **told)

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
        return self._added_loss(partial(original, model), inputs, kwargs.get("num_items_in_batch"))

    def _added_loss(self, compute_loss: Callable[..., Tensor], inputs: dict[str, Any], items: Any) -> Tensor:
        """The loss of a training step with what a method adds to it: the trainer's own loss on the repeated batch.

        The trainer's losses are means, over the items of the batch or, where a model or `compute_loss_func` does so,
        over those of all accumulated batches; the method's share is a mean over the same items.

        Args:
            compute_loss: the trainer's own, of a batch.
            items: labels in all accumulated batches, if the trainer counts them.

        Raises:
            ValueError: the batch has no labels, so the trainer pairs its rows in a way of its own.
        """
        trainer, regularizer = self.trainer, self.regularizer
        if self.divides is None and items is not None:
            self.divides = divides_by_count(trainer, compute_loss, inputs, items)
        names = trainer.label_names or ["labels"]
        if not any(name in inputs for name in names):
            raise ValueError(
                f"{regularizer.name} repeats the batch and compares what the model says of each copy, but the batch "
                f"has no {' or '.join(names)} (label_names), so {type(trainer).__name__} reads it in a way of its "
                "own; use another method"
            )
        # the first tensor's rows are the number of examples: of a collator of one's own that may be anything
        inputs = {**{name: inputs[name] for name in names if isinstance(inputs.get(name), Tensor)}, **inputs}
        times = regularizer.passes

        def compute(batch: dict[str, Any]) -> Tensor:
            told = regularizer.supplied
            regularizer.supply(replace(told, batch=batch, read_off=True, **described(regularizer.model, batch)))
            try:
                return compute_loss(dict(batch), num_items_in_batch=None if items is None else items * times)
            finally:
                regularizer.supply(told)

        # the trainer multiplies what it divided by a count over all processes, and for some models what it did not
        counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func
        spread = trainer.args.average_tokens_across_devices and items is not None and counts
        scale = float(trainer.accelerator.num_processes) if spread else 1.0

        def share(total: Tensor, count: int) -> Tensor:
            return scale * total / (items if self.divides and items is not None else max(count, 1))

        return regularizer.loss(compute, inputs, share)

    def _log(self, original: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the method's quantities to the lines of the training log, if it acted."""
        if "loss" in logs:
            logs = {**logs, **logged(self.regularizer, self.trainer.args.device, self.rates_by_site)}
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
        """Continue from the state in a checkpoint; without one a method begins anew, which is said of a large one."""
        if checkpoint is None:
            return
        path, name = self._file(checkpoint), self.regularizer.name
        state = state_in(path, name if self.regularizer.large_state else None)
        if state is not None:
            with refuse_state(path, name):
                self.regularizer.resume(state)


def divides_by_count(
    trainer: Trainer, compute_loss: Callable[..., Tensor], inputs: dict[str, Any], items: Tensor | int
) -> bool | None:
    """Tell, by two forwards without dropout, whether the trainer's loss of a batch depends on the count it is given.

    Returns:
        The same on all ranks; None where the batches do not show it: their loss is 0 or not finite.
    """
    losses = []
    for n in (1, 2):
        with (
            same_randomness(trainer.args.device),
            unchanged(trainer.model),
            without_dropout(trainer.model),
            without_gradients(),
        ):
            losses.append(compute_loss(dict(inputs), num_items_in_batch=items * n).float())
    one, two = average(torch.stack(losses)).tolist()
    return None if one == 0 or not math.isfinite(one + two) else abs(one - two) > 1e-3 * abs(one)


def calling_trainer() -> tuple[Trainer, Path | None, int]:
    """The trainer whose event is being handled, the checkpoint that it continues from, if any, and its epochs.

    Raises:
        RuntimeError: no trainer is among the callers.
    """
    frame = sys._getframe(1)
    trainer = None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and (trainer is None or owner is trainer):
            trainer = owner
            if "resume_from_checkpoint" in frame.f_locals:
                checkpoint = frame.f_locals["resume_from_checkpoint"]
                path = Path(checkpoint) if isinstance(checkpoint, str | os.PathLike) else None
                return trainer, path, frame.f_locals.get("epochs_trained", 0)  # those with the present batches
        frame = frame.f_back
    if trainer is None:
        raise RuntimeError("AttnRegCallback belongs in a transformers.Trainer, which calls it: callbacks=[...]")
    return trainer, None, 0


def refuse(trainer: Trainer) -> None:
    """Refuse the ways of training in which the model's forward cannot be seen whole.

    Raises:
        ValueError: a second callback, sharded parameters, or one process for several GPUs.
    """
    if sum(isinstance(one, AttnRegCallback) for one in trainer.callback_handler.callbacks) > 1:
        raise ValueError("a trainer takes one AttnRegCallback; for several methods give it a list of them")
    args = trainer.args
    plugins = trainer.accelerator.state
    if trainer.is_fsdp_enabled and plugins.fsdp_plugin.fsdp_version != 2:
        raise ValueError(
            "FSDP1 (fsdp_config's version: 1) cannot be combined with AttnRegCallback; use FSDP2, "
            "fsdp_config={'version': 2}"
        )
    if trainer.is_deepspeed_enabled and plugins.deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "DeepSpeed ZeRO 3 cannot be combined with AttnRegCallback: it shards parameters; use FSDP2 "
            "(fsdp=True), or ZeRO stage 1 or 2"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"one process with {args.n_gpu} GPUs copies the model at every forward, and AttnRegCallback would not "
            f"see them; start one process per GPU: torchrun --nproc_per_node {args.n_gpu}, or set CUDA_VISIBLE_DEVICES"
        )
    places = set(map(str, (getattr(trainer.model, "hf_device_map", None) or {}).values())) - {"cpu", "disk"}
    if len(places) > 1:
        raise ValueError(
            f"device_map has the model on {len(places)} GPUs of one process, in which AttnRegCallback was never tried; "
            "load it on one, or without device_map and share it by FSDP2 (fsdp=True under torchrun)"
        )


class Interception:
    """A method of one object that runs through a function of ours, until `undo`.

    Args:
        owner, name: whose method, and which.
        around: function(original, *args, **kwargs) that is called instead.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self.owner, self.name, self.around = owner, name, around
        self.original, self.own = getattr(owner, name), name in vars(owner)
        self.__wrapped__ = self.original  # its signature
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method."""
        if self.around is None:
            return self.original(*args, **kwargs)
        return self.around(self.original, *args, **kwargs)

    def undo(self) -> None:
        """Give the object its method back."""
        self.around = None
        if vars(self.owner).get(self.name) is self:
            if self.own:
                setattr(self.owner, self.name, self.original)
            else:
                delattr(self.owner, self.name)
