"""Functions that torch.compile leaves as they are.

A probe reads what attention computes in the middle of a compiled block, and differentiates the objective by it. Inside
a compiled graph that is a result like any other, which nothing later depends on: its gradient would be zero. So an
attention that is watched or masked runs between two graphs, and an idle one is a part of the model's own graph.
"""

import inspect
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn

Given = ParamSpec("Given")
Result = TypeVar("Result")
REASON = (
    "attn_reg_plugin runs attention that it watches or masks, and its hooks, between compiled graphs; compile without "
    "fullgraph=True"
)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wrapped, which has its class and signature; others as they are."""
    return getattr(module, "_orig_mod", module)


def outside_graphs(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorator: torch.compile breaks its graph at the function, and runs it and what it calls as they are.

    PyTorch's compiler is not imported for it: that takes a second, which a training that compiles nothing is spared.
    """
    if "torch._dynamo" in sys.modules and "reason" in inspect.signature(torch.compiler.disable).parameters:
        return torch.compiler.disable(function, reason=REASON)
    return torch._disable_dynamo(function)  # the same without a reason, as PyTorch's own modules and optimizers use it
