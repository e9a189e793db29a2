"""A fairseq training as a method's `Training`: what AttendOut plays with."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.optim import AMPOptimizer, FairseqOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer
from torch import Tensor, nn

from attn_reg_plugin.backends.fairseq import padding_index
from attn_reg_plugin.callbacks import example_outcomes
from attn_reg_plugin.regularizers import Outcome, Tokens
from attn_reg_plugin.regularizers.attend_out.defender import Defender
from attn_reg_plugin.regularizers.base.distributed import average, average_gradients
from attn_reg_plugin.tasks.predictions import adaptive_log_probabilities

#: reward examples in a forward: their logits are all there at once
EVALUATED_AT_ONCE = 32


class FairseqProblem:
    """A fairseq task and criterion as AttendOut's `Problem`; its inputs are samples.

    Args:
        task, criterion: fairseq's.
        subset: the dataset that rewards are measured on, which is loaded.
        model: looked at once.

    Attributes:
        indices: the examples of it that are not too long for the task or the model, int64.

    Raises:
        ValueError: it is training data in several parts, of which each epoch has another.
    """

    def __init__(self, task: Any, criterion: Any, subset: str, model: nn.Module) -> None:
        self.task, self.criterion, self.subset = task, criterion, subset
        if subset == "train" and task.has_sharded_data(subset):
            raise ValueError("rewards are of one set of examples, but 'train' is in several parts; take 'valid'")
        self.padding = padding_index(model)
        self.decoder_only = not hasattr(model, "encoder")
        if subset not in task.datasets:
            task.load_dataset(subset)
        self.device = next(model.parameters()).device
        dataset = task.dataset(subset)
        self.indices = np.arange(len(dataset))
        limits = utils.resolve_max_positions(task.max_positions(), model.max_positions())
        if limits is not None:
            self.indices = np.sort(dataset.filter_indices_by_size(self.indices, limits)[0])

    def loss(self, model: nn.Module, inputs: dict[str, Any]) -> Outcome:
        """Return in evaluation each example's loss and metric, by `example_outcomes` of the task or the criterion.

        Where there is none: its mean negative log-likelihood per token, and its share of right tokens.
        """
        sample = inputs["batch"]
        for owner in (self.task, self.criterion):
            if hasattr(owner, "example_outcomes"):
                return owner.example_outcomes(model, sample)
        outputs = model(**sample["net_input"])
        softmax = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
        if softmax is None:
            log_probs = model.get_normalized_probs(outputs, log_probs=True).float()
        else:  # fairseq's own are no more precise than the model
            log_probs = adaptive_log_probabilities(softmax, outputs[0])
        target = sample["target"].view(log_probs.shape[:-1])
        real = target.ne(self.task.target_dictionary.pad()) if log_probs.dim() == 3 else None
        return example_outcomes(log_probs, target, real)

    def tokens(self, inputs: dict[str, Any]) -> dict[str, Tokens]:
        """Return the encoder's source and the decoder's prefix; choices as rows, as the model sees them."""
        net_input, padding = inputs["batch"]["net_input"], self.padding
        if "input_ids" in net_input:
            ids, mask = (net_input[name].flatten(0, -2) for name in ("input_ids", "attention_mask"))
            return {"encoder": Tokens(ids, mask.bool())}
        named = {"encoder": "src_tokens", "decoder": "prev_output_tokens"}
        if "prev_output_tokens" not in net_input and self.decoder_only:
            named = {"decoder": "src_tokens"}
        found = {stack: net_input[name] for stack, name in named.items() if name in net_input}
        return {stack: Tokens(ids, ids.ne(padding)) for stack, ids in found.items()}

    def validation(self, n: int) -> Iterable[dict[str, Any]]:
        """Draw n examples of the reward subset at random by torch's generator, some at a time."""
        dataset = self.task.dataset(self.subset)
        chosen = self.indices[torch.randperm(len(self.indices))[:n].numpy()].tolist()
        for start in range(0, len(chosen), EVALUATED_AT_ONCE):
            sample = dataset.collater([dataset[i] for i in chosen[start : start + EVALUATED_AT_ONCE]])
            if self.device.type == "cuda":
                sample = utils.move_to_cuda(sample, self.device)
            yield {"batch": sample}


class FairseqDefender(Defender):
    """The defender with an optimizer of fairseq's, which takes care of reduced precision and of the sample size."""

    def __init__(self, attacker: nn.Module, optimizer: FairseqOptimizer, clip_norm: float = 0.0) -> None:
        self.attacker, self.attacker_optimizer, self.clip_norm = attacker, optimizer, clip_norm
        self.model = copy.deepcopy(attacker)
        self.model.zero_grad(set_to_none=True)
        self.optimizer = twin_optimizer(optimizer, self.model)
        self.sample_size, self.begun = 0.0, False

    def learn(self, problem: FairseqProblem, inputs: dict[str, Any]) -> None:
        """Forward and backward, the loss a sum over tokens as fairseq has it.

        As in fairseq's trainer, an empty share counts for nothing, and so does what came before it in the update.
        """
        if not self.begun:
            lower_scale(self.optimizer, self.attacker_optimizer)
            self.begun = True
        self.model.set_num_updates(inputs["update"])
        mixed = isinstance(self.optimizer, AMPOptimizer) and torch.cuda.is_available()  # on a CPU fairseq mixes nothing
        with torch.autocast("cuda", enabled=mixed):
            loss, sample_size, _ = problem.criterion(self.model, inputs["batch"])
        self.optimizer.backward(loss if inputs.get("counts", True) else loss * 0)
        self.sample_size = self.sample_size + float(sample_size) if inputs.get("counts", True) else 0.0

    def step(self) -> None:
        """Divide by the sample size over all ranks, clip and step, at the attacker's learning rate."""
        self.optimizer.set_lr(self.attacker_optimizer.get_lr())
        size = torch.as_tensor(self.sample_size, device=next(self.model.parameters()).device)
        average_gradients(self.model)
        try:
            self.optimizer.multiply_grads(1.0 / (float(average(size)) or 1.0))
            self.optimizer.clip_grad_norm(self.clip_norm)
            self.optimizer.step()
        except OverflowError:
            pass  # as in fairseq's trainer: the loss scale is halved, the update is skipped
        self.optimizer.zero_grad()
        self.sample_size, self.begun = 0.0, False

    @torch.no_grad()
    def settle(self, attacker_won: bool) -> None:
        """Copy the winner over the loser, with its optimizer's state and its fp32 copies."""
        super().settle(attacker_won)
        ours, theirs = self.optimizer, self.attacker_optimizer
        losing, winning = (ours, theirs) if attacker_won else (theirs, ours)
        for loser, winner in zip(_masters(losing), _masters(winning), strict=True):
            loser.copy_(winner)
        ours.zero_grad()  # which also takes over a changed loss scale

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, and the fp32 copies if there are any."""
        return {**super().state_dict(), "masters": [master.detach() for master in _masters(self.optimizer)]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        super().load_state_dict(state)
        for master, kept in zip(_masters(self.optimizer), state["masters"], strict=True):
            master.copy_(kept)
        self.optimizer.zero_grad()

    def close(self) -> None:
        """No hook to take off."""


def lower_scale(ours: FairseqOptimizer, theirs: FairseqOptimizer) -> None:
    """Lower a loss scale to another's, which has seen an overflow; between updates."""
    if isinstance(ours, AMPOptimizer):
        scale = min(ours.scaler.get_scale(), theirs.scaler.get_scale())
        if ours.scaler.is_enabled():
            ours.scaler.load_state_dict({**ours.scaler.state_dict(), "scale": scale})
    elif getattr(ours, "scaler", None) is not None:
        ours.scaler.loss_scale = min(ours.scaler.loss_scale, theirs.scaler.loss_scale)
        ours.zero_grad()  # which takes over the scale


def _masters(optimizer: FairseqOptimizer) -> list[Tensor]:
    """List the fp32 copies that fairseq's fp16 optimizer keeps of half-precision weights."""
    masters = getattr(optimizer, "fp32_params", [])
    masters = list(masters.values()) if isinstance(masters, dict) else masters
    return masters if isinstance(masters, list) else [masters]


def twin_optimizer(optimizer: FairseqOptimizer, model: nn.Module) -> FairseqOptimizer:
    """Make an optimizer of the same kind, settings and state for a copy of the model.

    fairseq's wrappers for reduced precision do not keep the configuration that builds them, so they are copied, and
    what they wrap is made anew.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    twin = object.__new__(type(optimizer))  # copy.copy would copy the wrapped optimizer, which answers for it
    twin.__dict__.update(optimizer.__dict__)
    if isinstance(optimizer, FP16Optimizer):
        flat = optimizer.has_flat_params
        twin.fp16_params = parameters
        twin.fp32_params = FP16Optimizer.build_fp32_params(None, parameters, flatten=flat)
        masters = list(twin.fp32_params.values()) if flat else twin.fp32_params
        twin.fp32_optimizer = _anew(optimizer.fp32_optimizer, masters)
    elif isinstance(optimizer, MemoryEfficientFP16Optimizer):
        twin.wrapped_optimizer = _anew(optimizer.wrapped_optimizer, parameters)
    elif isinstance(optimizer, AMPOptimizer):
        twin.fp32_optimizer = _anew(optimizer.fp32_optimizer, parameters)
        twin._grad_scaler = copy.deepcopy(optimizer.scaler)
    else:
        twin = _anew(optimizer, parameters)
    if isinstance(optimizer, FP16Optimizer | MemoryEfficientFP16Optimizer):
        twin.scaler = copy.deepcopy(optimizer.scaler)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.set_lr(optimizer.get_lr())
    with torch.no_grad():
        for ours, theirs in zip(_masters(twin), _masters(optimizer), strict=True):
            ours.copy_(theirs)
    return twin


def _anew(optimizer: FairseqOptimizer, parameters: list[nn.Parameter]) -> FairseqOptimizer:
    settings = getattr(optimizer, "cfg", None) or optimizer.args  # the older optimizers call them so
    return type(optimizer)(settings, parameters)


class FairseqTraining:
    """A task, a criterion and fairseq's optimizer as a method's `Training`."""

    copy_of = staticmethod(FairseqDefender)

    def __init__(
        self, task: Any, criterion: Any, optimizer: FairseqOptimizer, model: nn.Module, clip_norm: float
    ) -> None:
        self.task, self.criterion, self.optimizer, self.model = task, criterion, optimizer, model
        self.clip_norm = clip_norm

    def problem(self, subset: str) -> tuple[FairseqProblem, int]:
        """See `Training`."""
        problem = FairseqProblem(self.task, self.criterion, subset, self.model)
        if not len(problem.indices):
            raise ValueError(f"the subset {subset!r} has no example that is not too long for the model")
        return problem, len(problem.indices)
