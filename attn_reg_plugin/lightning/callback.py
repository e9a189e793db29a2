"""`LightningCallback`: a stock Lightning Trainer trains with an attention regularizer.

    Trainer(..., callbacks=[LightningCallback("ad_drop", p=0.3, q=0.3)])

It attaches as training starts, announces epochs and updates, keeps the method's state in Lightning's checkpoints, adds
what the method does to the log, and detaches at the end, also when an exception ends the training.
"""

import importlib
import importlib.util
import logging
import sys
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attn_reg_plugin.callbacks import MethodCallback, attached, logged, refuse_unused_parameters
from attn_reg_plugin.checkpoints import refuse_state
from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.base.distributed import rank
from attn_reg_plugin.regularizers.base.hooks.attachment import attachments_of

logger = logging.getLogger(__name__)
UNUSED = "use strategy='ddp_find_unused_parameters_true'"
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
FROM_WEIGHTS = "to start anew from the checkpoint's weights, load them into the model and fit without ckpt_path"
#: strategies, by the name of their class or of a parent, that keep a part of the model in each process
SHARDED = {"FSDPStrategy": "FSDP", "ModelParallelStrategy": "ModelParallel (FSDP2)", "DeepSpeedStrategy": "DeepSpeed"}


def callback_class() -> type:
    """Lightning's `Callback`, of the package that is imported or else installed; `object` where there is none."""
    for name in PACKAGES:
        if hasattr(sys.modules.get(name), "Callback"):
            return sys.modules[name].Callback
    for name in PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name).Callback
    return object


class LightningCallback(MethodCallback, callback_class()):  # type: ignore[misc]
    """Give it to a Lightning `Trainer`; nothing else changes.

    The regularizer is attached to the part of the LightningModule that `training_step` calls, while `fit()` runs. A
    checkpoint keeps its state among those of the callbacks; the weights in it are as without us, and `fit(ckpt_path=)`
    continues the method where it was. Lightning's checkpoints hold no random states, with or without this callback.

    AttendOut is refused, since a `training_step` trains only its own model.

    Args:
        regularizer, rates_by_site, options: as `MethodCallback` has them, such as `"ad_drop", p=0.3`.
        module: the part of the LightningModule that `training_step` calls, such as `model`; by default its only child
            with parameters, or the LightningModule itself where it has several.

    Raises:
        TypeError: it isn't a regularizer.
        ValueError: as `fit` begins, a strategy or a method that cannot be combined with it, sites that match nothing,
            a module that does not exist, or a checkpoint with another's state; after the first update, but in manual
            optimization, a module that was not called, or is in evaluation mode.
    """

    def __init__(self, regularizer: Any = None, module: str | None = None, **options: Any) -> None:
        super().__init__(regularizer, **options)
        self.module = module
        self.fitted: nn.Module | None = None  # the LightningModule whose training_step runs through ours
        self.loaded: dict[str, Any] | None = None
        self.steps = 0  # Lightning's count of the optimizers' steps, when updates were last announced
        self.made = 0  # updates that were announced
        self.scale = 0.0  # of fp16's loss before the batch
        self._seconds: Any = None
        self._special_ids: frozenset[int] | None = None  # supplied before `fit`

    # -- what Lightning calls ---------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Under which a checkpoint has the state: another method's is not taken for it."""
        return f"LightningCallback[{self.regularizer.name}]"

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Refuse what cannot be regularized before anything is set up."""
        if stage == "fit":
            self._special_ids = self.regularizer.supplied.special_ids or self._special_ids
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
        refuse_unused_parameters(trainer.strategy.model, self.regularizer, UNUSED)
        self.regularizer.attach(module)
        try:
            self.fitted = pl_module
            vars(pl_module)["training_step"] = self._around(pl_module)
            if any(type(method).bind is not Regularizer.bind for method in self.regularizer.parts):
                raise ValueError(
                    f"{self.regularizer.name} trains a second model beside yours, and training_step trains its own; "
                    "use transformers' Trainer with AttnRegCallback, fairseq-train, or a loop of your own"
                )
            updates = trainer.estimated_stepping_batches if pl_module.automatic_optimization else float("inf")
            known = 0 < updates < float("inf")
            epochs = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None
            self.regularizer.begin_training(int(updates) if known else None, epochs)
            state, self.loaded = self.loaded, None
            if state is not None:
                with refuse_state(trainer.ckpt_path or "the checkpoint", self.regularizer.name, FROM_WEIGHTS):
                    self.regularizer.resume(state)
        except BaseException:
            self.end()
            raise
        if trainer.global_step != self.steps:  # else this fit goes on where the last one ended
            self.made = self.steps = trainer.global_step
        if state is not None and not pl_module.automatic_optimization:
            self.made = self.regularizer.updates
        self.regularizer.begin_update(self.made)
        if self.regularizer.epoch != trainer.current_epoch + 1:  # within an epoch, Lightning does not begin it again
            self.regularizer.begin_epoch(trainer.current_epoch + 1)
        self.regularizer.statistics.take()  # what an earlier training did not log
        if rank() == 0:
            logger.info(attached(self.regularizer))

    def on_train_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Announce the epoch; Lightning counts from 0."""
        self.regularizer.begin_epoch(trainer.current_epoch + 1)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Announce the number of updates made so far, and the batch."""
        self.regularizer.begin_update(self.made)
        self.regularizer.supply(batch=batch, special_ids=self._special_ids)
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
        stepped = trainer.global_step != self.steps
        if stepped:
            self._end_update(trainer, pl_module)
        counts = stepped or not pl_module.automatic_optimization  # where Lightning's log counts batches, not steps
        if counts and trainer._logger_connector.should_update_logs:
            line = logged(self.regularizer, pl_module.device, self.rates_by_site)
            pl_module.log_dict(line, on_step=True, on_epoch=False, batch_size=1)  # a step of a loader says none

    def _end_update(self, trainer: Any, pl_module: nn.Module) -> None:
        if pl_module.automatic_optimization:  # else another optimizer's update may come first
            refuse_uncalled(self.regularizer.model, self.regularizer)
        if trainer.scaler is not None and trainer.scaler.get_scale() < self.scale:
            self.regularizer.forget_unfinished()
        else:
            self.regularizer.end_update()
        self.made, self.steps = self.made + 1, trainer.global_step
        self.regularizer.begin_update(self.made)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Detach also when training ends by an exception."""
        self.end()

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Detach, after the last checkpoint was written: the model is as it was before."""
        self.end()

    def end(self) -> None:
        """Give the LightningModule back as it was; nothing happens if no training runs."""
        attributes = {} if self.fitted is None else vars(self.fitted)
        self.fitted = self._seconds = None
        # of several callbacks the last one's step stands around those of the others, which may have ended before
        step = attributes.get("training_step")
        while hasattr(step, "own") and step.callback.fitted is None:
            attributes.pop("training_step")
            attributes |= {} if step.own is None else {"training_step": step.own}
            step = step.own
        self.regularizer.supply()
        self.regularizer.detach()
        self.regularizer.unbind()

    # -- while training runs ----------------------------------------------------------------------------------------

    def _around(self, pl_module: nn.Module) -> Any:
        """Make `_training_step` of a module's step; Lightning gives it the arguments that `__wrapped__` takes."""
        original = pl_module.training_step
        ours = partial(self._training_step, original)
        ours.callback, ours.own = self, vars(pl_module).get("training_step")
        ours.__wrapped__ = getattr(original, "__wrapped__", original)  # it looks under one decorator
        return ours

    def _training_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's step; a method that adds to the loss has it run on the repeated batch."""
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


def refuse(trainer: Any, pl_module: nn.Module, module: nn.Module | None = None) -> None:
    """Refuse, by a ValueError, ways of training in which the forward, of `module` if it is known, is not seen whole."""
    strategies = (kind.__name__ for kind in type(trainer.strategy).__mro__)
    sharded = next((SHARDED[name] for name in strategies if name in SHARDED), None)
    if sharded is not None:
        raise ValueError(
            f"the strategy {sharded} cannot be combined with LightningCallback: it was not tried; use strategy='ddp', "
            "or a loop of your own"
        )
    if getattr(pl_module, "_compiler_ctx", None) or any(hasattr(part, "_orig_mod") for part in pl_module.modules()):
        raise ValueError(
            "torch.compile cannot be combined with LightningCallback: compiling the whole module was not tried; fit "
            "the module that is not compiled, or compile its layers in place: layer.compile()"
        )
    if module is pl_module and isinstance(trainer.strategy.model, DistributedDataParallel):
        raise ValueError(
            f"data parallel training runs training_step through the forward of {type(pl_module).__name__}, so "
            "LightningCallback cannot regularize that; put the model into one child, and name it: module='model'"
        )


def module_to_attach(pl_module: nn.Module, path: str | None) -> nn.Module:
    """The part of a LightningModule whose forward is regularized: at `path`, else its only child with parameters.

    Without a path it is the LightningModule itself if there are several. A path that does not exist is a ValueError.
    """
    if path is None:
        children = [child for child in pl_module.children() if next(child.parameters(), None) is not None]
        return children[0] if len(children) == 1 else pl_module
    try:
        return pl_module.get_submodule(path)
    except AttributeError:
        names = ", ".join(name for name, _ in pl_module.named_children()) or "none"
        raise ValueError(
            f"module is {path!r}, which {type(pl_module).__name__} does not have; its children are: {names}"
        ) from None


def refuse_uncalled(module: nn.Module, regularizer: Regularizer) -> None:
    """Refuse, by a ValueError after an update, a training that does not call `module`, or in evaluation mode only."""
    if any(attachment.reach.seen for attachment in attachments_of(module)):
        return
    name, method = type(module).__name__, regularizer.name
    parts = [module, *(site.module for site in regularizer.attached_sites if site.module is not None)]
    if not module.training or (len(parts) > 1 and not any(part.training for part in parts[1:])):
        raise ValueError(
            f"{name} is in evaluation mode, so {method} never acted; Lightning leaves that as it is, and "
            "from_pretrained gives models in evaluation mode: call its train() before fit()"
        )
    raise ValueError(
        f"training_step made an update without calling the forward of {name}, so {method} never acted; name "
        "the part of the LightningModule that it calls: LightningCallback(..., module='model')"
    )
