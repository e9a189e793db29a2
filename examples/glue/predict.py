"""Predict with a classifier that `attn-reg export` or Trainer wrote, in the format that GLUE takes:

python predict.py EXPORTED test.tsv --columns sentence1 sentence2 --out RTE.tsv
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from attn_reg_plugin.labelled import own_task
from attn_reg_plugin.labelled.rows import read_rows


def main(argv: list[str] | None = None) -> None:
    """Write a header and a line `index<TAB>prediction` per example: the label's name, or a value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("examples", type=Path)
    parser.add_argument("--columns", nargs="+", required=True, help="of the text, or of both texts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args(argv)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    format = next((part for part in ("csv", "jsonl") if f".{part}" in arguments.examples.suffixes), "tsv")
    task = replace(own_task("classification", "text", file_format=format), text=tuple(arguments.columns))
    rows, found = [row.texts for row in read_rows(arguments.examples, task, needed=False)], []
    for start in range(0, len(rows), arguments.batch_size):
        texts = map(list, zip(*rows[start : start + arguments.batch_size], strict=True))
        with torch.no_grad():
            logits = model(**tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")).logits
        if model.config.num_labels == 1:
            found += [f"{float(row[0]):.3f}" for row in logits]
        else:
            found += [model.config.id2label[int(row.argmax())] for row in logits]
    pd.DataFrame({"prediction": found}).to_csv(arguments.out, sep="\t", index_label="index")


if __name__ == "__main__":
    main()
