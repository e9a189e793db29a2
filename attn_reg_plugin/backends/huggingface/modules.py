"""Attention of a transformers model as its modules show it: which is causal, and which cannot be reached."""

import inspect
import logging
import re
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

#: classes that mix tokens: attention, and what replaces it
MIXER = re.compile(r"Attention$|Attention2d$|Mixer$|DeltaNet$|ShortConv$|RecurrentBlock$")
#: functions that make a mask, whose names say of which kind
MAKES_MASK = re.compile(r"create_\w+_mask(_mapping)?$")
_WARNED: set[str] = set()


def outermost(model: nn.Module) -> Callable[[str], str]:
    """A function from a module's path to that of the outermost transformers model around it, with its dot."""
    starts: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(path.startswith(start) for start in starts):
            starts.append(f"{path}." if path else "")
    return lambda path: next((start for start in starts if path.startswith(start)), "")


def causal_parts(model: nn.Module) -> Callable[[str], bool]:
    """A function from a module's path to whether the innermost model around it makes causal masks and no other.

    Not every attention module knows by itself whether it is causal; the model that makes its mask does.
    """
    causal: dict[str, bool] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            made = [name for name in getattr(code, "co_names", ()) if MAKES_MASK.match(name)]
            causal[f"{path}." if path else ""] = bool(made) and all("bidirectional" not in name for name in made)
    starts = sorted(causal, key=len, reverse=True)
    return lambda path: next((causal[start] for start in starts if path.startswith(start)), False)


def uncovered(model: nn.Module, covered: set[str]) -> dict[str, list[str]]:
    """The attention outside of the sites at `covered`, such as linear attention: the paths of each of its classes."""
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        inside = f"{path}."
        theirs = type(module).__module__.startswith("torch.") or next(module.parameters(), None) is None
        if theirs or not MIXER.search(type(module).__name__):
            continue
        if any(f"{site}.".startswith(inside) or inside.startswith(f"{site}.") for site in covered):
            continue
        if not any(inside.startswith(f"{other}.") for others in found.values() for other in others):
            found.setdefault(type(module).__name__, []).append(path)
    return found


def warn_of_uncovered(model: nn.Module, covered: set[str]) -> None:
    """Name the attention that has no site, once for each of its classes."""
    for name, paths in uncovered(model, covered).items():
        if name not in _WARNED:
            _WARNED.add(name)
            logger.warning(
                f"{len(paths)} of the model's layers have {name}, which does not go through transformers' attention "
                f"interface and is not regularized, whatever the sites: {paths[0]}{', ...' if len(paths) > 1 else ''}"
            )
