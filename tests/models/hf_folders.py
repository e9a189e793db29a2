"""Small files in the official formats, with labels that can be learned, beside the package's tiny encoders."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.labelled.made_up import make_encoder, make_task, tokenizer

__all__ = ["make_encoder", "tokenizer"]
#: numbers of examples that are no multiples of a batch
make_toy = partial(make_task, sizes={"train": 48, "valid": 21, "valid1": 26})
make_rte, make_mnli = partial(make_toy, name="rte"), partial(make_toy, name="mnli")

#: a row of the table of tasks -> (the fairseq task, the criterion, the official metric)
TOYS = {
    "rte": ("attn_reg_text_classification", "attn_reg_classification", "accuracy"),
    "stsb": ("attn_reg_text_classification", "attn_reg_classification", "pearson_spearman"),
    "wnut17": ("attn_reg_token_classification", "attn_reg_tagging", "f1"),
    "swag": ("attn_reg_multiple_choice", "attn_reg_classification", "accuracy"),
}


def build(folder: Path | str, row: Any = "mnli", seed: int = 7, **flags: Any) -> Any:
    """The encoder in a folder as `--arch hf_encoder`, with the head for a row of the table, or for another task."""
    from attn_reg_plugin.labelled import find_task
    from attn_reg_plugin.models.hf_encoder import HFEncoderConfig, HFEncoderModel

    labelled = find_task(row) if isinstance(row, str) else row
    task = SimpleNamespace(labelled=labelled, cfg=SimpleNamespace(hf_model=str(folder)))
    torch.manual_seed(seed)
    return HFEncoderModel.build_model(HFEncoderConfig(**flags), task)


def make_model(folder: Path, row: str, seed: int = 3) -> Any:
    """An encoder that is made in a folder, as `build` has it."""
    return build(make_encoder(folder), row, seed)
