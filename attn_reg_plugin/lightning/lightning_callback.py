"""`LightningCallback`: a stock Lightning Trainer trains with an attention regularizer.

    Trainer(..., callbacks=[LightningCallback(ADDrop(p=0.3, q=0.3))])

It attaches as training starts, announces epochs and updates, keeps the method's state in Lightning's checkpoints, adds
what the method does to the log, and detaches at the end, also when an exception ends the training.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from functools import partial
from typing import Any

from torch import Tensor, nn

from attn_reg_plugin.checkpoints import refuse_state
from attn_reg_plugin.lightning.lightning_training import (
    LightningTraining,
    module_to_attach,
    refuse,
    refuse_uncalled,
    refuse_unused_parameters,
)
from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.base.statistics import quantities

logger = logging.getLogger(__name__)
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
FROM_WEIGHTS = "to start anew from the checkpoint's weights, load them into the model and fit without ckpt_path"


def callback_class() -> type:
    """Lightning's `Callback`, of the package that is imported or else installed; `object` where there is none."""
    for name in PACKAGES:
        if hasattr(sys.modules.get(name), "Callback"):
            return sys.modules[name].Callback
    for name in PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name).Callback
    return object


class LightningCallback(callback_class()):  # type: ignore[misc]
    """Give it to a Lightning `Trainer`; nothing else changes.

    The regularizer is attached to the part of the LightningModule that `training_step` calls, while `fit()` runs. A
    checkpoint keeps its state among those of the callbacks; the weights in it are as without us, and `fit(ckpt_path=)`
    continues the method where it was. Lightning's checkpoints hold no random states, with or without this callback.

    AttendOut needs to be told its `problem`, since a `training_step` trains only its own model.

    Args:
        regularizer: the method, not attached.
        module: the part of the LightningModule that `training_step` calls, such as `model`; by default its only child
            with parameters, or the LightningModule itself where it has several.

    Raises:
        TypeError: it isn't a regularizer.
        ValueError: as `fit` begins, a strategy that cannot be regularized, sites that match nothing, a module that
            does not exist, or a checkpoint with another's state; after the first batch, a module that was not called,
            or is in evaluation mode.
    """

    def __init__(self, regularizer: Regularizer, module: str | None = None) -> None:
        if not isinstance(regularizer, Regularizer):
            raise TypeError(
                f"LightningCallback takes a regularizer, such as ADDrop(p=0.3, q=0.3), not {type(regularizer).__name__}"
            )
        self.regularizer, self.module = regularizer, module
        self.step: Any = None  # the LightningModule whose training_step runs through ours, and what it had of its own
        self.loaded: dict[str, Any] | None = None
        self.steps = 0  # Lightning's count of the optimizers' steps, when updates were last announced
        self.made = 0  # updates that were announced
        self.scale = 0.0  # of fp16's loss before the batch
        self._seconds: Any = None

    # -- what Lightning calls ---------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Under which a checkpoint has the state: another method's is not taken for it."""
        return f"LightningCallback[{self.regularizer.name}]"

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Refuse what cannot be regularized before anything is set up."""
        if stage == "fit":
            self.end()
            self.loaded = None
            refuse(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the method is attached."""
        self.loaded = state_dict

    def state_dict(self) -> dict[str, Any]:
        """The method's state, for a checkpoint."""
        return self.regularizer.state_dict()

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Attach, and continue from the checkpoint's state if training does."""
        module = module_to_attach(pl_module, self.module)
        refuse(trainer, pl_module, module)
        refuse_unused_parameters(trainer, self.regularizer)
        self.regularizer.attach(module)
        try:
            self.step = pl_module, vars(pl_module).get("training_step")
            vars(pl_module)["training_step"] = self._around(pl_module.training_step)
            self.regularizer.bind(LightningTraining(trainer))
            self.regularizer.begin_training(self._length(trainer, pl_module), trainer.max_epochs)
            resumed = self._resume(trainer)
        except BaseException:
            self.end()
            raise
        if trainer.global_step != self.steps:  # else this fit goes on where the last one ended
            self.made = self.steps = trainer.global_step
        if resumed and not pl_module.automatic_optimization:
            self.made = self.regularizer.updates
        self.regularizer.begin_update(self.made)
        if self.regularizer.epoch != trainer.current_epoch + 1:  # within an epoch, Lightning does not begin it again
            self.regularizer.begin_epoch(trainer.current_epoch + 1)
        self.regularizer.statistics.take()  # what an earlier training did not log

    def on_train_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Announce the epoch; Lightning counts from 0."""
        self.regularizer.begin_epoch(trainer.current_epoch + 1)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Announce the number of updates made so far, and the batch."""
        self.regularizer.begin_update(self.made)
        self.regularizer.supply(batch=batch)
        self.scale = trainer.scaler.get_scale() if trainer.scaler is not None else 0.0
        self._seconds = self.regularizer.statistics.seconds("step_seconds", pl_module.device)
        self._seconds.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Announce the update that this batch ended, if it did; one that fp16 skipped is forgotten.

        In manual optimization a batch may have several steps, of several optimizers: together they are one update.
        """
        if self._seconds is not None:
            self._seconds.__exit__(None, None, None)
            self._seconds = None
        self.regularizer.supply()
        if trainer.global_step == self.steps:
            return
        refuse_uncalled(self.regularizer.model, self.regularizer)
        skipped = trainer.scaler is not None and trainer.scaler.get_scale() < self.scale
        if skipped:
            self.regularizer.forget_unfinished()
        else:
            self.regularizer.end_update()
        self.made, self.steps = self.made + 1, trainer.global_step
        self.regularizer.begin_update(self.made)
        if trainer._logger_connector.should_update_logs:
            logged = quantities(self.regularizer, pl_module.device)
            pl_module.log_dict(logged, on_step=True, on_epoch=False, batch_size=1)  # a step of a loader says none

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Detach also when training ends by an exception."""
        self.end()

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Detach, after the last checkpoint was written: the model is as it was before."""
        self.end()

    def end(self) -> None:
        """Give the LightningModule back as it was; nothing happens if no training runs."""
        if self.step is not None:
            pl_module, own = self.step
            vars(pl_module).pop("training_step", None)
            if own is not None:
                vars(pl_module)["training_step"] = own
        self.step = self._seconds = None
        self.regularizer.supply()
        self.regularizer.detach()
        self.regularizer.unbind()

    # -- while training runs ----------------------------------------------------------------------------------------

    def _around(self, original: Any) -> Any:
        """`_training_step` of a step; Lightning gives it the arguments that `__wrapped__` takes."""
        ours = partial(self._training_step, original)
        ours.__wrapped__ = getattr(original, "__wrapped__", original)  # it looks under one decorator
        return ours

    def _training_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The step of the LightningModule; a method that adds to the loss has it run on the repeated batch.

        Raises:
            ValueError: a method adds to the loss, and the step gives none, as in manual optimization.
        """
        if self.regularizer.passes == 1:
            return original(*args, **kwargs)
        made: list[Any] = []

        def compute(batch: Any) -> Tensor:
            made.append(original(batch, *args[1:], **kwargs))
            loss = made[-1].get("loss") if isinstance(made[-1], dict) else made[-1]
            if not isinstance(loss, Tensor):
                raise ValueError(
                    f"{self.regularizer.name} adds to the loss, but training_step returned {type(made[-1]).__name__}; "
                    "return the loss, and leave the optimization to Lightning"
                )
            return loss

        loss = self.regularizer.loss(compute, args[0])
        return {**made[-1], "loss": loss} if isinstance(made[-1], dict) else loss

    @staticmethod
    def _length(trainer: Any, pl_module: nn.Module) -> int | None:
        """The updates of the training; None where they are not known, as in manual optimization."""
        updates = trainer.estimated_stepping_batches if pl_module.automatic_optimization else float("inf")
        return int(updates) if 0 < updates < float("inf") else None

    def _resume(self, trainer: Any) -> bool:
        """Continue from the checkpoint's state; without one a method begins anew, which a large one says.

        Returns:
            whether there was one.

        Raises:
            ValueError: the state does not fit.
        """
        state, self.loaded = self.loaded, None
        place = trainer.ckpt_path or "the checkpoint"
        if state is not None:
            with refuse_state(place, self.regularizer.name, FROM_WEIGHTS):
                self.regularizer.resume(state)
        elif trainer.ckpt_path and self.regularizer.large_state:
            logger.warning(f"{place} has no state of {self.regularizer.name}: it starts anew from the weights")
        return state is not None
