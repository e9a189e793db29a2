"""Whether a method's counts and state are of the model that it is attached to."""

from __future__ import annotations

import weakref

from torch import nn


class SameModel:
    """The model that a method acts on, from one attaching to the next; copies and pickles of it know of none."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None

    def __reduce__(self) -> tuple[type[SameModel], tuple[()]]:
        return SameModel, ()

    def forget(self) -> None:
        """Take the next model for the same one: the state was loaded."""
        self._model = None

    def left_for(self, model: nn.Module) -> bool:
        """Whether it was another one until now; from now on it is `model`."""
        before, self._model = self._model, weakref.ref(model)
        return before is not None and before() is not model
