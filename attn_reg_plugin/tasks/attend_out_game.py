"""AttendOut under fairseq: what a task, a criterion and fairseq's optimizer are to the game."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from fairseq import utils
from fairseq.optim import AMPOptimizer, FairseqOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer
from torch import Tensor, nn

from attn_reg_plugin.backends.fairseq import padding_index
from attn_reg_plugin.regularizers import AttendOut, Outcome, Tokens
from attn_reg_plugin.regularizers.game import Defender, average, world_size


class FairseqProblem:
    """A fairseq task and criterion as AttendOut's `Problem`; its inputs are samples.

    Args:
        task, criterion: fairseq's.
        subset: the dataset that rewards are measured on.
    """

    def __init__(self, task: Any, criterion: Any, subset: str) -> None:
        self.task, self.criterion, self.subset = task, criterion, subset

    def train_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The criterion's loss, a sum, and the sample size to divide it by."""
        loss, sample_size, _ = self.criterion(model, inputs["sample"])
        return loss, sample_size

    def loss(self, model: nn.Module, inputs: dict[str, Any]) -> Outcome:
        """In evaluation, each example's mean negative log-likelihood a token, and its share of right tokens."""
        if model.training:
            loss, sample_size = self.train_loss(model, inputs)
            return Outcome(loss / sample_size)
        sample = inputs["sample"]
        log_probs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True).float()
        target = sample["target"].view(log_probs.shape[:-1])
        real = target.ne(self.task.target_dictionary.pad()) if log_probs.dim() == 3 else torch.ones_like(target).bool()
        losses = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1) * real
        right = (log_probs.argmax(-1) == target) & real
        rows = (losses.size(0), -1)
        count = real.view(rows).sum(1).clamp(min=1)
        return Outcome(losses.reshape(rows).sum(1) / count, right.view(rows).sum(1) / count)

    def tokens(self, inputs: dict[str, Any]) -> dict[str, Tokens]:
        """Source tokens of the encoder, target prefix of the decoder."""
        net_input, padding = inputs["sample"]["net_input"], self.padding
        named = {"encoder": "src_tokens", "decoder": "prev_output_tokens"}
        if "prev_output_tokens" not in net_input and self.decoder_only:
            named = {"decoder": "src_tokens"}
        found = {stack: net_input[name] for stack, name in named.items() if name in net_input}
        return {stack: Tokens(ids, ids.ne(padding)) for stack, ids in found.items()}

    def begin(self, model: nn.Module) -> None:
        """Look at the model once; load the reward subset, so that a missing one is refused before training."""
        self.padding = padding_index(model)
        self.decoder_only = not hasattr(model, "encoder")
        if self.subset not in self.task.datasets:
            self.task.load_dataset(self.subset)
        self.device = next(model.parameters()).device

    def validation(self, n: int) -> Iterable[dict[str, Any]]:
        """n examples of the reward subset, drawn at random by torch's generator, as one batch."""
        dataset = self.task.dataset(self.subset)
        chosen = torch.randperm(len(dataset))[:n].tolist()
        sample = dataset.collater([dataset[i] for i in chosen])
        if self.device.type == "cuda":
            sample = utils.move_to_cuda(sample, self.device)
        yield {"sample": sample}


class FairseqDefender(Defender):
    """The defender with an optimizer of fairseq's, which takes care of reduced precision and of the sample size."""

    def __init__(self, attacker: nn.Module, optimizer: FairseqOptimizer, clip_norm: float = 0.0) -> None:
        self.attacker, self.attacker_optimizer, self.clip_norm = attacker, optimizer, clip_norm
        self.model = copy.deepcopy(attacker)
        self.model.zero_grad(set_to_none=True)
        self.optimizer = twin_optimizer(optimizer, self.model)
        self.sample_size: Any = 0

    def learn(self, problem: FairseqProblem, inputs: dict[str, Any]) -> None:
        """Forward and backward, the loss a sum over tokens as fairseq has it."""
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, enabled=isinstance(self.optimizer, AMPOptimizer)):
            loss, sample_size = problem.train_loss(self.model, inputs)
        self.optimizer.backward(loss)
        self.sample_size += sample_size

    def step(self) -> None:
        """Divide by the sample size over all processes, clip and step, at the attacker's learning rate."""
        self.optimizer.set_lr(self.attacker_optimizer.get_lr())
        size = torch.as_tensor(float(self.sample_size), device=next(self.model.parameters()).device)
        for parameter in self.model.parameters():
            if world_size() > 1 and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                average(parameter.grad)
        try:
            self.optimizer.multiply_grads(1.0 / float(average(size).clamp(min=1e-9)))
            self.optimizer.clip_grad_norm(self.clip_norm)
            self.optimizer.step()
        except OverflowError:
            pass  # as in fairseq's trainer: the loss scale is halved, the update is skipped
        self.optimizer.zero_grad()
        self.sample_size = 0

    @torch.no_grad()
    def settle(self, attacker_won: bool) -> None:
        """Copy the winner over the loser, with its optimizer's state and its fp32 copies."""
        super().settle(attacker_won)
        ours, theirs = self.optimizer, self.attacker_optimizer
        losing, winning = (ours, theirs) if attacker_won else (theirs, ours)
        for loser, winner in zip(_masters(losing), _masters(winning), strict=True):
            loser.copy_(winner)

    def close(self) -> None:
        """No hook to take off."""


def _masters(optimizer: FairseqOptimizer) -> list[Tensor]:
    """The fp32 copies that fairseq's fp16 optimizer keeps of half-precision weights."""
    masters = getattr(optimizer, "fp32_params", None)
    if masters is None:
        return []
    masters = list(masters.values()) if isinstance(masters, dict) else masters
    return masters if isinstance(masters, list) else [masters]


def twin_optimizer(optimizer: FairseqOptimizer, model: nn.Module) -> FairseqOptimizer:
    """An optimizer of the same kind, settings and state for a copy of the model."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optimizer, FP16Optimizer | MemoryEfficientFP16Optimizer | AMPOptimizer):
        twin = type(optimizer).build_optimizer(optimizer.cfg, parameters)
    else:
        twin = type(optimizer)(optimizer.cfg, parameters)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.set_lr(optimizer.get_lr())
    return twin


def prepare_game(regularizer: AttendOut, task: Any, criterion: Any, optimizer: FairseqOptimizer) -> None:
    """Give AttendOut its problem, optimizer and defender; `optimizer` is the attacker's."""
    problem = FairseqProblem(task, criterion, regularizer.reward_subset)
    problem.begin(regularizer.model)
    regularizer.problem, regularizer.optimizer = problem, optimizer
    regularizer.defender_class = FairseqDefender
