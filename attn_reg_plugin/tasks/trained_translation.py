"""A trained translation model out of its checkpoint, and the sentence pairs of a split, for looking into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationTask

from attn_reg_plugin.tasks.dry_run import register_plugin


def load_translation(path: Path, data: Path) -> tuple[Any, TranslationTask]:
    """The model of a checkpoint, on the CPU, and fairseq's own translation task on `data`.

    Args:
        path: the checkpoint.
        data: the folder that fairseq-preprocess wrote, with the dictionaries that the model was trained with.

    Raises:
        ValueError: the checkpoint is of another kind of task, or the dictionaries do not fit it.
        FileNotFoundError: there is no dictionary in `data`.
    """
    register_plugin()
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path), {"data": str(data)})
    cfg = state["cfg"]
    if "source_lang" not in cfg.task or "left_pad_source" not in cfg.task:
        raise ValueError(f"{path} is of a training with --task {cfg.task._name}, but must be of translation")
    if not any(data.glob("dict.*.txt")):
        raise FileNotFoundError(f"{data} holds no dict.LANG.txt; give the folder that fairseq-preprocess wrote")
    task = TranslationTask.setup_task(cfg.task)
    model = task.build_model(cfg.model, from_checkpoint=True)
    try:
        model.load_state_dict(state["model"], strict=True, model_cfg=cfg.model)
    except RuntimeError as error:
        raise ValueError(f"the dictionaries in {data} do not fit the model of {path} ({str(error)[:120]}...)") from None
    return model, task


def read_pairs(task: TranslationTask, split: str, count: int | None, seed: int) -> tuple[Any, np.ndarray]:
    """A split, and the numbers of `count` of its pairs, drawn at random and sorted by length; None: all, in order.

    Raises:
        ValueError: there is no such split.
    """
    try:
        task.load_dataset(split)
    except FileNotFoundError:
        raise ValueError(f"{task.cfg.data} has no split {split!r}") from None
    dataset = task.dataset(split)
    if count is None:
        return dataset, np.arange(len(dataset))
    chosen = np.random.default_rng(seed).permutation(len(dataset))[:count]
    return dataset, chosen[np.argsort(dataset.src_sizes[chosen], kind="stable")]


def pieces(dictionary: Any, ids: Sequence[int]) -> list[str]:
    """Ids as text, a piece each."""
    return [dictionary[int(number)] for number in ids]
