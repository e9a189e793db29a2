"""Methods that run each example several times and compare the passes, such as R-Drop and HiddenCut.

The passes are one forward of a batch that is repeated. So a second method draws masks for all of them, and activation
checkpointing recomputes each with those that it was made with. The loss is the sum of the passes' losses, and the
method's divergence between their predictions.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from attn_reg_plugin.regularizers.base.hooks.attachment import attachments_in
from attn_reg_plugin.regularizers.base.hooks.forward import Forward
from attn_reg_plugin.regularizers.base.outputs import NoObjective, check_scalar, gold_of, logits_of, tokens_with_loss
from attn_reg_plugin.regularizers.base.regularizer import Regularizer, Share

#: how often each batch passes through the model
PASSES = 2
#: the fields of `Supplied` that have a row for each example
_OF_A_BATCH = ("targets", "token_mask", "batch")


@dataclass(eq=False)
class SeveralPasses(Regularizer):
    """Base of methods whose loss compares the passes of a batch; a subclass says how much they differ."""

    #: while `loss` runs: outputs and inputs of the forwards in it
    _seen: list[tuple[Any, Mapping[str, Any]]] | None = field(default=None, init=False, repr=False)
    _inputs: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False)
    #: and the tensors of the batch, as they are before it is repeated
    _whole: list[Tensor] = field(default_factory=list, init=False, repr=False)
    draws_last: ClassVar[bool] = True
    counts_drops: ClassVar[bool] = False

    if TYPE_CHECKING:
        weight: float  # an option of the methods: what the divergence is multiplied by

    # -- what a method implements -----------------------------------------------------------------------------------

    def divergence(self, first: Tensor, second: Tensor) -> Tensor:
        """Return how much the passes' logits (N, C) differ per item: (N,)."""
        raise NotImplementedError

    # -- what it gets -----------------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """Two of a method that is due."""
        return PASSES if self.due() else 1

    def before_forward(self, forward: Forward) -> None:
        """Refuse a forward that no `loss` asked for (RuntimeError), or one of a batch not repeated (ValueError)."""
        if self._seen is None:
            raise RuntimeError(
                f"{self.name} adds to the loss of a batch: compute it by "
                "regularizer.loss(lambda batch: loss_function(model(**batch), batch), batch)"
            )
        if not runs_on_repeated(tensors_in((forward.args, forward.kwargs)), self._whole):
            raise ValueError(
                f"{self.name} repeats the batch, but {type(forward.model).__name__} runs on one that is not repeated: "
                "run the model on the batch that compute is given, and let its first tensor be one with a row for each "
                f"example (it has {self._whole[0].size(0)} rows, and what has as many is repeated)"
            )
        self._inputs = forward.inputs

    def after_forward(self, outputs: Any) -> None:
        """Keep the outputs for the divergence."""
        if self._seen is not None and outputs is not None:
            self._seen.append((outputs, self._inputs))
        self._inputs = {}

    def loss(self, compute: Callable[[Any], Tensor], batch: Any, share: Share | None = None) -> Tensor:
        """The sum of the passes' losses, and the weighted divergence; arguments as in `Regularizer.loss`.

        Raises:
            ValueError: the batch holds no tensor, the model runs on another batch than the repeated one, or its
                outputs cannot be compared.
            RuntimeError: `compute` did not run the model in training mode.
        """
        if self.passes == 1:
            return super().loss(compute, batch)
        whole = list(tensors_in(batch))
        if not whole:
            raise ValueError(
                f"{self.name} repeats the tensors of a batch, but finds none in this {type(batch).__name__}; give a "
                "tensor, or tensors in mappings, lists, tuples and dataclasses"
            )
        self._seen, self._whole, told = [], whole, [(one, one.supplied) for one in self._beside()]
        for one, supplied in told:
            one.supply(replace(supplied, **{name: repeated(getattr(supplied, name)) for name in _OF_A_BATCH}))
        try:
            loss = check_scalar("the loss", compute(repeated(batch)))
            seen = self._seen
        finally:
            self._seen, self._whole = None, []
            for one, supplied in told:
                one.supply(supplied)
        if not seen:
            raise RuntimeError(f"{self.name} saw no forward of the attached model in training mode to take the loss of")
        parts = [compared(outputs, inputs, whole) for outputs, inputs in seen]
        differ = (lambda first, second: (first - second) ** 2, self.divergence)
        divergences = torch.cat([differ[not regression](*passes) for passes, regression in parts])
        total, count = divergences.sum(), divergences.numel()
        self.statistics.add(f"{self.name}_divergence", total.detach())
        self.statistics.add(f"{self.name}_items", count)
        return PASSES * loss + self.weight * (total / max(count, 1) if share is None else share(total, count))

    def _beside(self) -> list[Regularizer]:
        """The methods of the model and of its parts, this one among them: all of them see the repeated batch."""
        attached = [] if self._attachment is None else attachments_in(self._attachment.model)
        return list(dict.fromkeys([self, *(one.regularizer for one in attached)]))


def repeated(batch: Any) -> Any:
    """A batch with every example `PASSES` times: first all of them, then all again.

    Args:
        batch: as in `Regularizer.loss`; what has as many rows as its first tensor is repeated, the rest stays.
    """
    first = next(tensors_in(batch), None)

    def again(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.cat([value] * PASSES) if value.dim() and len(value) == len(first) else value
        if isinstance(value, Mapping):
            made = copy.copy(value) if isinstance(value, dict | UserDict) else dict(value)
            for key, held in value.items():
                made[key] = again(held)
            return made
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(again, value))
        if type(value) in (list, tuple):
            return type(value)(map(again, value))
        if is_dataclass(value) and not isinstance(value, type):
            made = copy.copy(value)  # what its __post_init__ made has rows, too
            for name, held in _fields_of(value).items():
                object.__setattr__(made, name, again(held))  # it may be frozen
            return made
        return value

    return again(batch)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a batch, or of a forward's arguments, that have rows, in order."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value
        return
    held: Any = value if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        held = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        held = _fields_of(value).values()
    for one in held:
        yield from tensors_in(one)


def _fields_of(value: Any) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value) if hasattr(value, one.name)}


def runs_on_repeated(arguments: Iterator[Tensor], whole: list[Tensor]) -> bool:
    """Return whether a forward can be one of the repeated batch.

    It is not where no argument has as many rows as that, or a multiple, as several texts per example have, and an
    argument has the rows of the batch before, or is a tensor of it. A part of the repeated batch may have as many rows:
    then each such argument consists of equal parts.

    Args:
        arguments: the tensors among the forward's arguments.
        whole: those of the batch as it was; the first one's rows are the number of examples.
    """
    rows, given = len(whole[0]), list(arguments)
    if not rows or any(len(one) and len(one) % (PASSES * rows) == 0 for one in given):
        return True
    alike = [one for one in given if len(one) == rows or any(one is held for held in whole)]
    return all(_in_equal_parts(one, PASSES * rows) for one in alike)


def _in_equal_parts(tensor: Tensor, size: int) -> bool:
    """Return whether a tensor repeats itself along its first dimension, or along one of `size` (time-first tokens)."""
    along = [d for d in range(tensor.dim()) if (d == 0 or tensor.size(d) == size) and tensor.size(d) % PASSES == 0]
    split = (tensor.chunk(PASSES, d) for d in along if tensor.size(d))
    return any(all(part.equal(parts[0]) for part in parts[1:]) for parts in split)


def compared(outputs: Any, inputs: Mapping[str, Any], batch: list[Tensor]) -> tuple[list[Tensor], bool]:
    """Return the outputs of a repeated batch that are compared, pass by pass, and whether it is a regression.

    Args:
        outputs: logits (B, C), of a regression (B,) or (B, 1), or of tokens (B, T, V); in any form that `logits_of`
            knows. Of tokens, those that are real and have a label count.
        inputs: of the forward by name.
        batch: the tensors of the batch as it was, the first with a row for each example.

    Raises:
        ValueError: there are no logits, or of another shape, such as (T, B, V), or of other rows than were repeated.
    """
    if inputs.get("adaptive_softmax") is not None:
        raise ValueError("passes cannot be compared by an adaptive softmax, whose model gives features and no logits")
    try:
        logits = logits_of(outputs)
    except NoObjective:
        raise ValueError(
            "the passes cannot be compared: the model's outputs have no logits of classes or tokens; "
            "use a method that asks nothing of them, such as attention_dropout, or AD-DROP with an objective"
        ) from None
    if logits.dim() == 1 or (logits.dim() == 2 and logits.size(-1) == 1):
        return list(logits.float().reshape(-1).chunk(PASSES)), True
    targets = gold_of(inputs)
    several = isinstance(targets, Tensor) and targets.is_floating_point() and targets.shape == logits.shape
    several = several or (logits.dim() == 2 and bool(inputs.get("regression")))
    whole, rows = PASSES * len(batch[0]), logits.size(0)
    if rows % max(whole, 1) and rows in {len(one) for one in batch} - {len(batch[0])}:
        raise ValueError(
            f"the batch's first tensor has {len(batch[0])} rows, and what has as many was repeated, but the model "
            f"gives {rows} rows; put a tensor with a row for each example first"
        )
    time_first = logits.dim() == 3 and logits.size(1) == whole and logits.size(0) % max(whole, 1)
    if logits.dim() not in (2, 3) or several or logits.size(0) % PASSES or time_first:
        what = "several numbers an example" if inputs.get("regression") else "labels of which several may hold"
        what = what if several else f"logits of shape {tuple(logits.shape)}"
        raise ValueError(f"passes with {what} cannot be compared; give (B, C), (B, T, V), or (B,) of a regression")
    passes = list(logits.float().chunk(PASSES))
    if logits.dim() == 3:
        known = tokens_with_loss(logits, inputs)
        known = logits.new_ones(logits.shape[:2]).bool() if known is None else known
        passes = [logits[known.chunk(PASSES)[0]] for logits in passes]
    return passes, False
