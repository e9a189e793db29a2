"""Nests of tensors, numbers and texts, compared bit for bit."""

from typing import Any

import torch


def differing(first: Any, second: Any, path: str = "") -> list[str]:
    """List the places where two nests of tensors, numbers and texts differ; empty if they are equal bit for bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return [] if first.dtype == second.dtype and torch.equal(first, second) else [path]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [place for key in first for place in differing(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [place for i, (a, b) in pairs for place in differing(a, b, f"{path}/{i}")]
    return [] if first == second else [path]
