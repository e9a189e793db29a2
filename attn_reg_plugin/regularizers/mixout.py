"""Mixout: parameters are mixed with the pretrained ones (Lee, Cho & Kang, ICLR 2020, arXiv 1909.11299).

In training each element of a weight w is replaced by its pretrained value u with probability p, and the rest is scaled
so that the expectation is w (the paper's equation 7), with m drawn from Bernoulli(p):

    mixout(w) = (m ∘ u + (1 − m) ∘ w − p u) / (1 − p) = u + (1 − m) ∘ (w − u) / (1 − p).

The gradient is that of this formula. (The authors' code draws one mask for all rows of a weight, and leaves 1 / (1 − p)
out of the gradient.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_reg_plugin.regularizers.attachment import Attachment, attachments_of
from attn_reg_plugin.regularizers.base import Regularizer, option, register
from attn_reg_plugin.regularizers.presets import Preset
from attn_reg_plugin.regularizers.probing import Forward
from attn_reg_plugin.regularizers.update_masks import drawn_seed, update_mask

#: own names of parameters of several dimensions that map nothing, such as ViT's `cls_token` and XLNet's `r_w_bias`
_NO_MAP = re.compile(r"bias|embed|position|token")


@register("mixout")
@dataclass(eq=False)
class Mixout(Regularizer):
    """Mix each weight with its pretrained value in training.

    The pretrained values are those that the weights have in the first training forward. They belong to the state, as
    large as the model: a training that is resumed has them from there. A mask holds for an update, with all its batches
    and on all data-parallel ranks; in a loop of one's own, `end_update` is what tells one update from the next.

    Attributes:
        p: probability of taking an element's pretrained value, in [0, 1); 0 is plain training, bit for bit. The paper
            takes 0.7 to 0.9, without dropout.
        weights: `linear` mixes the weights of linear maps, as the authors do: parameters of several dimensions, those
            of convolutions too, but no embedding tables, learned tokens, positions and biases. `all` mixes every
            trained parameter.

    Raises:
        ValueError: p is out of its range.
    """

    presets: ClassVar[tuple[Preset, ...]] = (Preset("mixout", "mixout", {"p": 0.7}),)
    needs_sites: ClassVar[bool] = False
    acts: ClassVar[int] = 1
    unsharded: ClassVar[str] = "it mixes whole weights with the pretrained ones"

    p: float = option(0.7, "probability of an element's pretrained value, in [0, 1)", within="[0, 1)")
    weights: str = option(
        "linear", "mix the weights of linear maps, or all trained parameters", choices=("linear", "all")
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.pretrained: dict[str, Tensor] = {}
        self.seed: int | None = None
        self.places = Places()

    def attach(self, model: nn.Module) -> Attachment:
        """As `Regularizer.attach`.

        Raises:
            ValueError: there is nothing to mix.
        """
        if not any(True for _ in mixed_parameters(model, self.weights)):
            raise ValueError(f"{type(model).__name__} has no trained weights to mix with pretrained ones")
        return super().attach(model)

    def begin_anew(self) -> None:
        """As `Regularizer.begin_anew`: each model has pretrained weights of its own."""
        super().begin_anew()
        self.pretrained, self.seed = {}, None

    def detach(self) -> None:
        """As `Regularizer.detach`; what the weights were pretrained to stays for the state."""
        self.places.forget()
        super().detach()

    @property
    def large_state(self) -> bool:
        """The pretrained weights are as large as the model."""
        return True

    @property
    def begun(self) -> bool:
        """Once the pretrained weights are known."""
        return bool(self.pretrained)

    def due(self) -> bool:
        """Always, unless nothing is mixed."""
        return self.p > 0

    def hooks(self, model: nn.Module, sites: list[Any]) -> list[Any]:
        """Give the model its weights back before it is saved or evaluated: Ctrl-C leaves the mixed ones."""
        return [
            model.register_state_dict_pre_hook(give_back),
            model.register_forward_pre_hook(give_back_for_evaluation, prepend=True),
        ]

    def before_forward(self, forward: Forward) -> None:
        """Put the mixed weights into the model; `after_forward` takes them out."""
        self.places.forget()
        chosen = dict(mixed_parameters(self.model, self.weights))
        if self.seed is None:
            self.seed = drawn_seed()
        for name in chosen.keys() - self.pretrained.keys():
            self.pretrained[name] = chosen[name].detach().clone()
        mixed = {}
        for i, (name, weight) in enumerate(chosen.items()):
            target = self.pretrained[name] = self.pretrained[name].to(weight)
            mask = update_mask(weight, self.p, self.seed, self.updates, i)
            mixed[weight] = mixout(weight, target, mask, self.p)
        self.places.put(self.model, mixed)

    def after_forward(self, outputs: Any) -> None:
        """Give the model its weights back; activation checkpointing gets the mixed ones again while it recomputes."""
        self.places.take_out()
        for tensor in tensors_of(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(self.places.for_the_backward)

    def end_update(self) -> None:
        """Free what the update needed."""
        self.places.forget()
        super().end_update()

    def copied(self) -> Mixout:
        """For a copy of the model: with the same pretrained weights."""
        twin = super().copied()
        twin.pretrained, twin.places = dict(self.pretrained), Places()
        return twin

    def state_dict(self) -> dict[str, Any]:
        """With the pretrained weights, and the seed of the masks."""
        return {**super().state_dict(), "pretrained": dict(self.pretrained), "seed": self.seed, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Regularizer.load_state_dict`.

        Raises:
            ValueError: the state lacks the pretrained weights.
        """
        super().load_state_dict(state)
        if not isinstance(state.get("pretrained"), Mapping):
            raise ValueError("the state lacks the pretrained weights of mixout")
        self.pretrained = dict(state["pretrained"])
        self.seed = state.get("seed")

    def resume(self, state: Mapping[str, Any]) -> None:
        """As `Regularizer.resume`.

        Raises:
            ValueError: the pretrained weights are another model's.
        """
        self.load_state_dict(state)
        shapes = {name: tuple(weight.shape) for name, weight in self.model.named_parameters()}  # others may be frozen
        theirs = {name: tuple(weight.shape) for name, weight in self.pretrained.items()}
        if theirs and state.get("weights", self.weights) != self.weights:
            raise ValueError(f"the state is of mixout with weights={state['weights']!r}, and not {self.weights!r}")
        other = [name for name in theirs if shapes.get(name) != theirs[name]]
        if theirs and "weights" not in state:  # an earlier version's
            other += [name for name, _ in mixed_parameters(self.model, self.weights) if name not in theirs]
        if other:
            raise ValueError(f"the state's pretrained weights are those of another model: {min(other)} differs")


def mixout(weight: Tensor, pretrained: Tensor, mask: Tensor, p: float) -> Tensor:
    """Equation 7; all tensors have one shape.

    Args:
        mask: bool, True = the pretrained value.
        p: the probability that it is drawn with, in [0, 1).
    """
    return pretrained + (weight - pretrained).masked_fill(mask, 0.0) / (1.0 - p)


def mixed_parameters(model: nn.Module, which: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters to mix, by name: `all`, or the weights of `linear` maps, see `Mixout`."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        is_map = parameter.dim() > 1 and id(parameter) not in tables and not _NO_MAP.search(name.rpartition(".")[2])
        if parameter.requires_grad and (which == "all" or is_map):
            yield name, parameter


def tensors_of(outputs: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in a model's outputs: in mappings, lists, tuples and the attributes of other objects."""
    seen = set() if seen is None else seen
    if id(outputs) in seen or isinstance(outputs, nn.Module | type):
        return
    seen.add(id(outputs))
    if isinstance(outputs, Tensor):
        yield outputs
        return
    if isinstance(outputs, Mapping):
        held: Iterable[Any] = outputs.values()
    elif isinstance(outputs, list | tuple):
        held = outputs
    elif is_dataclass(outputs):  # it may have slots
        held = [getattr(outputs, field.name, None) for field in fields(outputs)]
    else:
        held = getattr(outputs, "__dict__", {}).values()
    for one in held:
        yield from tensors_of(one, seen)


def give_back(model: nn.Module, *_: Any) -> None:
    """Give a model its parameters back, as a hook of it or of a copy, which has its own method."""
    for one in attachments_of(model):
        if isinstance(one.regularizer, Mixout):
            one.regularizer.places.take_out()


def give_back_for_evaluation(model: nn.Module, args: Any) -> None:
    """The same before a forward in evaluation mode that is no probe's."""
    if not model.training and not any(one.busy for one in attachments_of(model)):
        give_back(model)


class Places:
    """Where a model has its parameters, and other tensors in their place for a while.

    `Module.__setattr__` takes only parameters for the name of one, so the tensors go into its dictionary, as
    `torch.func.functional_call` does it.
    """

    def __init__(self) -> None:
        self._mixed: list[tuple[dict[str, Any], str, nn.Parameter, Tensor]] = []
        self._there = False

    def __reduce__(self) -> tuple[type[Places], tuple[()]]:
        return Places, ()  # a copy or pickle of it

    def put(self, model: nn.Module, mixed: Mapping[nn.Parameter, Tensor]) -> None:
        """Put the tensors in."""
        self._mixed = [
            (module._parameters, name, parameter, mixed[parameter])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in mixed
        ]
        self._put()

    def _put(self) -> None:
        for parameters, name, _, tensor in self._mixed:
            parameters[name] = tensor
        self._there = True

    def take_out(self) -> None:
        """Put the parameters back; the tensors are kept for the backward."""
        if self._there:
            for parameters, name, parameter, _ in self._mixed:
                parameters[name] = parameter
        self._there = False

    def for_the_backward(self, gradient: Tensor) -> None:
        """As a hook of an output: the tensors are in place until the backward that has begun is over."""
        if self._mixed and not self._there:
            self._put()
            torch.autograd.Variable._execution_engine.queue_callback(self.take_out)

    def forget(self) -> None:
        """Put the parameters back, and free the tensors."""
        self.take_out()
        self._mixed = []
