"""Trained models in folders as `save_pretrained` and Trainer write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from attn_reg_plugin.checkpoints import WEIGHTS
from attn_reg_plugin.models.hf_encoder import HEADS, load_config


def model_folder(folder: Path) -> Path | None:
    """The folder with configuration and weights: this one, or the last `checkpoint-N` in it; None if neither has."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()]
    for place in (folder, *sorted(checkpoints, key=lambda path: int(path.name[11:]), reverse=True)):
        if (place / "config.json").is_file() and any(any(place.glob(pattern)) for pattern in WEIGHTS):
            return place
    return None


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bar for a file that is on the disk."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_classifier(folder: Path, kind: str) -> Any:
    """A model with the head for a kind of task, in fp32.

    Raises:
        ValueError: it was saved with another head, or cannot be read.
    """
    config = load_config(str(folder))
    saved, head = (config.architectures or ["a model without a name"])[0], HEADS[kind].removeprefix("AutoModel")
    if not saved.endswith(head):
        raise ValueError(f"{folder} holds {saved}, but {kind.replace('_', ' ')} needs a model ...{head}")
    with _without_bars():
        return getattr(transformers, HEADS[kind]).from_pretrained(folder, dtype=torch.float32)


def load_translator(folder: Path, tokenizer: Path) -> tuple[Any, Any]:
    """A sequence-to-sequence model, in fp32, and its tokenizer.

    Raises:
        ValueError: either cannot be read.
    """
    try:
        with _without_bars():
            model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{folder} cannot be read as a translation model with its tokenizer: {reason}") from None
