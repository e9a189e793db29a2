"""`fairseq-train --arch hf_encoder` on tiny encoders and made-up data.

Nothing of the plugin is imported here, so that a training can import this and still find the plugin by `--user-dir`.
"""

import shlex
from pathlib import Path
from typing import Any

import torch

from tests.models.hf_folders import TOYS
from tests.tasks.fairseq_runs import Finished, Job, train_arguments

#: flags of the tiny translation runs that have no place here
WITHOUT = ["--criterion", "--label-smoothing", "--disable-validation", "--max-tokens"]
TRAINING = shlex.split("--batch-size 8 --lr 0.003 --dropout 0.1 --attention-dropout 0.1")


def encoder_arguments(row: str, data: Path, encoder: Path, save: Path, *flags: str, **options: Any) -> list[str]:
    """The arguments of a training on a row of the table of tasks; flags come last and so win."""
    task, criterion, metric = TOYS[row]
    model = ["--arch", "hf_encoder", "--hf-model", str(encoder)]
    best = ["--best-checkpoint-metric", metric, "--maximize-best-checkpoint-metric"]
    own = ["--labelled", row, "--criterion", criterion, *best, *TRAINING]
    return train_arguments(data, save, *own, *flags, task=task, model=model, without=WITHOUT, **options)


def train_encoder(row: str, data: Path, encoder: Path, save: Path, *flags: str, **options: Any) -> Finished:
    """A training that ended, whose log is beside its checkpoints; options as those of a `Job`."""
    return Job("train", encoder_arguments(row, data, encoder, save, *flags), save / "train.log", **options).wait()


def keep_curve(path: Path) -> None:
    """In the training's process: the weights at the start, and which examples gave which loss in every update."""
    kept: dict[str, Any] = {"batches": []}

    def listen(module: torch.nn.Module, args: tuple, output: Any) -> None:
        if type(module).__name__ in ("ClassificationCriterion", "TaggingCriterion") and module.training:
            model, sample = args
            kept.setdefault("start", {name: w.clone() for name, w in model.model.state_dict().items()})
            kept["batches"].append((sample["id"].tolist(), output[0].item() / output[1]))
            torch.save(kept, path)

    torch.nn.modules.module.register_module_forward_hook(listen)
