"""The training that calls a `LightningCallback`: what of it is regularized, what is refused, and what a method asks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.attend_out.defender import Defender
from attn_reg_plugin.regularizers.base.attachment import attachments_of
from attn_reg_plugin.regularizers.base.context import Problem
from attn_reg_plugin.regularizers.base.distributed import waits_for_gradients

#: strategies, by the name of their class or of one they derive from, that keep a part of the model in each process
SHARDED = {"FSDPStrategy": "FSDP", "ModelParallelStrategy": "ModelParallel (FSDP2)", "DeepSpeedStrategy": "DeepSpeed"}


def refuse(trainer: Any, pl_module: nn.Module, module: nn.Module | None = None) -> None:
    """Refuse the ways of training in which the model's forward cannot be seen whole.

    Args:
        module: the part that is attached to, once that is known.

    Raises:
        ValueError: compiled models, sharded parameters, or a LightningModule that data parallel training calls.
    """
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in SHARDED:
            raise ValueError(
                f"the strategy {SHARDED[kind.__name__]} cannot be combined with LightningCallback: it was not "
                "tried; use strategy='ddp', or a loop of your own"
            )
    compiled = getattr(pl_module, "_compiler_ctx", None) or any(hasattr(m, "_orig_mod") for m in pl_module.modules())
    if compiled:
        raise ValueError(
            "torch.compile cannot be combined with LightningCallback: compiling the whole module was not tried; fit "
            "the module that is not compiled, or compile its layers in place: layer.compile()"
        )
    if module is pl_module and isinstance(trainer.strategy.model, DistributedDataParallel):
        raise ValueError(
            f"data parallel training runs training_step through the forward of {type(pl_module).__name__}, so "
            "LightningCallback cannot regularize that; put the model into one child, and name it: module='model'"
        )


def refuse_unused_parameters(trainer: Any, regularizer: Regularizer) -> None:
    """Refuse attention LayerDrop where data parallel training waits for every gradient.

    Raises:
        ValueError: it does.
    """
    if waits_for_gradients(trainer.strategy.model) and regularizer.leaves_unused():
        raise ValueError(
            "a dropped attention gives its queries and keys no gradient, which data parallel training waits for; use "
            "strategy='ddp_find_unused_parameters_true'"
        )


def module_to_attach(pl_module: nn.Module, path: str | None) -> nn.Module:
    """The part of a LightningModule whose forward is regularized.

    Args:
        path: of the part; None: the only child with parameters, or the LightningModule itself if there are several.

    Raises:
        ValueError: there is no such part.
    """
    children = [child for _, child in pl_module.named_children() if any(True for _ in child.parameters())]
    if path is None:
        return children[0] if len(children) == 1 else pl_module
    try:
        return pl_module.get_submodule(path)
    except AttributeError:
        names = ", ".join(name for name, _ in pl_module.named_children()) or "none"
        raise ValueError(
            f"module is {path!r}, which {type(pl_module).__name__} does not have; its children are: {names}"
        ) from None


def refuse_uncalled(module: nn.Module, regularizer: Regularizer) -> None:
    """Stop a training that does not call what is attached to, or calls it in evaluation mode, after an update.

    Args:
        module: what is attached to.

    Raises:
        ValueError: it was never called in training mode with gradients.
    """
    if any(attachment.seen for attachment in attachments_of(module)):
        return
    name, method = type(module).__name__, regularizer.name
    attention = [site.module for site in regularizer.attached_sites if site.module is not None]
    if not module.training or (attention and not any(module.training for module in attention)):
        raise ValueError(
            f"{name} is in evaluation mode, so {method} never acted; Lightning leaves that as it is, and "
            "from_pretrained gives models in evaluation mode: call its train() before fit()"
        )
    raise ValueError(
        f"training_step made an update without calling the forward of {name}, so {method} never acted; name "
        "the part of the LightningModule that it calls: LightningCallback(..., module='model')"
    )


class LightningTraining:
    """A Lightning trainer as a method's `Training`.

    Args:
        trainer: that trains.
    """

    vocabulary = ""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.optimizer: Optimizer = trainer.optimizers[0]
        self.clip_norm = float(trainer.gradient_clip_val or 0.0)
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        self.folder = Path(folder) if folder else None

    def problem(self, subset: str) -> tuple[Problem, int]:
        """None is known: a `training_step` trains its own model only.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a LightningModule does not say how another model is trained or evaluated, which AttendOut and "
            "Child-Tuning with mode='driven' ask; give AttendOut a Problem, AttendOut(problem=...), or use "
            "Child-Tuning with mode='free'"
        )

    @property
    def copy_of(self) -> Callable[..., Defender]:
        """See `Training`.

        Raises:
            ValueError: the trainer trains in a way that the copy is not trained in.
        """
        reason = ""
        if len(self.trainer.optimizers) > 1:
            reason = f"with one optimizer, and the LightningModule has {len(self.trainer.optimizers)}; use one"
        elif self.clip_norm > 0 and (self.trainer.gradient_clip_algorithm or "norm") != "norm":
            reason = "with gradients clipped by their norm, and not by value; use gradient_clip_algorithm='norm'"
        if reason:
            raise ValueError(f"AttendOut trains a copy of the model {reason}, or another method, such as AD-DROP")
        return partial(LightningDefender, self.trainer)


class LightningDefender(Defender):
    """A defender that trains in Lightning's precision, and divides its losses as Lightning does.

    Args:
        trainer: that trains the attacker.
        attacker, optimizer, clip_norm: as `Defender` has them.
    """

    def __init__(self, trainer: Any, attacker: nn.Module, optimizer: Optimizer, clip_norm: float = 0.0) -> None:
        super().__init__(attacker, optimizer, clip_norm)
        self.trainer, self.scaler = trainer, copy.deepcopy(trainer.scaler)

    def precision(self) -> AbstractContextManager[Any]:
        """Lightning's, as around `training_step`."""
        return self.trainer.precision_plugin.forward_context()

    def divisor(self, problem: Problem) -> float | None:
        """The batches of an update, of which the last of an epoch may have fewer; in manual optimization, as ever."""
        if self.trainer.lightning_module.automatic_optimization:
            return self.trainer.accumulate_grad_batches
        return super().divisor(problem)
