"""Trainings of tiny transformers models, by one process or by two that shard them: what `test_sharded.py` compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.distributed import average_gradients
from tests.backends import huggingface_models

UPDATES, HALF = 3, 2
AD_DROP: dict[str, Any] = {"p": 0.4, "q": 1.0, "cross_tuning": "off"}


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        family: of the model.
        method, options: of the regularizer; all sites are regularized.
        checkpointing: `model`, its own; `wrapper`, PyTorch's around its layers.
        drawn: masks are drawn at random, so there is no joined batch to compare with, but the mean of both shares.
        attached: whether to attach before the model is sharded.
        root: whether the model itself is sharded, or its layers only.
        parts: micro-batches of an update; all but the last reduce no gradients.
        low: whether parameters are gathered in bfloat16, and gradients reduced in float32.
        dropout: of the model.
    """

    family: str
    method: str = "ad_drop"
    options: dict[str, Any] = field(default_factory=lambda: AD_DROP)
    checkpointing: str = ""
    drawn: bool = False
    attached: bool = False
    root: bool = True
    parts: int = 1
    low: bool = False
    dropout: float = 0.0


def layers(model: nn.Module) -> list[nn.Module]:
    return [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]


def share(case: Case, update: int, part: int, rank: int) -> dict[str, Tensor]:
    """A process's examples: always the same, but in the last update the second one's are new."""
    seed = 10 * part + 2 * rank + (100 if rank == 1 and update == UPDATES - 1 else 0)
    ids, mask = huggingface_models.ids([7, 4 + rank], 7, seed)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if case.family == "bert":
        return {**inputs, "labels": ids[:, 0] % huggingface_models.CLASSES}
    target, real = (ids, mask) if case.family == "llama" else huggingface_models.ids([3, 6], 6, seed + 1)
    return {**inputs, "labels": target.masked_fill(real == 0, -100)}


def loss_of(case: Case, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Summed over tokens and averaged over examples, so that the mean over processes is that of all examples."""
    logits, labels = model(**inputs).logits.float(), inputs["labels"]
    if case.family == "llama":
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss / len(labels) / case.parts


class Run:
    """A model in training, and what its updates gave.

    Args:
        rank: whose examples; None takes those of both.
    """

    def __init__(self, case: Case, rank: int | None, sharded: bool) -> None:
        self.case, self.rank, self.sharded = case, rank, sharded
        model = huggingface_models.build(case.family, case.dropout)
        self.model = model.bfloat16() if case.low and not sharded else model
        self.regularizer = build(case.method, sites="*", **case.options)
        self.masks: list[dict[str, Tensor]] = []
        self.sums: list[dict[str, float]] = []
        if case.attached:
            self.regularizer.attach(model)
        if case.checkpointing == "model":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif case.checkpointing == "wrapper":
            wrap()(model)
        if sharded:
            shard(case, model)
        if not case.attached:
            self.regularizer.attach(model)
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)

    def backward(self, update: int) -> None:
        """Gradients of one update."""
        torch.manual_seed(100 * update + (self.rank or 0))
        with seen() as masks:
            for part in range(self.case.parts):
                if self.sharded and self.case.root:
                    self.model.set_requires_gradient_sync(part == self.case.parts - 1)
                shares = [share(self.case, update, part, rank) for rank in range(2)]
                joined = {key: torch.cat([one[key] for one in shares]) for key in shares[0]}
                loss_of(self.case, self.model, joined if self.rank is None else shares[self.rank]).backward()
        if self.sharded and not self.case.root:
            average_gradients(nn.ParameterList(p for p in self.model.parameters() if not hasattr(p, "device_mesh")))
        self.masks.append(masks)
        self.sums.append({key: float(value) for key, value in self.regularizer.statistics.take().items()})

    def gradients(self) -> dict[str, Tensor]:
        """By the parameters' names, whole and in float32."""
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        whole = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in found.items() if one is not None}
        return {name.replace("_checkpoint_wrapped_module.", ""): one.float().clone() for name, one in whole.items()}

    def step(self) -> None:
        """The optimizer's step, and its announcement."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.regularizer.end_update()

    def found(self) -> dict[str, Any]:
        """What its updates give, to be compared."""
        gradients = []
        for update in range(UPDATES):
            self.backward(update)
            gradients.append(self.gradients())
            self.step()
        self.regularizer.detach()
        return {"gradients": gradients, "masks": self.masks, "sums": self.sums}


def wrap() -> Any:
    """PyTorch's checkpointing around each layer of a model."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    def applied(model: nn.Module) -> None:
        chosen = set(layers(model))
        apply_activation_checkpointing(model, checkpoint_wrapper, chosen.__contains__)

    return applied


def shard(case: Case, model: nn.Module) -> None:
    """`fully_shard` of the layers, and of the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.low else MixedPrecisionPolicy()
    for module in [*layers(model), *([model] if case.root else [])]:
        fully_shard(module, mp_policy=policy)


@contextmanager
def seen() -> Iterator[dict[str, Tensor]]:
    """The keep mask of each call, by site and number; recomputed calls have the same one."""
    masks: dict[str, Tensor] = {}
    original = AttentionCall.keep_mask

    def keep_mask(call: AttentionCall, *args: Any) -> Tensor | None:
        keep = original(call, *args)
        if keep is not None:
            name = f"{call.name} {call.index} {sum(key.startswith(f'{call.name} {call.index}') for key in masks)}"
            masks[name] = keep
        return keep

    with mock.patch.object(AttentionCall, "keep_mask", keep_mask):
        yield masks
