"""Context that a face gives to a method, beyond the arguments of the model's forward.

`Supplied` comes before the forwards of a batch, `Training` once, before the first update.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Supplied:
    """Facts of a batch that the forward's arguments do not show; None = not known.

    Attributes:
        targets: gold labels as the model's outputs answer them, (B,), (B, T) or (B, C); -100 is ignored.
        token_mask: bool (B, T), True = an output that is a real token.
        read_off: True where a face read `token_mask` off the batch, which may not be that of the outputs: a mask that
            does not fit them is left out then, and refused otherwise.
        padding_label: the number of padding in a vocabulary, which isn't a pseudo label.
        special_ids: the ids of special tokens (CLS, SEP, BOS, EOS, language codes), which are never hidden.
        regression: True where outputs (B, C) are C numbers an example, and no logits of classes.
        batch: the face's own batch, which its `Problem` reads: fairseq's sample, Trainer's inputs.
        num_items: what the loss of the batch is divided by, where the face divides it.
        update: optimizer updates made so far.
        counts: False for a batch that is to count for nothing, such as the empty share of a data-parallel rank.
    """

    targets: Tensor | None = None
    token_mask: Tensor | None = None
    read_off: bool = False
    padding_label: int | None = None
    special_ids: frozenset[int] | None = None
    regression: bool = False
    batch: Any = None
    num_items: Tensor | int | None = None
    update: int | None = None
    counts: bool = True

    def __post_init__(self) -> None:
        """Refuse, by a TypeError, lists where tensors are read, and tensors where numbers are."""
        for name in ("targets", "token_mask"):
            if not isinstance(given := getattr(self, name), Tensor | None):
                raise TypeError(f"the supplied {name} is of type {type(given).__name__}, but must be a tensor")
        if self.special_ids is not None and not all(isinstance(one, Integral) for one in self.special_ids):
            raise TypeError("the supplied special_ids must be whole numbers, such as tokenizer.all_special_ids")

    def named(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as objectives and problems read them among the inputs.

        Beside a `token_mask` that has to fit, `token_mask_supplied` is True.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        named = {
            name: value
            for name, value in vars(self).items()
            if value is not defaults[name] and name != "read_off"  # no data
        }
        strict = self.token_mask is not None and not self.read_off
        return {**named, "token_mask_supplied": True} if strict else named


@dataclass
class Outcome:
    """Result of a `Problem`'s evaluation: the loss (scalar or per example) and a metric if there is one."""

    loss: Tensor
    metric: Tensor | None = None


class Problem(Protocol):
    """The task that a model is trained and evaluated on; `inputs` are a forward's arguments and what was supplied.

    Where an update has several batches, its gradient is taken to be their mean: the loop divides each loss by their
    number, as Lightning and Accelerate do. A loop that divides by another number has it in `problem.accumulation`: 1
    where the losses are summed; with Accelerate, whose last update of an epoch may have fewer batches,
    `gradient_accumulation_steps`. fairseq and Trainer divide as they do for the model.
    """

    def loss(self, model: nn.Module, inputs: Any) -> Outcome:
        """The training loss, or in evaluation mode the loss of each example."""

    def tokens(self, inputs: Any) -> Mapping[str, Any]:
        """Token ids and padding of each stack, `Tokens` by `encoder` and `decoder`."""

    def validation(self, n: int) -> Iterable[Any]:
        """n examples drawn at random."""


class Training(Protocol):
    """The training that a face runs, for methods that need more than the forward; see `Regularizer.bind`.

    Attributes:
        optimizer: of the attached model.
        clip_norm: largest gradient norm of an update; 0 = unlimited.
    """

    optimizer: Optimizer
    clip_norm: float

    def problem(self, subset: str) -> tuple[Problem, int]:
        """The training as a `Problem`, its validation examples drawn from `subset`, and how many there are of these.

        Raises:
            ValueError: there is no such data, or none of it can be used.
        """

    def copy_of(self, model: nn.Module, optimizer: Optimizer, clip_norm: float) -> Any:
        """A second model, equal to `model`, that is trained as the face trains: a `Defender`."""
