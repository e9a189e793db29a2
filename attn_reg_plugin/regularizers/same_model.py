"""Whether a method's counts and state are of the model that it is attached to."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.base import Regularizer

logger = logging.getLogger(__name__)


class SameModel:
    """The model that a method was trained with, for when it is attached again; copies and pickles of it know none."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None

    def __reduce__(self) -> tuple[type[SameModel], tuple[()]]:
        return SameModel, ()

    def remember(self, model: nn.Module | None) -> None:
        """From now on it is `model`; None takes the next one for the same, as where a state was loaded for it."""
        self._model = None if model is None else weakref.ref(model)

    def left_for(self, model: nn.Module) -> bool:
        """Whether `model` is another one."""
        return self._model is not None and self._model() is not model

    def settle(self, method: Regularizer, model: nn.Module, all_attached: bool = False) -> None:
        """Let a method begin anew on another model; one of a combination only once all of them are attached."""
        if self.left_for(model) and (all_attached or not method.companions):
            if method.epoch is not None or method.updates:
                logger.info(f"{method.name}: another model is attached, so epochs and updates are counted anew")
            method.begin_anew()
