"""Child-Tuning: only a part of the gradient updates the model (Xu et al., EMNLP 2021, arXiv 2109.05687).

In every update the gradient is masked, w ← w − η ∇L ∘ M (the paper's equation 2). In Child-Tuning_F, which is
task-free, M is drawn anew for every update, from Bernoulli(p), and the gradient is divided by p (equation 4). In
Child-Tuning_D, which is task-driven, M has 1 for the share p of weights with the largest Fisher information

    F(w) = 1/|D| Σ (∂ log p(y|x; w) / ∂w)²

of the task, estimated once before the first update (equations 5 and 6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_reg_plugin.regularizers.base import Regularizer, option, register
from attn_reg_plugin.regularizers.distributed import from_first_rank
from attn_reg_plugin.regularizers.presets import Preset
from attn_reg_plugin.regularizers.probing import Forward, in_evaluation
from attn_reg_plugin.regularizers.statistics import Quantity
from attn_reg_plugin.regularizers.training import Training
from attn_reg_plugin.regularizers.update_masks import drawn_seed, update_mask

logger = logging.getLogger(__name__)


@register("child_tuning")
@dataclass(eq=False)
class ChildTuning(Regularizer):
    """Update a part of the weights: another one each time, or the part that matters most for the task.

    Gradients are masked as they are computed, so what is clipped afterwards is the masked gradient. (The authors' code
    clips before.) Masks are equal on all data-parallel ranks. In a loop of one's own, `end_update` is what tells one
    update from the next, and `estimate` gives the Fisher information.

    Attributes:
        mode: `free` (F) masks all gradients; `driven` (D) those of the weights in the model's stacked layers, as in the
            authors' code: embeddings and heads are trained whole.
        p: share of the weights whose gradient is kept, in (0, 1]; 1 is plain training, bit for bit.
        fisher_examples: `driven`: examples of the training set that the Fisher information is estimated from, drawn at
            random; 0 takes all, as the paper does. They are run in batches, each with its mean loss, without dropout.

    Raises:
        ValueError: an option is out of its range.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("child_tuning", "Child-Tuning (F)", {"mode": "free", "p": 0.3}),
        Preset("child_tuning_d", "Child-Tuning (D)", {"mode": "driven", "p": 0.3}),
    )
    logged: ClassVar[tuple[Quantity, ...]] = (Quantity("gradients_kept", "gradients", "gradients_kept"),)
    needs_sites: ClassVar[bool] = False
    acts: ClassVar[int] = 0
    unsharded: ClassVar[str] = "it masks the gradients of whole weights"

    mode: str = option(
        "free", "mask at random in every update, or by Fisher information, once", choices=("free", "driven")
    )
    p: float = option(0.3, "share of the weights whose gradient is kept, in (0, 1]", within="(0, 1]")
    fisher_examples: int = option(0, "driven: examples for the Fisher information; 0: all", within="[0, inf)")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.seed: int | None = None
        self.masks: dict[str, Tensor] = {}
        self._training: Training | None = None
        self._estimating = self._told = False
        self._loaded = False  # the masks are those of a state that was loaded since the last training

    def begin_anew(self) -> None:
        """As `Regularizer.begin_anew`: each model has masks of its own."""
        super().begin_anew()
        self.masks, self.seed = {}, None

    @property
    def large_state(self) -> bool:
        """The masks of `driven` are a byte for each weight."""
        return self.mode == "driven"

    @property
    def begun(self) -> bool:
        """Once there are masks."""
        return self.mode == "free" or bool(self.masks)

    def due(self) -> bool:
        """Always, unless every gradient is kept."""
        return self.p < 1

    def bind(self, training: Training) -> None:
        """Know where the training set is, whose masks those of an earlier training are not.

        Raises:
            ValueError: `driven`, and it cannot be used.
        """
        if self.mode == "driven" and self.due():
            training.problem("train")
            self._training = training
            self.masks = self.masks if self._loaded else {}
        self._loaded = False

    def unbind(self) -> None:
        """Release the training."""
        self._training = None

    def hooks(self, model: nn.Module, sites: list[Any]) -> list[Any]:
        """Hooks that mask the gradients of the trained parameters."""
        if not self.due():
            return []
        if self.mode == "driven" and not any(True for _ in stacked_parameters(model)):
            raise ValueError(
                f"{type(model).__name__} has no stacked layers whose weights could be chosen; use mode=free"
            )
        return self._hooked(model)

    def _hooked(self, model: nn.Module) -> list[Any]:
        """Hooks on the trained parameters that have none: of a copy, or trained only since."""
        chosen = set(stacked_parameters(model)) if self.mode == "driven" else None
        return [
            parameter.register_hook(partial(self._masked, name, i, model))
            for i, (name, parameter) in enumerate(model.named_parameters())
            if parameter.requires_grad and (chosen is None or name in chosen) and not self._has_hook(parameter)
        ]

    def _has_hook(self, parameter: nn.Parameter) -> bool:
        hooks = (parameter._backward_hooks or {}).values()
        return any(isinstance(hook, partial) and getattr(hook.func, "__self__", None) is self for hook in hooks)

    def copied(self) -> ChildTuning:
        """For a copy of the model."""
        twin = super().copied()
        twin.masks, twin._training = dict(self.masks), self._training
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle, as hooks and masks of a copied model hold one: without the training and its data."""
        return {**vars(self), "_training": None}

    def before_forward(self, forward: Forward) -> None:
        """Before the first forward: the seed of the masks, or the Fisher information; hooks that are missing.

        Raises:
            RuntimeError: `driven`, and no Fisher information was estimated.
        """
        self._attachment.handles += self._hooked(self.model)
        if self.mode == "free" and self.seed is None:
            self.seed = drawn_seed()
        if self.mode == "driven" and not self.masks:
            if self._training is None:
                raise RuntimeError(
                    "child_tuning with mode='driven' needs the Fisher information: call "
                    "regularizer.estimate(loss, batches) once it is attached"
                )
            problem, examples = self._training.problem("train")
            batches = problem.validation(self.fisher_examples or examples)
            self.estimate(lambda inputs: problem.loss(self.model, inputs).loss.mean(), batches)

    def estimate(self, loss: Callable[[Any], Tensor], batches: Iterable[Any]) -> None:
        """Choose the weights with the largest Fisher information; the model is in evaluation mode meanwhile.

        Args:
            loss: of a batch, the mean −log p(y|x) over its examples.
            batches: of the training set.

        Raises:
            ValueError: there is no batch.
        """
        chosen = [(name, self.model.get_parameter(name)) for name in stacked_parameters(self.model)]
        parameters = [parameter for _, parameter in chosen]
        self._estimating, self._loaded = True, False
        try:
            with in_evaluation(self.model), torch.enable_grad():
                information = fisher_information(loss, batches, parameters)
        finally:
            self._estimating = False
        masks = largest(information, self.p)
        self.masks = {
            name: from_first_rank(mask.to(torch.uint8)).bool() for (name, _), mask in zip(chosen, masks, strict=True)
        }

    def _masked(self, name: str, number: int, model: nn.Module, gradient: Tensor) -> Tensor | None:
        """The gradient of a parameter, masked; in a training forward's backward only."""
        if self._estimating or not model.training:
            return None
        if self.mode == "driven":
            if name not in self.masks:
                self._tell_of_whole(name)
                return None
            mask = self.masks[name] = self.masks[name].to(gradient.device)
            masked = gradient * mask
        else:
            mask = update_mask(gradient, self.p, self.seed or 0, self.updates, number)
            masked = gradient * mask / self.p
        self.statistics.add("gradients_kept", mask.sum().float())
        self.statistics.add("gradients", float(mask.numel()))
        return masked

    def _tell_of_whole(self, name: str) -> None:
        if not self._told:
            logger.warning(
                f"child_tuning: {name} was frozen when the Fisher information was estimated, so it is trained whole, "
                "and so is what else is unfrozen later; unfreeze before the first update, or use mode=free"
            )
        self._told = True

    def state_dict(self) -> dict[str, Any]:
        """With the seed of the masks, or the masks."""
        return {**super().state_dict(), "seed": self.seed, "masks": dict(self.masks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Regularizer.load_state_dict`."""
        super().load_state_dict(state)
        self.seed, self.masks = state.get("seed"), dict(state.get("masks") or {})
        self._loaded = self._attachment is None

    def resume(self, state: Mapping[str, Any]) -> None:
        """As `Regularizer.resume`.

        Raises:
            ValueError: the masks are of another model's weights.
        """
        self.load_state_dict(state)
        if self.masks:
            shapes = {name: tuple(weight.shape) for name, weight in self.model.named_parameters()}
            if any(shapes.get(name) != tuple(mask.shape) for name, mask in self.masks.items()):
                raise ValueError("the state's masks are those of another model's weights")


def stacked_parameters(model: nn.Module) -> Iterator[str]:
    """The names of the trained parameters in stacked layers: those of modules in a `ModuleList`."""
    lists = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.startswith(lists):
            yield name


def fisher_information(
    loss: Callable[[Any], Tensor], batches: Iterable[Any], parameters: list[nn.Parameter]
) -> list[Tensor]:
    """The mean over batches of the squared gradients of the loss (equation 5), in fp32, one tensor a parameter.

    Gradients of half-precision weights are scaled against underflow, and so is the result: only its order is used.

    Raises:
        ValueError: there is no batch.
    """
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    half = any(parameter.dtype == torch.float16 for parameter in parameters)
    number = 0
    for batch in batches:
        number += 1
        value = loss(batch) * (1024.0 if half else 1.0)
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient.float() ** 2
    if not number:
        raise ValueError("the Fisher information needs at least one batch")
    return [total / number for total in sums]


def largest(information: list[Tensor], p: float) -> list[Tensor]:
    """Bool masks of the share p with the largest values over all tensors together; ties at the threshold are all in."""
    values = torch.cat([tensor.reshape(-1) for tensor in information])
    kept = max(round(p * values.numel()), 1)
    threshold = values.kthvalue(values.numel() - kept + 1).values
    return [tensor >= threshold for tensor in information]
