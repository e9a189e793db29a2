"""A stand-in for the forward of a module inside the model."""

from __future__ import annotations

from types import MethodType
from typing import Any, Self

from torch import nn


class StandIn:
    """Stand-in for a module's forward: its own, `forward`, from `install` to `remove`.

    No hook is used: torch's own encoder layer leaves its fast path in evaluation for modules with hooks, and no hook
    can keep a module from running.

    Attributes:
        module: whose forward.
    """

    module: nn.Module

    def install(self) -> Self:
        """Stand in."""
        self._inner, self._replaced = self.module.forward, vars(self.module).get("forward")
        self.module.forward = self.forward
        return self

    def remove(self) -> None:
        """Give the module its forward back."""
        if self._replaced is None:
            del self.module.forward
        else:
            self.module.forward = self._replaced

    def __getstate__(self) -> dict[str, Any]:
        """Copies lack the module's own forward: a pickle looks that up by its name, and would find this one."""
        state = dict(vars(self))
        if state.get("_replaced") is None:
            state.pop("_inner", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state.get("_replaced") is None:
            self._inner = MethodType(type(self.module).forward, self.module)
