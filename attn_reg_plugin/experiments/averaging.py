"""The mean of a run's last checkpoints, as fairseq's scripts/average_checkpoints.py makes it.

That script has no --user-dir, and torch from 2.6 on refuses to read checkpoints for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.checkpoints import load_checkpoint

#: what a checkpoint is called that fairseq writes after an epoch, and after some updates; the number orders them
NAMES = {"epoch": r"checkpoint(\d+)\.pt", "update": r"checkpoint_\d+_(\d+)\.pt"}


def last_checkpoints(run_folder: Path, last: int, by: str | None = None) -> list[Path]:
    """The last checkpoints of a run, the newest first.

    Args:
        run_folder: where they are, there or in `checkpoints`.
        last: how many, at least 1.
        by: `epoch` or `update`; None takes those of epochs if there are enough.

    Raises:
        ValueError: `last` is not at least 1.
        FileNotFoundError: there are fewer.
    """
    if last < 1:
        raise ValueError(f"--last is {last}, but must be at least 1")
    counts = []
    for kind in [by] if by else NAMES:
        for folder in (run_folder, run_folder / "checkpoints"):
            matches = [(re.fullmatch(NAMES[kind], path.name), path) for path in folder.glob("checkpoint*.pt")]
            numbered = sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)
            if len(numbered) >= last:
                return [path for _, path in numbered[:last]]
            counts.append(f"{len(numbered)} of {kind}s in {folder}")
    raise FileNotFoundError(
        f"--last {last} needs {last} checkpoints, but there are {', '.join(counts)}; "
        "train with --save-interval-updates N, in attn-reg compare and finetune behind --, or with fairseq-train "
        "without --no-epoch-checkpoints; or give a smaller --last"
    )


def averaged(paths: list[Path]) -> dict[str, Any]:
    """The first checkpoint, with the mean of all their weights: summed in fp64, half precision becomes fp32.

    Integers, such as a version, are summed and divided without a remainder, as fairseq does.

    Raises:
        ValueError: one cannot be read, or has other weights than the first.
    """
    state = load_checkpoint(paths[0])
    sums = {name: _sum_type(weight) for name, weight in state["model"].items()}
    for path in paths[1:]:
        model = load_checkpoint(path)["model"]
        others = [name for name in {**sums, **model} if _shape(sums, name) != _shape(model, name)]
        if others:
            raise ValueError(f"{path} has other weights than {paths[0]}: {', '.join(sorted(others)[:3])}")
        for name, weight in model.items():
            sums[name] += weight
    for name, total in sums.items():
        kind = state["model"][name].dtype
        if total.is_floating_point():
            kind = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
            state["model"][name] = (total / len(paths)).to(kind)
        elif kind != torch.bool:
            state["model"][name] = (total // len(paths)).to(kind)
    return state


def _sum_type(weight: Tensor) -> Tensor:
    if weight.is_floating_point():
        return weight.to(torch.float64, copy=True)
    return weight.to(torch.int64, copy=True)


def _shape(weights: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
