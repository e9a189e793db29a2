"""Trainings of tiny transformers models, by one process or by two: what `test_two_processes.py` compares."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.masks import PackedMask
from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.base.distributed import average_gradients
from attn_reg_plugin.regularizers.base.statistics import quantities
from tests.backends import huggingface_models
from tests.regularizers.trainings import on_all_sites

AD_DROP: dict[str, Any] = {"p": 0.4, "q": 1.0, "cross_tuning": "off"}


@dataclass(frozen=True)
class Case:
    """A training."""

    family: str
    method: str = "ad_drop"
    options: dict[str, Any] = field(default_factory=lambda: AD_DROP)
    checkpointing: str = ""  # `model`, its own; `wrapper`, PyTorch's around its layers
    drawn: bool = False  # at random: there is no joined batch to compare with, but the mean of both shares
    copied: bool = False  # each process has the whole model (DistributedDataParallel), or else its shards (FSDP2)
    attached: bool = False  # before the model is copied or sharded
    root: bool = True  # the model itself is sharded, or else its layers only
    parts: int = 1  # micro-batches of an update; all but the last reduce no gradients
    low: bool = False  # parameters are gathered in bfloat16, and gradients reduced in float32
    dropout: float = 0.0
    updates: int = 2


def layers(model: nn.Module) -> list[nn.Module]:
    return [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]


def texts(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask; no token comes twice, since equal ones would have equal attributions."""
    drawn = torch.randperm(huggingface_models.WORDS - 4, generator=torch.Generator().manual_seed(seed)) + 4
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return drawn[: mask.numel()].view(mask.shape).masked_fill(~mask, huggingface_models.PAD), mask.long()


def share(case: Case, update: int, part: int, rank: int) -> dict[str, Tensor]:
    """A process's examples of an update."""
    seed = 10 * part + 2 * rank + 100 * update
    ids, mask = texts([7, 4 + rank], seed)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if case.family == "bert":
        return {**inputs, "labels": ids[:, 0] % huggingface_models.CLASSES}
    target, real = (ids, mask) if case.family == "llama" else texts([3, 6], seed + 1)
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
        sharded: whether the model is, or is copied; both processes come here then.
    """

    def __init__(self, case: Case, rank: int | None, sharded: bool) -> None:
        self.case, self.rank, self.sharded = case, rank, sharded
        self.model = model = huggingface_models.build(case.family, case.dropout)
        model.config.use_cache = False  # a recomputed layer would add to it
        self.regularizer = build(case.method, **on_all_sites(case.method, case.options))
        self.masks: list[dict[str, Tensor]] = []
        if case.attached:
            self.regularizer.attach(model)
        if case.checkpointing == "model":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif case.checkpointing == "wrapper":
            checkpoint_layers(model)
        #: what the optimizer updates: of a model in bfloat16, the float32 weights behind it
        self.weights = [nn.Parameter(one.detach().clone()) for one in model.parameters()] if case.low else None
        self.called = model
        if sharded and case.copied:
            self.called = DistributedDataParallel(model, find_unused_parameters=self.regularizer.leaves_unused())
        elif sharded:
            shard(case, model)
        elif case.low:
            model.bfloat16()
        if not case.attached:
            self.regularizer.attach(model)
        parameters = self.weights if case.low and not sharded else list(model.parameters())
        self.optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.5)

    def backward(self, update: int) -> dict[str, Tensor]:
        """The gradients of an update, whole and in float32."""
        torch.manual_seed(100 * update + (self.rank or 0))
        with seen() as masks:
            for part in range(self.case.parts):
                if self.sharded and self.case.root and not self.case.copied:
                    self.model.set_requires_gradient_sync(part == self.case.parts - 1)
                shares = [share(self.case, update, part, rank) for rank in range(2)]
                joined = {key: torch.cat([one[key] for one in shares]) for key in shares[0]}
                batch = joined if self.rank is None else shares[self.rank]
                self.regularizer.loss(lambda batch: loss_of(self.case, self.called, batch), batch).backward()
        self.masks.append(masks)
        if self.sharded and not self.case.root:
            average_gradients(nn.ParameterList(p for p in self.model.parameters() if not hasattr(p, "device_mesh")))
        return {
            name.replace("_checkpoint_wrapped_module.", ""): whole(one.grad).float().clone()
            for name, one in self.model.named_parameters()
            if one.grad is not None
        }

    def step(self, gradients: dict[str, Tensor] | None = None) -> None:
        """The optimizer's step, by what the backwards gave or by `gradients`, and its announcement."""
        parameters, weights = list(self.model.named_parameters()), self.optimizer.param_groups[0]["params"]
        if gradients is not None:
            for (name, _), weight in zip(parameters, weights, strict=True):
                weight.grad = gradients.get(name.replace("_checkpoint_wrapped_module.", ""))
                if weight.grad is None and self.regularizer.leaves_unused() and not self.case.copied:
                    weight.grad = torch.zeros_like(weight)  # as FSDP2 makes it: ranks may differ in what they drop
        self.optimizer.step()
        with torch.no_grad():
            for (_, parameter), weight in zip(parameters, weights, strict=True):
                if parameter is not weight:
                    parameter.copy_(weight)
        self.model.zero_grad()
        self.regularizer.end_update()

    def counted(self) -> tuple[dict[str, float], dict[str, float]]:
        """The sums of this process since the last call, and what is logged of those of both."""
        sums = self.regularizer.statistics.take()
        for key, value in sums.items():
            self.regularizer.statistics.add(key, value)
        return {key: float(value) for key, value in sums.items()}, quantities(self.regularizer, torch.device("cpu"))

    def found(self) -> dict[str, Any]:
        """Train and return what the updates give, to be compared."""
        gradients, counted = [], []
        for update in range(self.case.updates):
            gradients.append(self.backward(update))
            counted.append(self.counted())
            self.step(None if self.sharded else gradients[-1])
        self.regularizer.detach()
        return {"gradients": gradients, "masks": self.masks, "counted": counted}

    # -- a training that `torch.distributed.checkpoint` keeps -------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "regularizer": self.regularizer.state_dict()}

    def train(self, first: int, last: int) -> None:
        """Updates `first` to `last`; the batches are those of the first two, one after the other."""
        for update in range(first, last + 1):
            self.backward(update % 2)
            self.step()

    def save(self, folder: Path) -> None:
        """Write a checkpoint; both processes come here."""
        checkpoint.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Go on from one."""
        state = self._state()
        checkpoint.load(state, checkpoint_id=folder)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.regularizer.resume(state["regularizer"])

    def result(self) -> dict[str, Any]:
        """The whole weights, and the number of updates."""
        weights = {name: whole(one.detach()) for name, one in self.model.named_parameters()}
        return {"weights": weights, "updates": self.regularizer.updates}


def by_one_process(case: Case) -> dict[str, Any]:
    """Train by a single process: on the joined batch, or the mean over both shares where masks are drawn at random."""
    if not case.drawn:
        return Run(case, None, sharded=False).found()
    runs = [Run(case, rank, sharded=False) for rank in range(2)]
    found = []
    for update in range(case.updates):
        shares = [run.backward(update) for run in runs]
        names = dict.fromkeys([*shares[0], *shares[1]])
        found.append({name: sum(one[name] for one in shares if name in one) / 2 for name in names})
        for run in runs:
            run.step(found[-1])
    return {"gradients": found}


def whole(tensor: Any) -> Tensor:
    """A tensor of which each process has a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def checkpoint_layers(model: nn.Module) -> None:
    """PyTorch's own checkpointing around each layer."""
    apply_activation_checkpointing(model, check_fn=set(layers(model)).__contains__)


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

    def keep_mask(call: AttentionCall, *args: Any) -> PackedMask | None:
        keep = original(call, *args)
        if keep is not None:
            name = f"{call.site.name} {call.index}"
            masks[f"{name} {sum(key.startswith(name) for key in masks)}"] = keep.unpacked()
        return keep

    with mock.patch.object(AttentionCall, "keep_mask", keep_mask):
        yield masks
