"""Small files in the official formats, with labels that can be learned, beside the package's tiny encoders."""

from __future__ import annotations

from functools import partial

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
