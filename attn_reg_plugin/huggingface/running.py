"""The training that called a callback: its trainer, what of it is refused, and its methods while it runs.

transformers does not tell a callback its trainer, and announces neither the batch of a step, nor an exception, nor
what is about to be logged. So the trainer is found among our callers, and for the time of one training some of its
methods run through ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer


def calling_trainer() -> tuple[Trainer, Path | None]:
    """The trainer whose event is being handled, and the checkpoint that it continues from, if any.

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
                return trainer, Path(checkpoint) if isinstance(checkpoint, str | os.PathLike) else None
        frame = frame.f_back
    if trainer is None:
        raise RuntimeError("AttnRegCallback belongs in a transformers.Trainer, which calls it: callbacks=[...]")
    return trainer, None


def refuse(trainer: Trainer) -> None:
    """Refuse the ways of training in which the model's forward cannot be seen whole.

    Raises:
        ValueError: sharded parameters, or one process for several GPUs.
    """
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

    Several interceptions of one method may be undone in any order.

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
        while isinstance(now := vars(self.owner).get(self.name), Interception) and now.around is None:
            if now.own:
                setattr(self.owner, self.name, now.original)
            else:
                delattr(self.owner, self.name)
